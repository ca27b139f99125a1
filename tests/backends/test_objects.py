"""Object storage: the contract on real servers, and what is specific to it."""

import json
import random
import threading
import time
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from prefixstore.backends import open_backend
from prefixstore.backends.contract import ConflictError, Range
from prefixstore.backends.objects import bucket as bucket_module
from prefixstore.backends.objects import read_ahead as read_ahead_module
from prefixstore.backends.objects import store_state as store_module
from prefixstore.backends.objects.bucket import Bucket, Client
from prefixstore.backends.objects.rows import Stored, key_in, name_of, new_payload, payload_name
from prefixstore.backends.objects.store_state import STORE
from prefixstore.engine.pages import open_pages
from prefixstore.errors import (
    InvalidParameterError,
    LocationError,
    StorageError,
    UnavailableError,
)
from prefixstore.format.keys import as_tokens
from prefixstore.testing import PersistentBackendContract
from prefixstore.testing.together import together
from tests.support import PATIENCE, python
from tests.support.engines import A, B, store_of
from tests.support.http_proxy import PASS, HTTPProxy
from tests.support.models import TORTURE
from tests.support.places import MIB, contents, fill, opened, refusal, space
from tests.support.rows import delete, key_of, payload_of, rows_of, write
from tests.support.s3 import prefix_on

pytest.importorskip("obstore")


class _Objects(PersistentBackendContract):
    # obstore does not work in a forked child; writers that are killed: see the attacks, and the model
    test_a_child_forked_while_a_thread_writes_uses_it_and_leaves_the_parent_alone = None
    test_a_process_killed_while_it_writes_leaves_whole_updates_only = None

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


@pytest.mark.attack
class TestMoto(_Objects):
    if TORTURE == 1:
        # of a server in Python, which takes a minute for each
        test_rows_of_every_key_and_value_are_read_back_in_the_order_of_bytes = None
        test_thousands_of_rows_are_written_read_and_deleted_at_once = None
        test_random_updates_show_and_leave_what_a_dictionary_would = None

    @pytest.fixture(autouse=True)
    def _server(self, moto, credentials):
        self.url = lambda: prefix_on(moto)


@contextmanager
def rows_at(url):
    """The rows of a location."""
    with closing(open_backend(url, max_bytes=64 * MIB)) as backend:
        yield backend


def names(backend):
    """The names of all objects of a location."""
    return {one.name for one in backend._client.list()}


def written_rows(backend):
    """The names of the rows that have objects of their own, without their folder."""
    return {name.partition("/rows/")[2] for name in names(backend)}


def used(backend):
    with backend.view() as view:
        return view.used


def payloads(backend):
    """The names of all payloads of a location."""
    return {name for name in names(backend) if "/payloads/" in name}


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "names no bucket"),
        ("file:///kv", "no conditional writes; use lmdb:///path"),
        ("s3://bucket/a//b", "empty segment"),
        ("s3://bucket/a?secret_access_key=hunter2", "unknown option"),
        ("s3://me:hunter2@bucket/a", "credentials"),
        ("s3://bucket/a?endpoint=http://me:hunter2@host", "endpoint must be"),
        ("s3://bucket/a?timeout=hunter2", "number of seconds"),
        ("s3://bucket/a?anonymous=hunter2", "true or false"),
        ("gs://bucket/a?endpoint=http://host", "unknown option"),
        ("s3://bucket/a?endpoint=http://[::1", "endpoint must be"),
        ("s3://bucket/a?endpoint=http:// host", "endpoint must be"),
        ("s3://bucket/a?region=eu%0Awest", "region must be"),
        ("az://bucket/a?account=a.b/c", "account must be"),
        ("s3://bucket/" + "a" * 251, "at most 250 bytes"),
        ("s3://my%20bucket/a", "name of a bucket"),
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


def test_an_address_of_every_kind_is_accepted_and_shown_as_it_was_given():
    for url in (
        "s3://my-bucket.name/a/b%20c?endpoint=http://[::1]:8333&region=eu-central-1",
        "s3://b_1?endpoint=https://s3.example.com/path",
        "az://$web/a?account=name1",
    ):
        assert Bucket.parse(url).shown == url


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_bucket_that_does_not_exist_is_a_clear_error(moto, credentials):
    assert "create the bucket" in refusal(f"s3://nowhere/a?endpoint={moto.endpoint}")


def test_a_server_that_ignores_conditions_is_refused(moto, credentials):
    with closing(HTTPProxy(moto.endpoint, drop_headers=("if-",))) as proxy:
        url = prefix_on(moto, proxy.endpoint)
        message = refusal(url)
        assert message.startswith("LocationError: ")
        assert "ignores conditions" in message
        # not a store that was made through another endpoint either
        direct = url.replace(proxy.endpoint, moto.endpoint)
        with rows_at(direct) as backend:
            write(backend, 1)
            assert "ignores conditions" in refusal(url)
            assert set(rows_of(backend)) == {key_of(1)}
            write(backend, 2)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"{}", "CorruptError"),
        (b'{"magic":"other","format":1}', "another application"),
        (b'{"magic":"prefixstore","format":1}', "delete this one"),
        (b'{"magic":"prefixstore","format":9}', "upgrade"),
        (b'{"magic":"prefixstore","format":5}', "is damaged"),
        (b'{"magic":"prefixstore","format":5,"store":"a","number":1e999,"changes":{}}', "is damaged"),
        (b'{"magic":"prefixstore","format":5,"store":"a","number":1,"changes":{"a":"x"}}', "is damaged"),
    ],
)
def test_what_is_not_ours_or_damaged_is_refused_and_untouched(new_prefix, head, says):
    url = new_prefix()
    client = Client(Bucket.parse(url))
    client.put(STORE, head)
    assert says in refusal(url)
    assert bytes(client.get(STORE)[0]) == head


def test_names_are_in_the_order_of_the_keys_and_fit_into_every_server():
    chance = random.Random(1)
    keys = {chance.randbytes(chance.choice([1, 2, 3, 15, 16, 17, 33, 176, 177, 336, 511])) for _ in range(2000)}
    keys |= {key[: chance.randrange(1, 600)] + b"\0" * chance.randrange(3) for key in keys}
    keys = sorted({key[:511] for key in keys})
    rows = [name_of(key) for key in keys]
    assert [key_in(name) for name in rows] == keys
    for found in (rows, [payload_name(key, new_payload(1)) for key in keys]):
        # as a service sorts them, and as a server that keeps them in folders
        assert found == sorted(found) == sorted(found, key=lambda name: name.split("/"))
        folders = {name.rsplit("/", n)[0] for name in found for n in range(1, name.count("/") + 1)}
        assert not folders & set(found)
        assert max(map(len, found)) < 750
        assert max(len(part) for name in found for part in name.split("/")) < 255


# -- reading -----------------------------------------------------------------------------------------------------------


def test_opening_takes_five_requests_and_rows_that_are_known_need_none_but_the_first(seaweedfs, credentials):
    with closing(HTTPProxy(seaweedfs.endpoint)) as proxy:
        url = prefix_on(seaweedfs, proxy.endpoint)
        with opened(url) as backend:
            for number in range(3):
                ((key, *_),) = fill(backend, space(), [[number] * 5])
        del proxy.requests[:]
        with opened(url) as backend:
            # the store, and what the server has to refuse; and in a view whether it is encrypted
            assert len(proxy.requests) == 5
            for most in (5, 2):
                del proxy.requests[:]
                with backend.view() as view:
                    assert view.leading([key])
                assert len(proxy.requests) <= most


def test_a_range_asks_for_its_folder_only(seaweedfs, credentials):
    with closing(HTTPProxy(seaweedfs.endpoint)) as proxy, rows_at(prefix_on(seaweedfs, proxy.endpoint)) as backend:
        keys = [bytes([a]) * 16 + bytes([b]) for a in (1, 2, 255) for b in range(256)]
        with backend.update() as draft:
            for key in keys:
                draft.put(key, b"")
        write(backend, 1)
        for start, stop in ((keys[3], keys[9]), (keys[250], b"\1" * 15 + b"\2\0"), (b"\xff" * 16, b"\xff" * 17)):
            del proxy.requests[:]
            with backend.view() as view:
                (found,) = view.ranges([Range(start, stop)])
            assert [row.key for row in found] == [key for key in keys if start <= key < stop]
            listed = [path for _, path in proxy.requests if "list-type" in path]
            assert all("rows%2F" in path or start[0] == 255 for path in listed)
            assert len(listed) <= 2


@pytest.mark.slow
def test_a_store_that_was_deleted_is_made_again_by_those_who_use_it(new_prefix):
    url = new_prefix()
    with store_of(open_pages(url, max_bytes=MIB)) as store, opened(url, read_only=True) as reader:
        client = store.backend.rows._client

        def delete():
            client.delete([one.name for one in client.list()])

        store.put(A)
        delete()
        with pytest.raises(LocationError, match="deleted"), reader.view():
            raise AssertionError("it opened")
        # what is known of it is found to be wrong when it is read
        assert store.fetch(A) == 0
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


def test_a_store_that_was_restored_from_a_backup_is_read_from_the_beginning(new_prefix):
    with rows_at(new_prefix()) as backend:
        write(backend, 1)
        backup = {name: bytes(backend._client.get(name)[0]) for name in names(backend)}
        write(backend, 2)
        backend._client.delete(sorted(names(backend) - backup.keys()))
        for name, stored in backup.items():
            backend._client.put(name, stored)
        assert set(rows_of(backend)) == {key_of(1)}
        write(backend, 3)
        assert set(rows_of(backend)) == {key_of(1), key_of(3)}


def test_what_does_not_change_is_read_twice_however_fast_others_write(new_prefix, monkeypatch):
    url = new_prefix()
    with rows_at(url) as writer, rows_at(url) as reader:
        write(writer, 1)
        write(writer, 2)
        (refresh, get), n_read = (reader._store.refresh, reader._client.get), []

        def busy():
            for number in (3, 4):
                write(writer, number)
            return refresh()

        def counted(name, *known):
            n_read.append("/rows/" in name)
            return get(name, *known)

        with reader.view() as view:
            monkeypatch.setattr(reader._store, "refresh", busy)
            monkeypatch.setattr(reader._client, "get", counted)
            assert None not in view.get([key_of(1), key_of(2)])
        assert sum(n_read) <= 4


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_payload_whose_parts_the_server_has_forgotten_is_not_taken_for_written(moto, credentials, monkeypatch):
    monkeypatch.setattr(bucket_module, "PART_BYTES", 5 * MIB)

    def forget(method, path, number):
        name, _, upload = path.partition("?partNumber=1&")
        if upload:
            server = HTTPConnection(urlsplit(moto.endpoint).netloc)
            server.request("DELETE", f"{name}?{upload}")
            assert server.getresponse().status in (204, 404)
        return PASS

    with closing(HTTPProxy(moto.endpoint, forget)) as proxy, rows_at(prefix_on(moto, proxy.endpoint)) as backend:
        with pytest.raises(UnavailableError, match="NoSuchUpload"):
            write(backend, 1, 12 * MIB)
        assert rows_of(backend) == {}


# -- writers side by side ----------------------------------------------------------------------------------------------


def test_a_writer_that_dies_in_its_turn_keeps_the_others_waiting_for_a_while_only(new_prefix, monkeypatch):
    url = new_prefix()
    with rows_at(url) as one, rows_at(url) as two:
        one._store.begin()
        monkeypatch.setattr(store_module, "WAIT_SECONDS", 0.2)
        with pytest.raises(UnavailableError, match="have been writing"):
            write(two, 1)
        monkeypatch.setattr(store_module, "TURN_SECONDS", 0.1)
        write(two, 1)
        # it was stopped, and goes on: what the other one has committed stays
        with pytest.raises(ConflictError):
            one._store.commit({key_of(3): Stored(b"")}, 0)
        one._store.end()
        write(one, 2)
        assert set(rows_of(two)) == {key_of(1), key_of(2)}


def test_what_a_writer_has_committed_is_seen_at_once_and_written_by_the_next(new_prefix):
    url = new_prefix()
    with rows_at(url) as one, rows_at(url) as two:
        write(one, 1)
        write(one, 2)
        expected = rows_of(one)
        with one.update() as draft:
            draft.delete(key_of(1))
            draft.put(key_of(2), b"new")
            draft.put(key_of(3), b"3", b"payload")
        expected = {key_of(2): (b"new", expected[key_of(2)][1]), key_of(3): (b"3", b"payload")}
        with rows_at(url) as three:
            for backend in (one, two, three):
                assert rows_of(backend) == expected
                with backend.view() as view:
                    (found,) = view.ranges([Range(b"k", b"l", 1)])
                    assert [row.key for row in found] == [key_of(2)]
        assert name_of(key_of(3)) not in written_rows(two)
        write(two, 4)
        assert written_rows(two) & {name_of(key_of(n)) for n in (1, 3)} == {name_of(key_of(3))}
        delete(two, key_of(4))
        assert rows_of(one) == rows_of(two) == expected


def test_a_turn_lasts_while_its_writer_works(new_prefix, monkeypatch):
    url = new_prefix()
    monkeypatch.setattr(store_module, "TURN_SECONDS", 2.0)
    monkeypatch.setattr(store_module, "RENEW_SECONDS", 0.1)
    with rows_at(url) as one, rows_at(url) as two:
        put = Client.put

        def slow(self, name, *arguments):
            time.sleep(0.5 if "/payloads/" in name and self is one._client else 0)
            return put(self, name, *arguments)

        monkeypatch.setattr(read_ahead_module, "HELD_BYTES", 1)
        monkeypatch.setattr(Client, "put", slow)
        is_inside = threading.Event()

        def work():
            with one.update() as draft:
                is_inside.set()
                for number in range(6):
                    draft.put(key_of(number), b"", b"payload")

        def wait():
            is_inside.wait()
            write(two, 10)

        together(work, wait)
        assert len(rows_of(one)) == 7


# -- what is left, and what is really deleted --------------------------------------------------------------------------


def test_payloads_of_deleted_rows_are_deleted_at_once_or_by_the_next_compaction(new_prefix, monkeypatch):
    with rows_at(new_prefix()) as backend:
        for number in range(4):
            write(backend, number)
        delete(backend, key_of(3))
        assert len(payloads(backend)) == 3
        with monkeypatch.context() as failing:
            failing.setattr(backend, "_delete", lambda _: None)
            delete(backend, key_of(0))
            # one that is replaced
            write(backend, 1)
        assert len(payloads(backend)) == 4
        before = rows_of(backend)
        assert backend.compact() == 2000
        assert len(payloads(backend)) == 2
        assert rows_of(backend) == before
        assert before[key_of(1)][1] == payload_of(1, 1000)


def test_what_writers_that_died_have_left_is_deleted_and_the_size_is_counted_again(new_prefix):
    with rows_at(new_prefix()) as backend:
        key, folder = write(backend, 1), backend._store.state.payloads
        assert backend.compact() == 0
        left = [f"{folder}/{payload_name(of, new_payload(1))}" for of in (key, b"a", b"z" * 400)]
        left += ["0123456789abcdef/rows/a", "0123456789abcdef/payloads/a"]
        before, known, size = rows_of(backend), names(backend), used(backend)
        for name in [*left, "else", "folder/else"]:
            backend._client.put(name, b"left by a writer that died")
        # as if the size had been counted wrongly
        backend._store.begin()
        backend._store.change(used=12345)
        backend._store.end()
        assert backend.compact() == len(left) * 26
        assert names(backend) == {*known, "else", "folder/else"}
        assert rows_of(backend) == before
        assert used(backend) == size


def test_nothing_of_a_purged_page_is_left_after_a_scrub(new_prefix):
    url, secret = new_prefix(), [0x5EC2E7] * 4
    with opened(url) as backend:
        (path,) = fill(backend, space(), [secret])
        fill(backend, space(), [[1] * 4])
        payload = contents(backend)[path[0]][2]
        with backend.update() as transaction:
            transaction.delete(path[0])
        backend.rows.compact(erase=True)
        for name in names(backend.rows):
            stored = bytes(backend.rows._client.get(name)[0])
            if name == STORE:
                assert json.loads(stored)["changes"] == {}
            assert as_tokens(secret).tobytes() not in stored
            assert payload not in stored
        assert len(contents(backend)) == 1


# -- processes ---------------------------------------------------------------------------------------------------------


FORKS = """
import os, sys
from prefixstore.engine.pages import open_pages
from tests.support.places import contents, fill, refusal, space
backend = open_pages(sys.argv[1], max_bytes=1 << 20)
fill(backend, space(), [[1] * 4])
child = os.fork()
if child == 0:
    backend.after_fork()
    for use in (lambda: contents(backend), lambda: fill(backend, space(), [[2] * 4])):
        try:
            use()
        except Exception as error:
            print(error, flush=True)
    print(refusal(sys.argv[1]), flush=True)
    del backend
    sys.exit(3)  # what it has inherited goes with the interpreter
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
print(len(contents(backend)), flush=True)
backend.close()
"""


@pytest.mark.slow
def test_a_forked_child_is_told_that_it_cannot_use_it_and_leaves_the_parent_alone(new_prefix):
    with python(FORKS, new_prefix()) as process:
        out, _ = process.communicate(timeout=PATIENCE)
    *told, found = out.splitlines()
    assert (process.returncode, found) == (0, "1")
    assert ["start processes by spawn" in line for line in told] == [True] * 3


@pytest.mark.slow
def test_if_nobody_answers_it_is_said_how_another_server_is_named(credentials, monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody listens there
    with pytest.raises(UnavailableError, match=r"no answer.*endpoint="):
        open_backend("s3://bucket/kv", max_bytes=MIB)
