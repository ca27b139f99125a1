"""Object storage: the contract on real servers, and what is specific to it."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
import xxhash
import zstandard

from prefixstore.backends import open_backend
from prefixstore.backends.contract import ConflictError
from prefixstore.backends.objects import library as library_module
from prefixstore.backends.objects import log as log_module
from prefixstore.backends.objects import strays as strays_module
from prefixstore.backends.objects import transaction as transaction_module
from prefixstore.backends.objects.address import Address
from prefixstore.backends.objects.client import Client
from prefixstore.backends.objects.manifest import HEAD, LARGEST_SEGMENT, SEGMENT_MAGIC, Segment, name_of
from prefixstore.backends.objects.pages import Pages
from prefixstore.engine.budget import Budget
from prefixstore.engine.invariants import violations
from prefixstore.errors import (
    CorruptError,
    InvalidParameterError,
    LocationError,
    MissingExtraError,
    StorageError,
    UnavailableError,
)
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import Usage
from prefixstore.testing.together import in_child
from tests.support import PATIENCE, python
from tests.support.engines import A, B, Store, store_of
from tests.support.http_proxy import HTTPProxy
from tests.support.object_contract import ObjectsContract
from tests.support.pages import make_page
from tests.support.places import MIB, contents, fill, opened, refusal, space
from tests.support.s3 import prefix_on

pytest.importorskip("obstore")


class _Objects(ObjectsContract):
    def url(self):
        raise NotImplementedError

    def open_backend(self, tmp_path):
        place = tmp_path / "url"
        if not place.exists():
            place.write_text(self.url())
        return open_backend(place.read_text(), max_bytes=64 * MIB)


@pytest.mark.slow
class TestSeaweedFS(_Objects):
    @pytest.fixture(autouse=True)
    def _server(self, new_prefix):
        self.url = new_prefix


class TestMoto(_Objects):
    @pytest.fixture(autouse=True)
    def _server(self, moto, credentials):
        self.url = lambda: prefix_on(moto)

    # Crowds and random rounds take most of the time of this server, and each run has them with the other one.
    @pytest.mark.attack
    def test_many_threads_read_whole_transactions_while_others_write(self, tmp_path):
        super().test_many_threads_read_whole_transactions_while_others_write(tmp_path)

    @pytest.mark.attack
    def test_transactions_of_threads_take_turns(self, tmp_path):
        super().test_transactions_of_threads_take_turns(tmp_path)

    @pytest.mark.attack
    def test_a_child_forked_while_another_thread_writes_does_not_hang(self, tmp_path):
        super().test_a_child_forked_while_another_thread_writes_does_not_hang(tmp_path)

    @pytest.mark.attack
    def test_used_grows_by_no_more_than_the_cost(self, tmp_path):
        super().test_used_grows_by_no_more_than_the_cost(tmp_path)

    @pytest.mark.attack
    def test_sizes_are_those_of_all_pages_whatever_was_done_to_them(self, tmp_path):
        super().test_sizes_are_those_of_all_pages_whatever_was_done_to_them(tmp_path)

    @pytest.mark.attack
    def test_children_and_facts_of_random_trees_are_those_that_a_scan_finds(self, tmp_path):
        super().test_children_and_facts_of_random_trees_are_those_that_a_scan_finds(tmp_path)


def names(backend):
    """The names of all objects of a location."""
    return {one.name for one in backend.client.list(None)}


def names_in(url):
    return {one.name for one in Client(Address.parse(url)).list(None)}


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://bucket/a//b", "empty segment"),
        ("s3://bucket/../b", "empty segment"),
        ("s3://bucket/a?secret_access_key=hunter2", "unknown option"),
        ("s3://me:hunter2@bucket/a", "credentials"),
        ("s3://bucket/a?endpoint=ftp://host", "endpoint must be"),
        ("s3://bucket/a?endpoint=http://me:hunter2@host", "endpoint must be"),
        ("s3://bucket/a?timeout=hunter2", "number of seconds"),
        ("s3://bucket/a?anonymous=hunter2", "true or false"),
        ("gs://bucket/a?endpoint=http://host", "unknown option"),
        ("s3://bucket/a?endpoint=http://[::1", "endpoint must be"),
        ("s3://bucket/a?endpoint=http://host:99999", "endpoint must be"),
        ("s3://bucket/a?endpoint=http:// host", "endpoint must be"),
        ("s3://bucket/a?region=eu%0Awest", "region must have"),
        ("s3://bucket/a?region=", "region must have"),
        ("az://bucket/a?account=a.b/c", "account must have"),
        ("s3://my%20bucket/a", "name of a bucket"),
        ("s3://bucket:80/a", "name of a bucket"),
    ],
)
def test_what_is_no_address_is_refused_without_repeating_a_secret(url, says):
    with pytest.raises(InvalidParameterError, match=says) as caught:
        open_backend(url, max_bytes=MIB)
    assert "hunter2" not in str(caught.value) or "=hunter2" in str(caught.value).replace("secret_access_key", "")
    if "key" in url or "me:" in url:
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["http://host:99999", "http://[::1"])
def test_an_endpoint_in_the_environment_that_is_none_is_an_error_of_ours(endpoint, credentials, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(UnavailableError, match="AWS_ENDPOINT_URL"):
        open_backend("s3://bucket/prefix", max_bytes=MIB)


def test_addresses_of_every_kind_are_accepted():
    for url in (
        "s3://my-bucket.name/a/b%20c?endpoint=http://[::1]:8333&region=eu-central-1",
        "s3://b_1?endpoint=https://s3.example.com/path",
        "az://$web/a?account=name1",
    ):
        assert Address.parse(url).shown == url


@pytest.mark.slow
def test_a_location_is_shown_as_it_was_given(new_prefix):
    url = new_prefix()
    with opened(url) as backend:
        assert backend.location == url
        assert "secret" not in repr(backend).lower()
        assert not backend.is_local


def test_without_obstore_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(library_module, "_loaded", None)
    monkeypatch.setattr(library_module, "NAME", "_not_there")
    with pytest.raises(MissingExtraError, match=r'needs obstore, .*; pip install "prefixstore\[s3\]"'):
        open_backend("s3://bucket/prefix", max_bytes=MIB)


# -- opening -----------------------------------------------------------------------------------------------------------


def test_read_only_makes_nothing_and_writes_nothing(new_prefix):
    url = new_prefix()
    assert refusal(url, read_only=True).startswith("LocationError: ")
    with opened(url) as backend:
        before = names(backend)
        assert before == {HEAD}
        ((key,),) = fill(backend, space(), [[1, 2, 3, 4]])
    with opened(url, read_only=True) as reader:
        assert set(contents(reader)) == {key}
        for use in (lambda: reader.update().__enter__(), reader.scrub, reader.reindex, reader.compact):
            with pytest.raises(UnavailableError, match="read-only"):
                use()
        with reader.view() as view:
            assert list(view.flaws()) == []


def test_a_bucket_that_does_not_exist_is_a_clear_error(moto, credentials):
    assert "create the bucket" in refusal(f"s3://nowhere/a?endpoint={moto.endpoint}")


def test_a_server_that_ignores_conditions_is_refused_and_nothing_is_left(moto, credentials):
    with closing(HTTPProxy(moto.endpoint, drop_headers=("if-",))) as proxy:
        url = prefix_on(moto, proxy.endpoint)
        message = refusal(url)
        assert message.startswith("LocationError: ")
        assert "ignores conditions" in message
        assert names_in(url.replace(proxy.endpoint, moto.endpoint)) == set()


def test_a_server_is_tried_once_and_another_one_again(seaweedfs, credentials):
    with closing(HTTPProxy(seaweedfs.endpoint)) as proxy:
        url = prefix_on(seaweedfs, proxy.endpoint)
        for _ in range(2):
            open_backend(url, max_bytes=MIB).close()
        tried = [path for method, path in proxy.requests if "/probes/" in path and method == "PUT"]
        assert len(tried) == 4
        direct = url.replace(proxy.endpoint, seaweedfs.endpoint)
        with opened(direct) as backend:
            assert len(backend._log._head.tried) == 2


def test_a_directory_is_refused_because_its_writes_have_no_conditions(tmp_path):
    message = refusal(f"file://{tmp_path}/kv")
    assert message.startswith("InvalidParameterError: ")
    assert "lmdb://" in message
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"{}", "CorruptError"),
        (b'{"magic":"other","format":1}', "another application"),
        (b'{"magic":"prefixstore","format":9}', "upgrade"),
        (
            b'{"magic":"prefixstore","format":1,"store":"a","segments":[["log/a",2,2,1,1]],"recent":[],"tried":[]}',
            "gaps",
        ),
        (
            b'{"magic":"prefixstore","format":1,"store":"a","segments":[["log/a",1,1,1,1]],"recent":[],"tried":[]}',
            "missing",
        ),
        (
            b'{"magic":"prefixstore","format":1,"store":"a","segments":[["log/a",1,1,1e999,1]],"recent":[],"tried":[]}',
            "is damaged",
        ),
    ],
)
def test_what_is_not_ours_or_damaged_is_refused_and_untouched(new_prefix, head, says):
    url = new_prefix()
    client = Client(Address.parse(url))
    client.create(HEAD, head)
    assert says in refusal(url)
    assert bytes(client.get(HEAD)[0]) == head


def test_a_damaged_segment_is_found(new_prefix):
    url = new_prefix()
    with opened(url) as backend:
        fill(backend, space(), [[1, 2, 3, 4]])
        (segment,) = backend._log.segments()
        packed, version = backend.client.get(segment)
        backend.client.replace(segment, bytes(packed[:-1]) + b"\0", version)
    assert "is damaged" in refusal(url)


@pytest.mark.parametrize("size", [1 << 62, LARGEST_SEGMENT + 1, None])
def test_a_segment_does_not_say_how_much_memory_is_reserved(size):
    # a frame of zstd with one segment: what it claims to hold, and nothing
    head = b"\xe0" + size.to_bytes(8, "little") if size is not None else b"\0\x40"
    frame = b"\x28\xb5\x2f\xfd" + head + b"\x01\0\0"
    with pytest.raises(CorruptError, match="damaged"):
        Segment.unpack("here", SEGMENT_MAGIC + xxhash.xxh3_64_digest(frame) + frame)
    assert Segment.unpack("here", Segment().pack()).is_empty


@pytest.mark.slow
def test_processes_that_make_a_store_at_once_all_get_it(new_prefix):
    url, start = new_prefix(), threading.Barrier(4)

    def make(number):
        start.wait()
        with opened(url) as backend:
            return fill(backend, space(), [[number] * 4])[0][0]

    with ThreadPoolExecutor(4) as threads:
        keys = set(threads.map(make, range(4)))
    with opened(url) as backend:
        assert set(contents(backend)) == keys
    assert len(keys) == 4


# -- the log -----------------------------------------------------------------------------------------------------------


def test_a_lookup_is_one_small_request_when_nothing_was_committed(new_prefix):
    with opened(new_prefix()) as backend:
        ((key, *_),) = fill(backend, space(), [[1, 2, 3, 4, 5]])
        before = backend.client.n_requests
        with backend.view() as view:
            assert view.leading([key])
            view.neighbors(key, b"")
            view.changes(0)
        assert backend.client.n_requests == before + 1


@pytest.mark.slow
def test_many_commits_become_few_segments_and_followers_read_only_what_is_new(new_prefix, monkeypatch):
    monkeypatch.setattr(log_module, "MANY_SEGMENTS", 12)
    monkeypatch.setattr(log_module, "LEFT_SEGMENTS", 4)
    url, chance = new_prefix(), random.Random(7)
    with opened(url) as one, opened(url) as often, opened(url) as seldom:
        for number in range(120):
            with one.update() as transaction:
                transaction.put_note(b"number", str(number).encode())
                for _ in range(chance.choice([0, 1, 3])):
                    key, record = make_page(payload := chance.randbytes(50), [chance.randrange(40)])
                    if chance.random() < 0.4:
                        transaction.delete(key)
                    elif chance.random() < 0.4:
                        transaction.touch(key, Usage(number, 1), announce=chance.random() < 0.5)
                    else:
                        transaction.put(key, record, Usage(number), payload)
            if number % 3 == 0:
                require_same(one, often)
            if number % 50 == 49:
                require_same(one, seldom)
        assert len(one._log.segments()) <= 13
        with opened(url) as new:
            require_same(one, new)
        one.scrub()
        assert len(one._log.segments()) == 1
        require_same(one, seldom)
        require_same(one, often)
        # one head, one segment, a payload for each page
        with one.view() as view:
            assert len(names(one)) == 2 + view.used.entries
            assert list(view.flaws()) == []


def require_same(one, other):
    """Two backends on one location know the same."""
    with one.view() as view, other.view() as seen:
        assert (view.generation, view.used, view.sizes) == (seen.generation, seen.used, seen.sizes)
        assert view.note(b"number") == seen.note(b"number")
        since = max(view.generation - 5, 0)
        assert view.changes(since) == seen.changes(since)
        assert one._log.pages.entries == other._log.pages.entries
        assert one._log.pages.children == other._log.pages.children
        assert one._log.pages.dead == other._log.pages.dead
    assert contents(one) == contents(other)


def test_a_store_that_was_deleted_and_made_again_is_read_from_the_beginning(new_prefix):
    url = new_prefix()
    with opened(url) as old:
        fill(old, space(), [[1, 2, 3, 4]])
        old.client.delete([one.name for folder in ("log/", "pages/") for one in old.client.list(folder)] + [HEAD])
        with opened(url) as new:
            ((key,),) = fill(new, space(), [[5, 6, 7, 8]])
        assert set(contents(old)) == {key}


@pytest.mark.slow
@pytest.mark.parametrize("server", ["seaweedfs", "moto"])
def test_a_store_that_was_deleted_is_made_again_by_those_who_use_it(server, request, credentials):
    url = prefix_on(request.getfixturevalue(server))
    with store_of(open_backend(url, max_bytes=MIB)) as store, opened(url, read_only=True) as reader:
        client = store.backend.client

        def delete():
            client.delete([one.name for one in client.list(None)])

        store.put(A)
        delete()
        with pytest.raises(LocationError, match="deleted"), reader.view():
            raise AssertionError("it opened")
        assert store.match(A) == 0
        assert (store.put(A), store.fetch(A)) == (3, 3)
        delete()
        assert store.put(B) == 3
        assert (store.fetch(A), store.fetch(B)) == (0, 3)
        # while a transaction is open

        def write():
            with store.backend.update() as transaction:
                transaction.put_note(b"a", b"b")
                delete()

        with pytest.raises(StorageError):
            write()
        assert (store.fetch(B), store.put(B), store.fetch(B)) == (0, 3, 3)


def test_payloads_to_be_deleted_are_read_while_nobody_adds_to_them(new_prefix):
    class Watched(dict):
        def __iter__(self):
            with ThreadPoolExecutor(1) as other:
                assert not other.submit(pages.lock.acquire, False).result()
            return super().__iter__()

    with opened(new_prefix()) as backend:
        ((key,),) = fill(backend, space(), [[1, 2, 3, 4]])
        pages = backend._log.pages
        pages.dead = Watched(pages.dead)
        with backend.update() as transaction:
            transaction.delete(key)
        assert not [name for name in names(backend) if name.startswith("pages/")]


def test_a_store_that_was_restored_from_a_backup_is_read_from_the_beginning(new_prefix):
    with opened(new_prefix()) as backend:
        fill(backend, space(), [[1, 2, 3, 4]])
        backup = bytes(backend.client.get(HEAD)[0])
        fill(backend, space(), [[5, 6, 7, 8]])
        before = contents(backend)
        with backend.view() as view:
            seen = view.generation
        backend.client.replace(HEAD, backup, backend.client.get(HEAD)[1])
        assert len(contents(backend)) == len(before) - 1
        # another change under a number that was seen: nobody who has seen it takes it for the same
        fill(backend, space(), [[9, 10, 11, 12]])
        with backend.view() as view:
            assert view.generation > seen
            assert view.changes(seen) is None
            assert len(view.changes(view.generation - 1)) == 1


@pytest.mark.slow
def test_an_interrupt_while_news_are_entered_leaves_nothing_half_known(new_prefix, monkeypatch):
    url = new_prefix()
    with opened(url) as one, opened(url) as two:
        for number in range(3):
            fill(one, space(), [[number] * 8])
        for at in range(1, 12):
            fill(one, space(), [[100 + at] * 8, [200 + at] * 8])
            calls, count = [], Pages._count

            def interrupted(self, *arguments, at=at, calls=calls, count=count):
                calls.append(at)
                if len(calls) == at:
                    raise KeyboardInterrupt
                count(self, *arguments)

            with monkeypatch.context() as patched:
                patched.setattr(Pages, "_count", interrupted)
                with suppress(KeyboardInterrupt), two.view():
                    pass
            require_same(one, two)


# -- writers side by side ----------------------------------------------------------------------------------------------


def test_transactions_that_do_not_contradict_each_other_are_both_committed(new_prefix):
    url = new_prefix()
    with opened(url) as one, opened(url) as two:
        (path,) = fill(one, space(), [[1] * 8])
        with one.update() as transaction:
            key, record = make_page(b"one", [9], parent=path[-1], start=8, namespace=space().key)
            transaction.put(key, record, Usage(1), b"one")
            transaction.touch(path[0], Usage(5))
            ((other,),) = fill(two, space(), [[2] * 4])
            with two.update() as meanwhile:
                meanwhile.touch(path[0], Usage(6))
                meanwhile.put(key, record, Usage(1), b"one")
        assert set(contents(one)) == set(contents(two)) == {*path, key, other}
        assert contents(two)[key][2] == b"one"
        require_same(one, two)


CONTRADICTIONS = {
    "the parent is deleted": (
        lambda t, path, new: t.put(new.key, new, Usage(1), b"new"),
        lambda t, path, new: t.delete(path[-1]),
    ),
    "what is deleted is followed": (
        lambda t, path, new: t.delete(path[-1]),
        lambda t, path, new: t.put(new.key, new, Usage(1), b"new"),
    ),
    "what is deleted is pinned": (
        lambda t, path, new: t.delete(path[-1]),
        lambda t, path, new: t.touch(path[-1], Usage(1, pinned=True), announce=True),
    ),
    "what is packed is deleted": (
        lambda t, path, new: t.put(path[-1], t.record(path[-1]), Usage(1), t.payload(path[-1])),
        lambda t, path, new: t.delete(path[-1]),
    ),
    "both announce a usage": (
        lambda t, path, new: t.touch(path[0], Usage(7, pinned=True), announce=True),
        lambda t, path, new: t.touch(path[0], Usage(8, expires=9), announce=True),
    ),
    "both write a note": (lambda t, path, new: t.put_note(b"a", b"1"), lambda t, path, new: t.put_note(b"a", b"2")),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_transaction_that_contradicts_another_is_refused_and_leaves_nothing(new_prefix, case):
    mine, theirs = CONTRADICTIONS[case]
    url = new_prefix()
    with opened(url) as one, opened(url) as two:
        (path,) = fill(one, space(), [[1] * 8])
        _, new = make_page(b"new", [9], parent=path[-1], start=8, namespace=space().key)
        with pytest.raises(ConflictError), one.update() as transaction:  # noqa: PT012 - what is raised at its end
            mine(transaction, path, new)
            with two.update() as meanwhile:
                theirs(meanwhile, path, new)
        require_same(one, two)
        two.reclaim()
        with one.view() as view:
            payloads = [name for name in names(one) if name.startswith("pages/")]
            assert len(payloads) == view.used.entries


def test_a_note_that_others_change_at_the_same_time_is_changed_by_all(new_prefix):
    url = new_prefix()
    stores = [Store(open_backend(url, max_bytes=MIB)) for _ in range(3)]

    def count(store):
        for _ in range(5):
            store.engine.change_note(b"n", lambda old: str(int(old or b"0") + 1).encode())

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(count, stores))
    assert stores[0].engine.note(b"n") == b"15"
    for store in stores:
        store.close()


# -- what is left, and what is really deleted --------------------------------------------------------------------------


def test_payloads_of_deleted_pages_are_deleted_even_if_that_failed_at_first(new_prefix, monkeypatch):
    url = new_prefix()
    with opened(url) as one, opened(url) as two:
        (path,) = fill(one, space(), [[1] * 8])
        with monkeypatch.context() as failing:
            failing.setattr(Client, "delete", lambda *_: (_ for _ in ()).throw(UnavailableError("no")))
            with one.update() as transaction:
                transaction.delete(path[1])
        assert len([name for name in names(one) if name.startswith("pages/")]) == 2
        # another process does it with its next commit
        fill(two, space(), [[2] * 4])
        assert len([name for name in names(one) if name.startswith("pages/")]) == 2
        assert not [name for name in names(one) if path[1].hex() in name]
        fill(two, space(), [[3] * 4])
        assert two._log.pages.dead == {}


def test_strays_are_found_when_they_are_old_and_removed_by_a_repair(new_prefix, monkeypatch):
    with opened(new_prefix()) as backend:
        (path,) = fill(backend, space(), [[1] * 4])
        client = backend.client
        stray = name_of(path[0], b"another!")
        for name in (stray, name_of(b"k" * 32, b"another!"), "log/0000", "probes/0000"):
            client.create(name, b"left by a writer that died")
        with backend.view() as view:
            # they may belong to a transaction that is open
            assert list(view.flaws()) == []
        backend.reindex()
        assert stray in names(backend)
        monkeypatch.setattr(strays_module, "GRACE_SECONDS", -1.0)
        with backend.view() as view:
            ((rule, key, message),) = view.flaws()
        assert (rule, key) == ("index", b"")
        assert message.startswith("4 objects")
        before = contents(backend)
        backend.reindex()
        assert contents(backend) == before
        with backend.view() as view:
            assert list(view.flaws()) == []
        assert len(names(backend)) == 3


def test_nothing_of_a_purged_page_is_left_after_a_scrub(new_prefix):
    url, secret = new_prefix(), [0x5EC2E7] * 4
    with opened(url) as backend:
        (path,) = fill(backend, space(), [secret])
        fill(backend, space(), [[1] * 4])
        payload = contents(backend)[path[0]][2]
        with backend.update() as transaction:
            transaction.delete(path[0])
        backend.scrub()
        for name in names(backend):
            stored = bytes(backend.client.get(name)[0])
            if name.startswith("log/"):
                stored = zstandard.decompress(stored[16:], max_output_size=1 << 30)
            assert as_tokens(secret).tobytes() not in stored
            assert payload not in stored
        assert len(contents(backend)) == 1


def test_a_transaction_that_takes_too_long_is_given_up(new_prefix, monkeypatch):
    with opened(new_prefix()) as backend:
        monkeypatch.setattr(transaction_module, "GRACE_SECONDS", 0.0)
        with pytest.raises(UnavailableError, match="too long"):
            fill(backend, space(), [[1] * 4])
        assert names(backend) == {HEAD}


def test_a_missing_payload_is_corrupt_and_a_check_names_it(new_prefix):
    with opened(new_prefix()) as backend:
        (path,) = fill(backend, space(), [[1] * 8])
        backend.client.delete([name for name in names(backend) if path[1].hex() in name])
        with backend.view() as view:
            assert view.payload(path[1]) is None
            with pytest.raises(CorruptError, match="no payload"):
                list(view.fetch(path))
            assert [one.rule for one in violations(view, Budget(MIB))] == ["payload"]


def test_a_page_that_is_deleted_or_put_again_while_it_is_read_is_missing_or_new(new_prefix):
    url = new_prefix()
    with opened(url) as one, opened(url) as two:
        (path,) = fill(one, space(), [[1] * 12])
        with one.view() as view:
            entries = [(key, one._log.pages.entries[key]) for key in path]
            with two.update() as transaction:
                transaction.delete(path[2])
                _, record = make_page(b"again", [1] * 4, parent=path[0], start=4, namespace=space().key)
                transaction.put(path[1], record, Usage(1), b"again")
            found = [view._read(*each) for each in entries]
        assert found[2] is None
        assert (found[1][0].record, bytes(found[1][1])) == (record, b"again")
        assert bytes(found[0][1]) == contents(one)[path[0]][2]


@pytest.mark.slow
def test_no_payload_is_sent_twice(seaweedfs, credentials):
    """Neither by another process that has computed the same, nor when a commit has to come after another one."""
    with closing(HTTPProxy(seaweedfs.endpoint)) as proxy:
        url = prefix_on(seaweedfs, proxy.endpoint)
        with store_of(open_backend(url, max_bytes=MIB)) as one, store_of(open_backend(url, max_bytes=MIB)) as two:
            assert one.put(A) == 3
            two.put(A)
            with two.backend.update() as transaction:
                key, record = make_page(b"x", [1])
                transaction.put(key, record, Usage(1), b"x")
                transaction.put_namespace(record.namespace, b"{}")
                with one.backend.update() as first:
                    first.put_note(b"a", b"b")
            sent = [path for method, path in proxy.requests if method == "PUT" and "/pages/" in path]
        assert len(sent) == 4


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_grandchild_uses_the_location_and_its_ancestors_go_on(new_prefix):
    with opened(new_prefix()) as backend:
        keys = fill(backend, space(), [[1] * 4])[0]

        def put(generation):
            keys.extend(fill(backend, space(), [[generation] * 4])[0])
            return set(contents(backend)) == set(keys)

        def child():
            return put(2) and in_child(lambda: put(3)) and len(contents(backend)) == 3

        assert in_child(child)
        assert len(contents(backend)) == 3


FORKS = """
import os, sys
from prefixstore.backends import open_backend
from tests.support.places import contents, fill, space
backend = open_backend(sys.argv[1], max_bytes=1 << 20)
fill(backend, space(), [[1] * 4])
for use in (False, True):
    child = os.fork()
    if child == 0:
        if use:
            fill(backend, space(), [[2] * 4])
        del backend
        sys.exit(3)  # what it has inherited goes with the interpreter
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    print(len(contents(backend)), flush=True)
backend.close()
"""


@pytest.mark.slow
def test_children_that_end_as_a_program_does_leave_the_parent_alone(new_prefix):
    with python(FORKS, new_prefix()) as process:
        out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "1\n2\n")


@pytest.mark.slow
def test_without_an_endpoint_it_is_said_that_aws_was_asked(credentials, monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody listens there
    with pytest.raises(UnavailableError, match=r"no answer.*the request went to AWS.*endpoint="):
        open_backend("s3://bucket/kv", max_bytes=MIB)
    with pytest.raises(UnavailableError) as caught:
        open_backend("s3://bucket/kv?endpoint=http://127.0.0.1:1", max_bytes=MIB)
    assert "AWS" not in str(caught.value)
