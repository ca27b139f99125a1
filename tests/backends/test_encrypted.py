"""An encrypted location: what can be read of it without a key, what damage and forgery lead to, and its keys."""

from __future__ import annotations

import itertools
import subprocess
from contextlib import closing

import lmdb
import pytest

from prefixstore import LocationError, PrefixStore
from prefixstore.backends.encrypted import COPY, HEADER, EncryptedBackend
from prefixstore.backends.encryption import Header
from prefixstore.backends.keys import Keys, key_id
from prefixstore.backends.memory import MemoryBackend
from prefixstore.engine import keyspace
from prefixstore.engine.keyspace import record_row, tenant_of
from prefixstore.engine.pages import open_pages
from prefixstore.errors import UndecryptableError
from prefixstore.format.record import Record, Usage
from prefixstore.maintenance.archive import Archive
from tests.support.pages import make_page
from tests.support.places import KEY, MIB, SCHEMES, contents, fill, place, refusal, space

OLD, NEW, OF_ALICE = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
ALICE = space("alice-tenant")
SEQUENCES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 10], [20, 21, 22, 23, 24])


class Given:
    """Keys, the newest first, that can be changed while a store is open."""

    def __init__(self, *keys, **tenants):
        self.keys, self.tenants = keys, tenants

    def read(self):
        return Keys({key_id(key): key for key in self.keys}, self.tenants).text()


def opened(url, *keys, **tenants):
    return closing(open_pages(url, max_bytes=64 * MIB, key=Given(*keys, **tenants)))


def plain_rows(pages):
    """The rows of a location as they are stored."""
    with pages.rows._backend.view() as view:
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
        listed = b"\n".join(row.key + row.value for row in plain_rows(pages))
        pages.sync()
    files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    if url.startswith("postgresql"):
        with pytest.MonkeyPatch.context():
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
    assert refusal(url, key="none").startswith("LocationError: the location is encrypted; pass key=")
    missing = refusal(url, key=Given(OLD))
    assert "LocationError" in missing
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
    with pages.rows._backend.update() as draft:
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
    """All pages that can be read: record and payload."""
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
        first, second = pages.rows._safe.place(record_row(path[0])), pages.rows._safe.place(record_row(path[1]))
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
        names = [pages.rows._safe.place(record_row(key)) for key in path]
        with pages.rows._backend.view() as view:
            theirs = bytes(list(view.payloads(names))[1][1])
        with pages.rows._backend.update() as draft:
            draft.put(names[0], draft.get(names)[0], theirs)
        with pages.view() as view, pytest.raises(UndecryptableError):
            view.payload(path[0])


def test_one_damaged_header_is_replaced_and_two_are_an_error(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES)
        whole = dict(plain_rows(pages))[HEADER]
        change_row(pages, HEADER, lambda value: value[:50] + b"x" + value[51:])
    with opened(url, NEW) as pages:
        assert len(contents(pages)) == 6
        fill(pages, ALICE, [[50, 51]])
        assert dict(plain_rows(pages))[HEADER] == whole
        change_row(pages, HEADER, lambda value: value[:50] + b"x" + value[51:])
        change_row(pages, COPY, lambda value: value[:50] + b"x" + value[51:])
    assert "IncompatibleError" in refusal(url, key=Given(NEW))
    assert "damaged" in refusal(url, key=Given(NEW))


def test_a_location_that_was_emptied_keeps_its_secret_for_those_who_have_it_open():
    memory = MemoryBackend()
    backend = EncryptedBackend(memory, Given(NEW), parts=keyspace.PARTS, tenant_of=lambda salt: tenant_of(salt, b""))
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
    header = Header.unpack([rows.pop(HEADER)], "")
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
        assert pages.rows.rotate() > 10
        assert ids_in(pages) == ({key_id(NEW)},) * 2
        assert contents(pages) == before
        assert pages.rows.rotate() == 0
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


def test_who_lacks_a_key_that_another_process_has_begun_to_use_writes_nothing_until_it_has_it(tmp_path):
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
        two.rows.rotate()
        fill(one, ALICE, SEQUENCES[1:])
        assert ids_in(two) == ({key_id(NEW)},) * 2
        with pytest.raises(LocationError, match="was replaced"):
            one.rows.rotate()


@pytest.mark.parametrize("at", range(0, 12, 3))
def test_a_rotation_that_is_interrupted_goes_on(at, tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, OLD) as pages:
        fill(pages, ALICE, SEQUENCES)
        before = contents(pages)

    with opened(url, NEW, OLD) as pages:
        real, calls = pages.rows._backend.update, itertools.count()

        def update():
            if next(calls) == at:
                raise InterruptedError
            return real()

        pages.rows._backend.update = update
        rewritten = pages.rows._rewrite
        pages.rows._rewrite = lambda places: sum(rewritten([one]) for one in places)
        with pytest.raises(InterruptedError):
            pages.rows.rotate()
        del pages.rows._backend.update, pages.rows._rewrite
        assert contents(pages) == before
    with opened(url, OLD, NEW) as pages:
        assert contents(pages) == before
    with opened(url, NEW, OLD) as pages:
        pages.rows.rotate()
        assert ids_in(pages) == ({key_id(NEW)},) * 2
        assert contents(pages) == before


def test_a_tenant_without_its_key_is_gone_and_the_others_are_not(tmp_path):
    url, bob = f"lmdb://{tmp_path}/kv", space("bob")
    with opened(url, NEW, **{"alice-tenant": OF_ALICE}) as pages:
        fill(pages, ALICE, SEQUENCES)
        fill(pages, bob, SEQUENCES)
        assert len(contents(pages)) == 12
        assert pages.undecryptable() == 0
    with opened(url, NEW) as pages:
        assert {one[0].namespace for one in contents_or_nothing(pages).values()} == {bob.key}
        # six records, their child rows, and the settings
        assert pages.undecryptable() > 12
        # she can be served again, as a new tenant
        with pages.update() as transaction:
            key, record = make_page(b"new", [1, 2, 3, 4], parent=ALICE.key, namespace=ALICE.key)
            transaction.put_namespace(ALICE.key, ALICE.canonical)
            transaction.put(key, record, Usage(1), b"new")
        assert contents_or_nothing(pages)[key][2] == b"new"
    with Archive(url, key=Given(NEW)) as archive:
        archive.repair()
        assert archive.check() == []
        assert {one[0].namespace for one in contents(archive.backend).values()} >= {bob.key}


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
