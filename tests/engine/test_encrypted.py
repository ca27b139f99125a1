"""An encrypted location: what can be read of it without a key, what damage and forgery lead to, and its keys."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from itertools import count

import lmdb
import numpy as np
import pytest

from prefixstore import LocationError, PrefixStore
from prefixstore.backends.encryption_keys import HEADER, MAGIC, Keys, key_id, line_of
from prefixstore.backends.memory import MemoryBackend
from prefixstore.backends.sealing import Sealer
from prefixstore.engine import encrypted, keyspace
from prefixstore.engine.keyspace import tenant_of
from prefixstore.engine.pages import Pages, open_pages
from prefixstore.errors import IncompatibleError, UndecryptableError
from prefixstore.format.record import Record
from prefixstore.maintenance.archive import Archive
from tests.attacks import in_child
from tests.attacks.damaged_file import states
from tests.support import ROOT
from tests.support.places import KEY, MIB, SCHEMES, contents, fill, place, refusal, space
from tests.support.timeouts import wait_for

OLD, NEW, OF_ALICE, LATER = (bytes(range(start, start + 32)) for start in (0, 32, 64, 96))
ALICE = space("alice-tenant")
TENANT = {"alice-tenant": OF_ALICE}
SEQUENCES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 10], [20, 21, 22, 23, 24])


class Given:
    """Keys, the newest first, that can be changed while a store is open."""

    def __init__(self, *keys, forgotten=(), **tenants):
        self.keys, self.tenants, self.forgotten = keys, tenants, forgotten
        self.n_read = 0

    def read(self):
        self.n_read += 1
        lines = [*map(line_of, reversed(self.keys)), *(line_of(key, name) for name, key in self.tenants.items())]
        return "".join([*lines, *(f"tenant {name} forgotten:{key_id(OF_ALICE).hex()}\n" for name in self.forgotten)])


def opened(url, *keys, **tenants):
    return closing(open_pages(url, max_bytes=64 * MIB, key=Given(*keys, **tenants)))


def stored_key(pages, key):
    """Under which key the record of a page is stored."""
    with pages.encrypted.view() as view:
        return view.cipher.stored_key(keyspace.RECORD + key)


def plain_rows(pages):
    """The rows of a location as they are stored."""
    with pages.rows.view() as view:
        return view.ranges([keyspace.Range(b"", b"\xff" * 16)])[0]


@pytest.fixture(params=SCHEMES)
def url(request, tmp_path):
    return place(request.param, tmp_path, request)


# -- what can be read of it -------------------------------------------------------------------------------------------


def all_bytes(url, pages, tmp_path, request):
    """What whoever has a location finds: its rows and payloads, files with write-ahead logs, dumps."""
    rows = plain_rows(pages)
    with pages.rows.view() as view:
        found = [bytes(one[1]) for one in view.payloads([row.key for row in rows]) if one[1] is not None]
    directories, [scheme, *_] = [tmp_path], url.partition(":")
    if scheme.startswith("postgresql"):
        directories.append(request.getfixturevalue("postgres_server").data)
        found.append(subprocess.run(["pg_dump", url.replace("+psycopg", "")], capture_output=True, check=True).stdout)
    elif scheme == "s3":
        directories.append(request.getfixturevalue("seaweedfs").directory)
    elif scheme not in ("lmdb", "sqlite"):
        server = request.getfixturevalue("valkey_server")
        directories.append(server.directory)
        with server.client() as client:
            client.config_set("rdbcompression", "no")
            client.save()
    found += [path.read_bytes() for directory in directories for path in directory.rglob("*") if path.is_file()]
    return b"\n".join([*found, *(row.key + row.value for row in rows)])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_readable_is_in_any_file_dump_or_listing(scheme, tmp_path, request):
    for key in ("none", Given(NEW)):
        # not what other tests have stored in the server
        rng = np.random.default_rng()
        tokens, payload, salt = rng.integers(1 << 30, size=64).tolist(), rng.bytes(2000), rng.bytes(16).hex()
        settings, name = space(salt), f"the session {rng.bytes(16).hex()}".encode()
        url = place(scheme, tmp_path, request, name=f"kv-{type(key).__name__}")
        with closing(open_pages(url, max_bytes=64 * MIB, key=key)) as pages:
            [path] = fill(pages, settings, [tokens])
            with pages.update() as transaction:
                transaction.put_note(keyspace.bookmarks_note(settings.key), name, settings.key)
                record = transaction.record(path[0])
                transaction.put(path[0], record, transaction.usage(path[0]), payload[:1000])
            pages.sync()
            found = all_bytes(url, pages, tmp_path, request)
            known = [settings.key, settings.canonical, tenant_of(salt, b""), salt.encode(), name, payload[:64]]
            known += [*path, np.array(tokens[:4], "<i4").tobytes(), record.pack()[40:72]]
            if key == "none":
                assert all(secret in found for secret in known)
            else:
                assert not any(secret in found or secret.hex().encode() in found for secret in known)


def test_a_store_with_a_key_is_refused_without_and_the_reverse(url):
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES)
    assert f"it is encrypted, under the key {key_id(NEW).hex()}: set" in refusal(url, key="none")
    assert key_id(NEW).hex() in refusal(url, key=Given(OLD))
    with opened(url, OLD, NEW) as pages:
        assert len(contents(pages)) == 6


def test_a_store_that_was_open_before_does_not_mix_what_is_encrypted_and_what_is_not(tmp_path):
    secret, other = f"lmdb://{tmp_path}/secret", f"lmdb://{tmp_path}/plain"
    with closing(open_pages(secret, max_bytes=64 * MIB)) as plain, opened(secret, NEW) as pages:
        fill(pages, ALICE, SEQUENCES[:1])
        with pytest.raises(LocationError, match="is encrypted"):
            fill(plain, ALICE, SEQUENCES[1:])
        with pytest.raises(LocationError, match="is encrypted"), plain.update() as transaction:
            transaction.put_note(b"name", b"value")
        assert len(contents(pages)) == 2
    with closing(open_pages(other, max_bytes=64 * MIB)) as plain, opened(other, NEW) as pages:
        fill(plain, ALICE, SEQUENCES[:1])
        with pytest.raises(LocationError, match="is not encrypted"):
            contents(pages)
        with pytest.raises(LocationError, match="is not encrypted"):
            fill(pages, ALICE, SEQUENCES[1:])
        assert len(contents(plain)) == 2
    assert "is not encrypted" in refusal(other, key=Given(NEW))


# -- damage and forgery -----------------------------------------------------------------------------------------------


def change_row(pages, key, change):
    """Change a stored row, as somebody could who can write to the location."""
    with pages.rows.update() as draft:
        [value] = draft.get([key])
        draft.put(key, change(value))


def test_each_changed_row_is_a_miss_counted_and_mended(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES)
        before = contents(pages)
        names = [row.key for row in plain_rows(pages) if row.key != HEADER]
    for name in names:
        with opened(url, NEW) as pages:
            change_row(pages, name, lambda value: value[:-1] + bytes([value[-1] ^ 1]))
            with pages.view() as view:
                for key, (record, _, payload) in before.items():
                    found = view.records([key]).get(key, (None, None))[0]
                    assert not isinstance(found, Record) or (found, bytes(view.payload(key))) == (record, payload)
            assert pages.undecryptable() == 1
        with Archive(url, key=Given(NEW)) as archive:
            archive.repair()
            assert archive.check() == []
            fill(archive.backend, ALICE, SEQUENCES)
            assert {key: (one[0].tokens, one[2]) for key, one in contents(archive.backend).items()} == {
                key: (one[0].tokens, one[2]) for key, one in before.items()
            }
            assert archive.check() == []


@pytest.mark.parametrize("step", [73, pytest.param(1, marks=[pytest.mark.attack, pytest.mark.timeout(0)])])
@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_no_byte_of_a_file_that_is_flipped_gives_a_wrong_state_or_ends_the_process(scheme, step, tmp_path, monkeypatch):
    monkeypatch.setenv("PREFIXSTORE_KEY", "env:MY_KEYS")
    monkeypatch.setenv("MY_KEYS", KEY.read())
    done = in_child("damaged_file", scheme, tmp_path, step, seconds=900)
    assert json.loads(done.splitlines()[-1]).keys() >= {"used", "CorruptError"}


def in_memory(*keys, rows=None, **tenants):
    """An encrypted location whose rows are in memory, as it is opened with these keys."""
    pages, given = Pages(MemoryBackend() if rows is None else rows), Given(*keys, **tenants)
    pages.encrypt(given, Keys.read(given), lambda: None)
    return pages


def stored_rows(pages):
    """All rows of a location but the header, and their payloads, as they are stored."""
    names = [row.key for row in plain_rows(pages) if row.key != HEADER]
    with pages.rows.view() as view:
        return dict(zip(names, view.payloads(names), strict=True))


def test_no_row_or_payload_is_taken_for_another_one_or_for_what_was_there_before_a_rotation():
    pages, elsewhere = in_memory(OLD, **TENANT), in_memory(NEW, **TENANT)
    for one in (pages, elsewhere):
        fill(one, ALICE, SEQUENCES[:2])
        fill(one, space("bob"), SEQUENCES[:1])
    before, older = dict(states(pages)), stored_rows(pages)
    in_memory(NEW, OLD, rows=pages.rows, **TENANT).encrypted.rotate()
    pages = in_memory(NEW, rows=pages.rows, **TENANT)
    mine, theirs = stored_rows(pages), stored_rows(elsewhere)
    # the same pages have other names in another location
    assert mine.keys() & theirs.keys() == {b"t"}
    for name, (value, payload) in mine.items():
        others = [row for rows in (mine, older, theirs) for key, row in rows.items() if key[:1] == name[:1]]
        for other in others:
            for fake in ((other[0], payload), (value, other[1]), other, other[::-1]):
                if fake[0] is not None:
                    with pages.rows.update() as draft:
                        draft.put(name, *fake)
                    assert dict(states(pages)).items() <= before.items()
        with pages.rows.update() as draft:
            draft.put(name, value, payload)
    assert dict(states(pages)) == before


def test_a_header_cannot_be_changed_and_nobody_else_can_write_one(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES)
        whole = dict(plain_rows(pages))[HEADER]
    # with another key under this id, and with the key of a tenant
    forged = [
        MAGIC + bytes(Sealer({name: key}).seal(name, MAGIC, bytes(32) + name))
        for name, key in ((key_id(NEW), LATER), (key_id(OF_ALICE), OF_ALICE))
    ]
    for wrong in (b"x" + whole[1:], whole[:-1], whole[: len(MAGIC) + 3], whole + b"\0", *forged):
        with opened(url, NEW, **TENANT) as pages:
            change_row(pages, HEADER, lambda _, wrong=wrong: wrong)
            with pytest.raises((IncompatibleError, LocationError)):
                fill(pages, ALICE, [[50, 51]])
            said = refusal(url, key=Given(NEW, **TENANT)), refusal(url, key="none")
            change_row(pages, HEADER, lambda _: whole)
        assert said[0].startswith(("IncompatibleError", "LocationError"))
        assert wrong[0] != whole[0] or "LocationError: lmdb" in said[1]


# -- keys -------------------------------------------------------------------------------------------------------------


def ids_in(pages):
    """The ids of the keys under which rows are encrypted, and those that the location needs."""
    rows = dict(plain_rows(pages))
    del rows[HEADER]
    return {value[:8] for value in rows.values()}, set(map(bytes.fromhex, pages.encrypted.key_ids()))


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


def test_who_lacks_a_key_that_another_process_has_begun_to_use_finds_it_soon(tmp_path, monkeypatch):
    url, given = f"lmdb://{tmp_path}/kv", Given(LATER)
    with closing(open_pages(url, max_bytes=64 * MIB, key=given)) as one, opened(url, NEW, OLD, **TENANT) as two:
        fill(one, ALICE, [])
        # the file of keys has a new one when it is met: nothing is missed
        with opened(url, OLD, LATER) as other:
            other.encrypted.rotate()
        given.keys = (OLD,)
        fill(one, ALICE, SEQUENCES[:1])
        # it has not the next one yet, and is not read all the time
        monkeypatch.setattr(encrypted, "AGAIN_SECONDS", 1000)
        fill(two, ALICE, SEQUENCES[1:2])
        for _ in range(3):
            with pytest.raises(LocationError, match=key_id(NEW).hex()):
                fill(one, ALICE, SEQUENCES[2:])
        assert given.n_read == 2
        monkeypatch.setattr(encrypted, "AGAIN_SECONDS", 0)
        with monkeypatch.context() as patch:
            # it is gone for a moment
            patch.setattr(given, "read", (tmp_path / "none").read_text)
            with pytest.raises(LocationError, match=key_id(NEW).hex()):
                fill(one, ALICE, SEQUENCES[2:])
        # it has the new ones now, and the other process has replaced the old one
        given.keys, given.tenants = (NEW, OLD), TENANT
        assert two.encrypted.rotate()[1] == 0
        fill(one, ALICE, SEQUENCES[2:])
        assert given.n_read == 3
        assert contents(one) == contents(two)
        assert len(contents(one)) == 6
    # what was stored before the tenant had a key is under it after a rotation
    with opened(url, NEW, forgotten=TENANT) as pages:
        assert contents(pages) == {}


def test_a_rotation_beside_one_whose_newest_key_is_another_says_that_rows_are_left(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, OLD, NEW) as other, opened(url, NEW, OLD) as pages:
        fill(pages, ALICE, SEQUENCES[:1])
        rows_of, numbers = pages.encrypted._all, iter(range(100))

        def rows():
            fill(other, ALICE, [[50 + next(numbers)] * 5])
            yield from rows_of()

        pages.encrypted._all = rows
        assert pages.encrypted.rotate()[1] > 0
        assert len(pages.encrypted.key_ids()) == 2
        # both go on, and read what the other one writes
        assert contents(pages) == contents(other)


def test_a_page_of_one_tenant_that_is_sealed_by_the_key_of_another_is_a_miss(tmp_path):
    bob = space("bob")
    with opened(f"lmdb://{tmp_path}/kv", NEW, **TENANT) as pages:
        [path] = fill(pages, bob, SEQUENCES[2:])
        name = stored_key(pages, path[0])
        with pages.encrypted.view() as view:
            [(row, payload)] = view._view.payloads([name])
            sealer = view.cipher.sealer
            text, state = sealer.unseal(b"row" + name, row), sealer.unseal(b"payload" + name, payload)
            forged = [
                sealer.seal(key_id(OF_ALICE), *one) for one in ((b"row" + name, text), (b"payload" + name, state))
            ]
        for value, content in ((row, forged[1]), (forged[0], payload), forged):
            with pages.rows.update() as draft:
                draft.put(name, bytes(value), bytes(content))
            with pages.encrypted.view() as view, suppress(UndecryptableError):
                [(record, found)] = view.payloads([keyspace.RECORD + path[0]])
                assert not record
                assert found is None or value is not row


def test_what_is_encrypted_is_not_opened_without_a_key_if_its_header_was_deleted(url):
    with opened(url, NEW) as pages:
        fill(pages, ALICE, SEQUENCES)
        with pages.rows.update() as draft:
            draft.delete(HEADER)
    if url.startswith(("lmdb", "sqlite")):
        assert "the row that says how is gone" in refusal(url, key="none")
    assert "it has been tampered with" in refusal(url, key=Given(NEW))


def test_a_provider_that_hangs_does_not_keep_the_location(tmp_path, monkeypatch):
    monkeypatch.setattr(encrypted, "AGAIN_SECONDS", -1)
    url, given, goes_on = f"lmdb://{tmp_path}/kv", Given(OLD), threading.Event()
    with closing(open_pages(url, max_bytes=64 * MIB, key=given)) as one, opened(url, NEW, OLD) as two:
        given.keys = (NEW, OLD)
        fill(two, ALICE, SEQUENCES[:1])
        read, given.read = given.read, lambda: goes_on.wait(60) and read()
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(LocationError, match=key_id(NEW).hex()):
                fill(one, ALICE, SEQUENCES[1:])
        assert time.monotonic() - began < 30
        assert sum(thread.name == "prefixstore-keys" for thread in threading.enumerate()) == 1
        goes_on.set()
        wait_for(lambda: not any(thread.name == "prefixstore-keys" for thread in threading.enumerate()))
        fill(one, ALICE, SEQUENCES[1:])


class Ending(MemoryBackend):
    """Rows of a process that ends at one of its writes."""

    n_writes = 0

    @contextmanager
    def update(self):
        with super().update() as draft:
            yield draft
            self.n_writes -= 1
            if self.n_writes == 0:
                raise InterruptedError


def test_a_rotation_that_ends_at_any_of_its_writes_loses_nothing_and_goes_on():
    for n_writes in count(1):
        rows = Ending()
        fill(in_memory(OLD, rows=rows), ALICE, SEQUENCES)
        before = contents(in_memory(OLD, rows=rows))
        rows.n_writes = n_writes
        with suppress(InterruptedError):
            in_memory(NEW, OLD, rows=rows).encrypted.rotate()
        is_whole, rows.n_writes = rows.n_writes > 0, 0
        assert contents(in_memory(NEW, OLD, rows=rows)) == before
        assert in_memory(NEW, OLD, rows=rows).encrypted.rotate()[1] == 0
        assert contents(in_memory(NEW, rows=rows)) == before
        if is_whole:
            break
    assert n_writes > 8


def test_a_key_that_another_process_begins_to_use_during_a_rotation_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(encrypted, "AGAIN_SECONDS", -1)
    url, given = f"lmdb://{tmp_path}/kv", Given(NEW, OLD)
    with opened(url, OLD) as pages:
        fill(pages, ALICE, SEQUENCES)
        before = contents(pages)
    with closing(open_pages(url, max_bytes=64 * MIB, key=given)) as one, opened(url, LATER, NEW, OLD) as two:
        put_again = one.encrypted._put_again

        def other(keys):
            given.keys = (LATER, NEW, OLD)
            fill(two, ALICE, [[40, 41, 42]])
            put_again(keys)

        one.encrypted._put_again = other
        assert one.encrypted.rotate()[1] == 0
        assert ids_in(one)[0] <= ids_in(one)[1]
        assert key_id(OLD) not in ids_in(one)[1]
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
        assert pages.encrypted.rotate() == (23, 1)
        assert ids_in(pages) == ({key_id(NEW), key_id(OLD)},) * 2
        assert pages.undecryptable(delete=True) == 1
        assert pages.encrypted.rotate() == (0, 0)
        assert ids_in(pages) == ({key_id(NEW)},) * 2
    # one without rows is rotated, too
    with closing(Archive(url, key=Given(NEW))) as archive:
        archive.purge(everything=True)
    with opened(url, LATER, NEW) as pages:
        pages.encrypted.rotate()
    with opened(url, LATER) as pages:
        assert contents(pages) == {}


# -- tenants ----------------------------------------------------------------------------------------------------------


def test_a_location_needs_the_keys_of_all_tenants_that_have_one(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, NEW, **TENANT) as pages:
        fill(pages, ALICE, SEQUENCES)
        before = contents(pages)
    for others in ({}, {"alice-tenant": LATER}, {"bob": OLD}):
        assert f"needs the key {key_id(OF_ALICE).hex()}" in refusal(url, key=Given(NEW, **others))
    with opened(url, NEW, **TENANT) as pages:
        assert contents(pages) == before
        assert pages.encrypted.key_ids() == [key_id(NEW).hex()]


def test_a_forgotten_tenant_is_gone_and_the_others_are_not(tmp_path, monkeypatch, caplog):
    # many in a row of hers are not the end of what is stored
    monkeypatch.setattr(keyspace, "AT_ONCE", 2)
    url, bob, part = f"lmdb://{tmp_path}/kv", space("bob"), space(f"x/cache-salt-{'0' * 32}:alice")
    with opened(url, NEW, **{"x:alice": OF_ALICE}) as pages:
        for one in (space("x:alice"), part, bob):
            fill(pages, one, SEQUENCES)
        assert len(contents(pages)) == 18
        assert pages.undecryptable() == 0
    with opened(url, NEW, forgotten=["x:alice"]) as pages:
        assert {one[0].namespace for one in contents(pages).values()} == {bob.key}
        assert pages.undecryptable() > 24
        # once
        assert caplog.text.count(f"it needs the key {key_id(OF_ALICE).hex()}") == 1
        # she can be served again, as a new tenant
        fill(pages, space("x:alice"), [[50, 51, 52, 53, 54]])
        assert len(contents(pages)) == 8
    with Archive(url, key=Given(NEW, forgotten=["x:alice"])) as archive:
        archive.repair()
        assert archive.check() == []
        assert len(contents(archive.backend)) == 8
        assert archive.backend.undecryptable() == 0


def test_nothing_that_is_mended_of_a_tenant_is_under_the_key_of_the_store(tmp_path):
    with opened(f"lmdb://{tmp_path}/kv", NEW, **TENANT) as pages:
        fill(pages, ALICE, SEQUENCES)
        for row in plain_rows(pages):
            if row.key[:1] in b"cn":
                change_row(pages, row.key, lambda value: value[:-1] + bytes([value[-1] ^ 1]))
        # nothing says whose pages they are, until she stores something again
        for sequences in ([], [[30]]):
            fill(pages, ALICE, sequences) if sequences else None
            pages.reindex()
            with pages.update() as transaction:
                transaction.put_note(keyspace.bookmarks_note(ALICE.key), b"tokens", ALICE.key)
            under = {row.key[:1] for row in plain_rows(pages) if row.value.startswith(key_id(NEW))}
            assert not under & {b"c", b"n", b"o", b"r"}
        with pages.view() as view:
            assert view.note(keyspace.bookmarks_note(ALICE.key)) == b"tokens"
            assert len(view.children([ALICE.key], 0)) == 3


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
    with lmdb.open(location) as env, env.begin(write=True) as transaction:
        for key, value in list(transaction.cursor()):
            if key[:1] == b"p":
                transaction.put(key, value[:-1] + bytes([value[-1] ^ 1]))
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


def test_a_rotation_leaves_nothing_that_others_write_meanwhile_under_an_older_key(tmp_path):
    url = f"lmdb://{tmp_path}/kv"
    with opened(url, OLD) as writer, opened(url, NEW, OLD) as pages:
        fill(writer, ALICE, SEQUENCES[:1])
        rows_of = pages.encrypted._all

        def rows():
            for view, some in rows_of():
                yield view, some
                with suppress(LocationError):  # it lacks the newest key
                    fill(writer, ALICE, SEQUENCES[1:])

        pages.encrypted._all = rows
        assert pages.encrypted.rotate()[1] == 0
        assert not any(row.value.startswith(key_id(OLD)) for row in plain_rows(pages))
    with opened(url, NEW) as pages:
        assert pages.undecryptable() == 0
        assert len(contents(pages)) >= 2


@pytest.mark.attack
@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_a_rotation_that_is_killed_at_any_time_loses_nothing_and_goes_on(scheme, tmp_path, request):
    url, keys = place(scheme, tmp_path, request), tmp_path / "kv.key"
    sequences = [[n] * 4 + [i] * 4 for n in range(40) for i in range(10)]
    with opened(url, OLD) as pages:
        fill(pages, ALICE, sequences)
        before = contents(pages)
    keys.write_text(line_of(OLD) + line_of(NEW))
    keys.chmod(0o600)
    code = "import sys; from prefixstore.cli import main; print('begins', flush=True); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "key", "rotate", url]
    environment = {**os.environ, "PREFIXSTORE_KEY": f"file:{keys}"}
    killed, pause = 0, 0.0
    while True:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout.readline() == b"begins\n"
        # what it has done until then is left to chance
        with suppress(subprocess.TimeoutExpired):
            process.wait(pause)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        process.communicate()
        with opened(url, NEW, OLD) as pages:
            assert contents(pages) == before
        if process.returncode == 0:
            break
        pause += 0.05
    assert killed > 3
    with opened(url, NEW) as pages:
        assert contents(pages) == before
