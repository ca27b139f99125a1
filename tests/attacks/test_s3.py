"""An object store that fails in the middle of anything: what opens is sound.

Writers that die at any request are those of `tests/model`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import ExitStack, closing, suppress

import pytest

from prefixstore.backends.objects import bucket as client_module
from prefixstore.backends.objects.bucket import Bucket
from prefixstore.backends.objects.store_state import STORE
from prefixstore.engine.invariants import flaws
from prefixstore.engine.pages import open_pages
from prefixstore.errors import LocationError, StorageError, UnavailableError
from tests.attacks.server_work import lookup
from tests.support.engines import MIB, A, C, Store, store_of
from tests.support.http_proxy import CUT, DROP, HANG, LOSE, PASS, HTTPProxy
from tests.support.models import TORTURE
from tests.support.places import opened, refusal
from tests.support.s3 import KEY_ID, SECRET, SeaweedFS, prefix_on, private_server
from tests.support.timeouts import wait_for

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def _private(seaweedfs, credentials):
    pass


@pytest.fixture
def at_once(monkeypatch):
    """Requests that fail are not sent again."""
    monkeypatch.setattr(client_module, "RETRIES", 0)


def sequence(number):
    return [number + 10] * 8


def test_replies_that_are_lost_or_cut_change_nothing(seaweedfs):
    """obstore sends again what fails; a commit whose reply was lost is found to be there."""
    chance = random.Random(5)
    with closing(HTTPProxy(seaweedfs.endpoint)) as proxy:
        proxy.decide = lambda *_: chance.choice([PASS] * 100 + [LOSE, CUT, DROP])
        url = prefix_on(seaweedfs, proxy.endpoint)
        backend = None
        while backend is None:
            with suppress(StorageError):
                backend = open_pages(url, max_bytes=MIB)
        store = Store(backend)
        stored = set()
        n_sequences = 30 if TORTURE > 1 else 12
        for number in range(n_sequences):
            with suppress(StorageError):
                if store.put(sequence(number), 5000) == 2:
                    stored.add(number)
            with suppress(StorageError):
                # each state is compared with what was stored; a page whose reply is lost is the end
                assert store.fetch(sequence(chance.randrange(number + 1))) <= 2
        assert len(stored) > n_sequences // 2
        proxy.decide = lambda *_: PASS
        assert {number for number in range(n_sequences) if store.fetch(sequence(number)) == 2} >= stored
        store.close()


def test_a_server_that_is_killed_and_comes_back(at_once):
    with ExitStack() as stack:
        server = stack.enter_context(private_server(SeaweedFS))
        store = stack.enter_context(store_of(open_pages(prefix_on(server), max_bytes=64 * MIB)))
        assert store.put(A) == 3
        server.kill()
        for act in (lambda: store.fetch(A), store.engine.upkeep.check):
            with pytest.raises(StorageError):
                act()
        server.start()
        wait_for(lambda: lookup(store, A) == 3, "the end of the outage")
        wait_for(lambda: store.put(C) == 3, "a write after the outage")
        assert store.fetch(C) == 3


def test_a_server_that_does_not_answer_is_given_up_in_time(seaweedfs, at_once):
    with ExitStack() as stack:
        proxy = stack.enter_context(closing(HTTPProxy(seaweedfs.endpoint)))
        url = prefix_on(seaweedfs, proxy.endpoint)
        store = stack.enter_context(store_of(open_pages(url, max_bytes=MIB)))
        store.put(A)
        proxy.decide = lambda *_: HANG
        # as opened with a short timeout, which holds only while the server hangs
        client, usual = store.backend.rows._client, store.backend.rows._client._address
        client._address = Bucket.parse(f"{url}&timeout=1")
        client._store = client._connect()
        started = time.monotonic()
        with pytest.raises(UnavailableError, match="no answer"):
            store.fetch(A)
        with pytest.raises(UnavailableError, match="no answer"):
            open_pages(f"{url}&timeout=1", max_bytes=MIB)
        # the usual time for one request alone is longer
        assert time.monotonic() - started < client_module.REQUEST_SECONDS
        proxy.released.set()
        proxy.decide = lambda *_: PASS
        client._address = usual
        client._store = client._connect()
        assert store.fetch(A) == 3


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_ACCESS_KEY_ID", "wr0ngid"), ("AWS_SECRET_ACCESS_KEY", "wr0ngsecret")]
)
def test_wrong_credentials_are_named_and_not_shown(seaweedfs, monkeypatch, caplog, name, value):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(name, value)
    message = refusal(prefix_on(seaweedfs))
    assert message.startswith("LocationError: ")
    assert "AWS_SECRET_ACCESS_KEY" in message
    with pytest.raises(LocationError) as caught:
        open_pages(prefix_on(seaweedfs), max_bytes=MIB)
    assert caught.value.__suppress_context__
    for secret in ("wr0ng", KEY_ID, SECRET):
        assert secret not in message + caplog.text + repr(caught.value)


def is_tidy(backend):
    """Whether there is nothing that belongs to no page, after it was removed."""
    backend.rows.compact(erase=True)
    names, folder = [one.name for one in backend.rows._client.list()], backend.rows._store.state.store
    with backend.view() as view:
        is_whole = list(flaws(view)) == [] and sum("/payloads/" in name for name in names) == view.used.entries
    return is_whole and all(name == STORE or name.startswith(f"{folder}/") for name in names)


def test_two_compactors_and_a_writer(seaweedfs):
    url = prefix_on(seaweedfs)
    stores = [Store(open_pages(url, max_bytes=MIB)) for _ in range(3)]
    n_sequences = 40 if TORTURE > 1 else 10
    is_done, failures = threading.Event(), []

    def compact(store):
        while not is_done.is_set():
            try:
                store.backend.rows.compact(erase=True)
            except UnavailableError:
                continue
            except BaseException as error:
                failures.append(error)
                raise

    threads = [threading.Thread(target=compact, args=(store,)) for store in stores[1:]]
    for thread in threads:
        thread.start()
    try:
        stored = [number for number in range(n_sequences) if stores[0].put(sequence(number)) == 2]
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(stored) > n_sequences * 3 // 4
    for store in stores:
        assert all(store.fetch(sequence(number)) == 2 for number in stored)
        store.close()
    with opened(url) as backend:
        assert is_tidy(backend)
