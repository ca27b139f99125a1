"""An encrypted location: what can be read of it without a key, what damage and forgery lead to, and its keys."""

from __future__ import annotations

import itertools
import subprocess
from contextlib import closing, suppress

import lmdb
import pytest

from prefixstore import LocationError, PrefixStore
from prefixstore.backends import encrypted
from prefixstore.backends.encrypted import EncryptedBackend
from prefixstore.backends.encryption import Header
from prefixstore.backends.keys import COPY, HEADER, Keys, key_id, line_of
from prefixstore.backends.memory import MemoryBackend
from prefixstore.engine import keyspace
from prefixstore.engine.keyspace import record_row, tenant_of
from prefixstore.engine.pages import open_pages
from prefixstore.errors import IncompatibleError, UndecryptableError
from prefixstore.format.record import Record
from prefixstore.maintenance.archive import Archive
from tests.support.places import KEY, MIB, SCHEMES, contents, fill, place, refusal, space

OLD, NEW, OF_ALICE, LATER = (bytes(range(start, start + 32)) for start in (0, 32, 64, 96))
ALICE = space("alice-tenant")
SEQUENCES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 10], [20, 21, 22, 23, 24])


class Given:
    """Keys, the newest first, that can be changed while a store is open."""

    def __init__(self, *keys, forgotten=(), **tenants):
        self.keys, self.tenants, self.forgotten = keys, tenants, forgotten
        self.n_read = 0

    def read(self):
        self.n_read += 1
        lines = [*map(line_of, reversed(self.keys)), *(line_of(key, name) for name, key in self.tenants.items())]
        return "".join([*lines, *(f"forgotten {name}\n" for name in self.forgotten)])


def opened(url, *keys, **tenants):
    return closing(open_pages(url, max_bytes=64 * MIB, key=Given(*keys, **tenants)))


def inner(pages):
    """The backend that keeps what is encrypted."""
    return pages.encrypted._backend


def stored_key(pages, key):
    """Under which key the record of a page is stored."""
    with inner(pages).view() as rows:
        return pages.encrypted._cipher_in(rows).stored_key(record_row(key))


def plain_rows(pages):
    """The rows of a location as they are stored."""
    with inner(pages).view() as view:
        return view.ranges([keyspace.Range(b"", b"\xff" * 16)])[0]


@pytest.fixture(params=SCHEMES)
def url(request, tmp_path):
    return place(request.param, tmp_path, request)


# -- what can be read of it -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_readable_is_in_any_file_dump_or_listing(url, tmp_path, request):
    tokens = list(range(70_000, 70_000 + 64))
    payload = bytes(range(256)) * 8
    with opened(url, NEW) as pages:
        [path] = fill(pages, ALICE, [tokens])
        with pages.update() as transaction:
            transaction.put_note(b"bookmarks:" + ALICE.key, b"the name of a session", ALICE.key)
            record = transaction.record(path[0])
            transaction.put(path[0], record, transaction.usage(path[0]), payload[:1000])
        known = [
            *(record_row(key)[1:] for key in path),
            ALICE.key,
            ALICE.canonical,
            tenant_of("alice-tenant", b""),
            b"alice-tenant",
            b"bookmarks",
            b"the name of a session",
            b"".join(token.to_bytes(4, "little") for token in tokens[:4]),
            payload[:64],
            record.pack()[40:72],
        ]
        rows = plain_rows(pages)
        listed = b"\n".join(row.key + row.value for row in rows)
        with inner(pages).view() as view:
            payloads = [found[1] for found in view.payloads([row.key for row in rows if row.key[:1] == b"r"])]
            assert all(payloads)
            listed += b"".join(map(bytes, payloads))
        pages.sync()
    files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    if url.startswith("postgresql"):
        files += subprocess.run(["pg_dump", url.replace("+psycopg", "")], capture_output=True, check=True).stdout
        known += [secret.hex().encode() for secret in known]
    assert all(secret not in listed for secret in known)
    assert all(secret not in files for secret in known)
    # the same is found where it is not encrypted
    with closing(open_pages("memory:", max_bytes=MIB)) as plain:
        fill(plain, ALICE, [tokens])
        with plain.rows.view() as view:
            rows = view.ranges([keyspace.Range(b"", b"\xff" * 16)])[0]
        shown = b"".join(row.key + row.value for row in rows)
        assert all(secret in shown for secret in (ALICE.key, ALICE.canonical, b"alice-tenant", *path))


def test_a_store_with_a_key_is_refused_without_and_the_reverse(url):
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES)
    assert f"it is encrypted, under the key {key_id(NEW).hex()}: set" in refusal(url, key="none")
    missing = refusal(url, key=Given(OLD))
    assert key_id(NEW).hex() in missing
    with opened(url, OLD, NEW) as pages:
        assert len(contents(pages)) == 6


def test_a_store_without_a_key_is_not_encrypted_afterwards(url):
    with closing(open_pages(url, max_bytes=64 * MIB)) as pages:
        fill(pages, ALICE, SEQUENCES)
    assert "is not encrypted" in refusal(url, key=Given(NEW))
    with closing(open_pages(url, max_bytes=64 * MIB)) as pages:
        assert len(contents(pages)) == 6


def test_a_store_without_a_key_that_was_open_before_does_not_write_to_an_encrypted_location(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with closing(open_pages(url, max_bytes=64 * MIB)) as plain, opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES[:1])
        with pytest.raises(LocationError, match="is encrypted"):
            fill(plain, ALICE, SEQUENCES[1:])
        with pytest.raises(LocationError, match="is encrypted"), plain.update() as transaction:
            transaction.put_note(b"name", b"value")
        assert len(contents(pages)) == 2
        assert {row.key for row in plain_rows(pages)} >= {HEADER, COPY}


def test_a_store_with_a_key_that_was_open_before_neither_reads_nor_writes_what_is_not_encrypted(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with closing(open_pages(url, max_bytes=64 * MIB)) as plain, opened(url, NEW) as pages:
        fill(plain, ALICE, SEQUENCES[:1])
        with pytest.raises(LocationError, match="is not encrypted"):
            contents(pages)
        with pytest.raises(LocationError, match="is not encrypted"):
            fill(pages, ALICE, SEQUENCES[1:])
        assert len(contents(plain)) == 2


# -- damage and forgery -----------------------------------------------------------------------------------------------


def change_row(pages, key, change):
    """Change a stored row, as somebody could who can write to the location."""
    with inner(pages).update() as draft:
        [value] = draft.get([key])
        draft.put(key, change(value))


def test_each_changed_row_is_a_miss_counted_and_mended(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES)
        before = contents(pages)
        names = [row.key for row in plain_rows(pages)]
    for name in names:
        with opened(url, NEW) as pages:
            change_row(pages, name, lambda value: value[:-1] + bytes([value[-1] ^ 1]))
            with pages.view() as view:
                for key, (record, _, payload) in before.items():
                    found = view.records([key]).get(key, (None, None))[0]
                    assert not isinstance(found, Record) or (found, bytes(view.payload(key))) == (record, payload)
            assert pages.undecryptable() == (name not in (HEADER, COPY))
        with Archive(url, key=Given(NEW)) as archive:
            archive.repair()
            assert archive.check() == []
            fill(archive.backend, ALICE, SEQUENCES)
            assert {key: (one[0].tokens, one[2]) for key, one in contents(archive.backend).items()} == {
                key: (one[0].tokens, one[2]) for key, one in before.items()
            }
            assert archive.check() == []


@pytest.mark.attack
@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_every_changed_byte_of_a_file_is_a_miss_or_an_error(scheme, tmp_path, request):
    url = place(scheme, tmp_path, request)
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES[:2], size=300)
        before = contents(pages)
        rows = [row for row in plain_rows(pages) if row.key not in (HEADER, COPY)]
    for row in rows:
        for at in range(len(row.value)):
            with opened(url, NEW) as pages:
                changed = bytearray(row.value)
                changed[at] ^= 1 << at % 8
                change_row(pages, row.key, lambda _, changed=changed: bytes(changed))
                after = contents_or_nothing(pages)
                assert all(after.get(key) in (None, one) for key, one in before.items())
                change_row(pages, row.key, lambda _, row=row: row.value)


def contents_or_nothing(pages):
    """All pages that can be read."""
    found = {}
    with pages.view() as view:
        for key, record, usage in view.scan():
            if isinstance(record, Record):
                found[key] = (record, usage, bytes(view.payload(key)))
    return found


def test_rows_that_are_exchanged_or_moved_are_misses(tmp_path):
    url, other = f"lmdb://{tmp_path}/kv", f"lmdb://{tmp_path}/other"
    with opened(url, NEW) as pages, opened(other, NEW) as elsewhere:
        [path, *_] = fill(pages, ALICE, SEQUENCES)
        fill(elsewhere, ALICE, SEQUENCES)
        records = [row for row in plain_rows(pages) if row.key[:1] == b"r"]
        theirs = {row.key: row.value for row in plain_rows(elsewhere) if row.key[:1] == b"r"}
        # the same pages have other names in another location
        assert not theirs.keys() & {row.key for row in records}
        first, second = (
            stored_key(pages, path[0]),
            stored_key(pages, path[1]),
        )
        by_name = {row.key: row.value for row in records}
        change_row(pages, first, lambda _: by_name[second])
        change_row(pages, second, lambda _: next(iter(theirs.values())))
        with pages.view() as view:
            found = view.records(path)
            assert not any(isinstance(record, Record) for record, _ in found.values())


def test_a_payload_of_another_page_is_damage(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW) as pages:
        [path, *_] = fill(pages, ALICE, SEQUENCES)
        names = [stored_key(pages, key) for key in path]
        with inner(pages).view() as view:
            theirs = bytes(list(view.payloads(names))[1][1])
        with inner(pages).update() as draft:
            draft.put(names[0], draft.get(names)[0], theirs)
        with pages.view() as view, pytest.raises(UndecryptableError):
            view.payload(path[0])


def test_one_damaged_header_is_replaced_and_two_are_an_error(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES)
        whole = dict(plain_rows(pages))[HEADER]
    for at in (5, 50, whole.index(key_id(NEW).hex().encode()), len(whole) - 1):

        def damage(value, at=at):
            return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]

        with opened(url, NEW) as pages:
            change_row(pages, HEADER, damage)
        with opened(url, NEW) as pages:
            assert len(contents(pages)) >= 6
            fill(pages, ALICE, [[50, at]])
            assert dict(plain_rows(pages))[HEADER] == whole
    with opened(url, NEW) as pages:
        for row in (HEADER, COPY):
            change_row(pages, row, damage)
    assert "IncompatibleError" in refusal(url, key=Given(NEW))
    assert "LocationError" in refusal(url, key="none")


def test_a_header_of_somebody_else_is_an_error(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES)
        forged = Header(bytes(16), (key_id(NEW),)).pack(bytes(32), {key_id(NEW): OLD})
        for row in (HEADER, COPY):
            change_row(pages, row, lambda _: forged)
        with pytest.raises(IncompatibleError):
            fill(pages, ALICE, [[50, 51]])
    assert "IncompatibleError" in refusal(url, key=Given(NEW))


def test_an_update_while_the_backend_is_closed_does_not_replace_the_header(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES)
        before = dict(plain_rows(pages))[HEADER]
        pages.encrypted._found = None
        fill(pages, ALICE, [[50, 51]])
        assert dict(plain_rows(pages))[HEADER] == before


def test_a_location_that_was_emptied_keeps_its_secret_for_those_who_have_it_open():
    memory = MemoryBackend()
    given = Given(NEW)
    options = {"parts": keyspace.PARTS, "tenant_of": lambda salt: tenant_of(salt, b"")}
    backend = EncryptedBackend(memory, given, Keys.read(given), **options)
    with backend.update() as draft:
        draft.put(b"r" + bytes(32), b"value")
    with memory.update() as draft:
        for row in draft.ranges([keyspace.Range(b"", b"\xff" * 16)])[0]:
            draft.delete(row.key)
    with backend.update() as draft:
        draft.put(b"r" + bytes(32), b"again")
    with backend.view() as view:
        assert view.get([b"r" + bytes(32)]) == [b"again"]


# -- keys -------------------------------------------------------------------------------------------------------------


def ids_in(pages):
    """The ids of the keys under which rows are encrypted, and those that the location needs."""
    rows = dict(plain_rows(pages))
    header = Header.unpack(rows.pop(HEADER), "")
    del rows[COPY]
    return {value[1:5] for value in rows.values()}, set(header.keys)


def test_what_is_written_again_is_under_the_newest_key_and_rotation_does_it_for_all(url):
    with opened(url, OLD) as pages:
        fill(pages, ALICE, SEQUENCES)
        before = contents(pages)
    with opened(url, NEW, OLD) as pages:
        assert contents(pages) == before
        fill(pages, ALICE, [[30, 31, 32]])
        assert ids_in(pages) == ({key_id(OLD), key_id(NEW)},) * 2
        before = contents(pages)
        assert pages.encrypted.rotate() == (22, 0)
        assert ids_in(pages) == ({key_id(NEW)},) * 2
        assert contents(pages) == before
        assert pages.encrypted.rotate() == (0, 0)
    assert key_id(NEW).hex() in refusal(url, key=Given(OLD))
    with opened(url, NEW) as pages:
        assert contents(pages) == before


def test_two_processes_with_different_newest_keys_share_a_location(url):
    with opened(url, OLD, NEW) as one, opened(url, NEW, OLD) as two:
        fill(one, ALICE, SEQUENCES[:1])
        fill(two, ALICE, SEQUENCES[1:2])
        fill(one, ALICE, SEQUENCES[2:])
        assert contents(one) == contents(two)
        assert len(contents(one)) == 6
        with one.view() as view:
            assert view.count().pages == 6


def test_who_lacks_a_key_that_another_process_has_begun_to_use_writes_nothing_until_it_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(encrypted, "AGAIN_SECONDS", 0)
    url = f"lmdb://{tmp_path}/kv"
    first = Given(OLD)
    with closing(open_pages(url, max_bytes=64 * MIB, key=first)) as one, opened(url, NEW, OLD) as two:
        fill(one, ALICE, SEQUENCES[:1])
        fill(two, ALICE, SEQUENCES[1:2])
        with pytest.raises(LocationError, match=key_id(NEW).hex()):
            fill(one, ALICE, SEQUENCES[2:])
        # the file of keys has the new one now
        first.keys = (NEW, OLD)
        fill(one, ALICE, SEQUENCES[2:])
        assert contents(one) == contents(two)


def test_nothing_is_written_under_a_key_that_was_replaced(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, OLD, NEW) as one, opened(url, NEW, OLD) as two:
        fill(one, ALICE, SEQUENCES[:1])
        two.encrypted.rotate()
        fill(one, ALICE, SEQUENCES[1:])
        assert ids_in(two) == ({key_id(NEW)},) * 2
        with pytest.raises(LocationError, match="was replaced"):
            one.encrypted.rotate()


def test_keys_are_not_asked_for_all_the_time(tmp_path):
    url, first = f"lmdb://{tmp_path}/kv", Given(OLD)
    with closing(open_pages(url, max_bytes=64 * MIB, key=first)) as one, opened(url, NEW, OLD) as two:
        fill(two, ALICE, SEQUENCES)
        for _ in range(5):
            with pytest.raises(LocationError):
                fill(one, ALICE, SEQUENCES)
        assert first.n_read == 2


@pytest.mark.parametrize("at", range(0, 24, 5))
def test_a_rotation_that_is_interrupted_goes_on(at, tmp_path, monkeypatch):
    monkeypatch.setattr(encrypted, "REWRITTEN_AT_ONCE", 1)
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, OLD) as pages:
        fill(pages, ALICE, SEQUENCES)
        before = contents(pages)
    calls = itertools.count()

    def stop(_):
        if next(calls) == at:
            raise InterruptedError

    with opened(url, NEW, OLD) as pages:
        with pytest.raises(InterruptedError):
            pages.encrypted.rotate(stop)
        assert contents(pages) == before
    with opened(url, OLD, NEW) as pages:
        assert contents(pages) == before
    with opened(url, NEW, OLD) as pages:
        assert pages.encrypted.rotate()[1] == 0
        assert ids_in(pages) == ({key_id(NEW)},) * 2
        assert contents(pages) == before


def test_a_key_that_is_added_during_a_rotation_is_kept(tmp_path):
    url, given = f"lmdb://{tmp_path}/kv", Given(NEW, OLD)
    with opened(url, OLD) as pages:
        fill(pages, ALICE, SEQUENCES)
        before = contents(pages)
    with closing(open_pages(url, max_bytes=64 * MIB, key=given)) as one, opened(url, LATER, NEW, OLD) as two:
        given.keys = (NEW, OLD)

        def other(_):
            given.keys = (LATER, NEW, OLD)
            one.encrypted._read_keys()
            fill(two, ALICE, [[40, 41, 42]])

        assert one.encrypted.rotate(other)[1] == 0
        assert ids_in(one)[0] <= ids_in(one)[1]
        assert key_id(OLD) not in ids_in(one)[1]
        assert before.items() <= contents(two).items()
        assert two.encrypted.rotate()[1] == 0
    with opened(url, LATER) as pages:
        assert before.items() <= contents(pages).items()


def test_a_rotation_keeps_old_keys_that_are_still_needed(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, OLD) as pages:
        fill(pages, ALICE, SEQUENCES)
        [name, *_] = (row.key for row in plain_rows(pages) if row.key[:1] == b"r")
        change_row(pages, name, lambda value: value[:-1] + bytes([value[-1] ^ 1]))
    with opened(url, NEW, OLD) as pages:
        assert pages.encrypted.rotate() == (24, 1)
        assert ids_in(pages) == ({key_id(NEW), key_id(OLD)},) * 2
        assert pages.undecryptable(delete=True) == 1
        assert pages.encrypted.rotate() == (0, 0)
        assert ids_in(pages) == ({key_id(NEW)},) * 2


def test_who_has_a_key_that_was_replaced_forges_nothing(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, OLD) as pages:
        [path, *_] = fill(pages, ALICE, SEQUENCES)
        name = stored_key(pages, path[0])
        before = dict(plain_rows(pages))[name]
    with opened(url, NEW, OLD) as pages:
        pages.encrypted.rotate()
        change_row(pages, name, lambda _: before)
        assert not isinstance(records(pages, path)[path[0]], Record)


def records(pages, keys):
    with pages.view() as view:
        return {key: found[0] for key, found in view.records(keys).items()}


# -- tenants ----------------------------------------------------------------------------------------------------------

TENANT = {"alice-tenant": OF_ALICE}


def test_a_location_needs_the_keys_of_all_tenants_that_have_one(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW, **TENANT) as pages:
        fill(pages, ALICE, SEQUENCES)
        before = contents(pages)
    assert "needs the keys of 1 tenants" in refusal(url, key=Given(NEW))
    with opened(url, NEW, **TENANT) as pages:
        assert contents(pages) == before


def test_two_keys_of_one_tenant_are_two(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW, **TENANT) as pages:
        fill(pages, ALICE, SEQUENCES)
    assert "needs the keys of 1 tenants" in refusal(url, key=Given(NEW, **{"alice-tenant": LATER}))


def test_who_still_has_the_key_of_a_forgotten_tenant_does_not_bring_it_back(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW, **TENANT) as one, opened(url, NEW, forgotten=TENANT) as two:
        fill(one, ALICE, SEQUENCES)
        fill(two, space("bob"), SEQUENCES)
        header = dict(plain_rows(two))[HEADER]
        for number in range(3):
            fill(one, space("bob"), [[60 + number]])
            fill(two, space("bob"), [[70 + number]])
        assert dict(plain_rows(two))[HEADER] == header


def test_a_reader_that_meets_a_new_key_finds_it_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(encrypted, "AGAIN_SECONDS", 0)
    url, given = f"lmdb://{tmp_path}/kv", Given(OLD)
    with opened(url, OLD) as pages:
        fill(pages, ALICE, SEQUENCES)
    with closing(open_pages(url, max_bytes=64 * MIB, read_only=True, key=given)) as reader:
        before = contents(reader)
    with closing(open_pages(url, max_bytes=64 * MIB, key=given)) as reader, opened(url, NEW, OLD) as pages:
        assert contents(reader) == before
        pages.encrypted.rotate()
        given.keys = (NEW, OLD)
        with suppress(LocationError):
            contents(reader)
        assert contents(reader) == before


def test_an_open_store_learns_of_the_key_of_a_tenant(tmp_path, monkeypatch):
    monkeypatch.setattr(encrypted, "AGAIN_SECONDS", 0)
    url, given = f"lmdb://{tmp_path}/kv", Given(NEW)
    with closing(open_pages(url, max_bytes=64 * MIB, key=given)) as one:
        fill(one, ALICE, SEQUENCES[:1])
        given.tenants = TENANT
        with opened(url, NEW, **TENANT) as two:
            fill(two, ALICE, SEQUENCES[1:2])
        fill(one, ALICE, SEQUENCES[2:])
        # what was stored before is under it after a rotation
        assert one.encrypted.rotate()[1] == 0
    with opened(url, NEW, forgotten=TENANT) as pages:
        assert contents(pages) == {}


def test_a_forgotten_tenant_is_gone_and_the_others_are_not(tmp_path):
    url, bob, part = f"lmdb://{tmp_path}/kv", space("bob"), space(f"x/cache-salt-{'0' * 32}:alice")
    with opened(url, NEW, **{"x:alice": OF_ALICE}) as pages:
        for one in (space("x:alice"), part, bob):
            fill(pages, one, SEQUENCES)
        assert len(contents(pages)) == 18
        assert pages.undecryptable() == 0
    with opened(url, NEW, forgotten=["x:alice"]) as pages:
        assert {one[0].namespace for one in contents(pages).values()} == {bob.key}
        assert pages.undecryptable() > 24
        # she can be served again, as a new tenant
        fill(pages, space("x:alice"), SEQUENCES[:1])
        assert len(contents(pages)) == 8
    with Archive(url, key=Given(NEW, forgotten=["x:alice"])) as archive:
        archive.repair()
        assert archive.check() == []
        assert len(contents(archive.backend)) == 8
        assert archive.backend.undecryptable() == 0


def test_a_store_restores_from_an_encrypted_location_and_counts_what_it_cannot_decrypt(tmp_path, llama, monkeypatch):
    tokens = list(range(1, 600))
    llm = llama("llama", n_ctx=1024)
    location = str(tmp_path / "kv")
    with PrefixStore(location, llm, key=KEY) as store:
        llm.eval(tokens)
        store.capture()
        store.flush()
    llm = llama("llama", n_ctx=1024)
    with PrefixStore(location, llm, key=KEY) as store:
        assert store.restore(tokens) == 598
        assert store.check() == []
    with pytest.raises(LocationError, match="is encrypted"):
        PrefixStore(location)
    monkeypatch.setenv("PREFIXSTORE_KEY", "env:MINE")
    monkeypatch.setenv("MINE", KEY.read())
    env = lmdb.open(location, max_dbs=3)
    with env.begin(write=True) as transaction:
        payloads = env.open_db(b"payloads", transaction)
        for key, value in list(transaction.cursor(payloads)):
            transaction.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=payloads)
    env.close()
    llm = llama("llama", n_ctx=1024)
    with PrefixStore(location, llm) as store:
        assert store.restore(tokens) == 0
        assert store.stats().unreadable["undecryptable"] >= 1


def test_two_locations_have_one_key_or_two(tmp_path):
    near, far = str(tmp_path / "near"), f"sqlite:///{tmp_path}/far.db"
    for keys, of_far in ((KEY, KEY), ([KEY, Given(NEW)], Given(NEW)), (["none", KEY], KEY)):
        with PrefixStore([near, far], key=keys):
            pass
        assert refusal(far, key=of_far) == "opened"
        for path in tmp_path.glob("**/*"):
            if path.is_file():
                path.unlink()
    assert "list of two" in refused(near, [KEY])


def refused(location, key):
    with pytest.raises(ValueError, match="key must") as raised:
        PrefixStore(location, key=key)
    return str(raised.value)
