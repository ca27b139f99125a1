"""The benchmark of LMCache's connectors: our part, with a program in LMCache's place; and LMCache, if it is there."""

from __future__ import annotations

import itertools
import sys
import time
from contextlib import ExitStack

import numpy as np
import pytest

from benchmarks import connectors, remote
from benchmarks.connectors import NOT_NAMED, NotRunError, Ours, Peer
from prefixstore.format.keys import as_tokens, page_key
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Record, StoredPage, Usage, checksum
from prefixstore.maintenance.archive import Archive
from tests.support.s3 import weed

SHAPE = {"n_layer": 1, "n_head_kv": 1, "head_dim": 32}
N = 3


@pytest.fixture
def stored(tmp_path):
    """A prompt of whole pages, a location that has it, its pages, and its values as a file."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, N * 256).tolist()
    chunks = connectors.Chunks(tmp_path / "values", tokens, *SHAPE.values())
    settings = Namespace({"label": "a", "salt": None})
    parent, pages = settings.key, []
    for i in range(N):
        part = as_tokens(np.asarray(tokens[i * 256 : (i + 1) * 256], np.int32)).tobytes()
        payload = rng.bytes(chunks.chunk_bytes + 8)
        size = len(payload)
        record = Record(settings.key, parent, i * 256, part, 0, size, size, checksum(payload), 0, time.time_ns())
        parent = page_key(parent, part)
        pages.append(StoredPage(parent, record, Usage(record.created), payload))
    url = f"lmdb://{tmp_path}/kv"
    with Archive(url, create=True) as archive:
        assert archive.engine.import_pages(pages, {settings.key: settings.canonical}).pages == N
    return chunks, url, pages, {settings.key: settings.canonical}


@pytest.fixture
def peer(tmp_path, stored):
    """Makes a program that answers in LMCache's place; its arguments are those of an interpreter."""
    numbers = itertools.count()

    def make(body):
        path = tmp_path / f"python-{next(numbers)}"
        path.write_text(
            f"#!{sys.executable}\nimport json, os, sys, time\n"
            "def say(**found): print(json.dumps(found), flush=True)\n"
            f"assert sys.argv[1:3] == ['-I', {str(connectors.PROGRAM)!r}]\n"
            f"job = json.loads(sys.argv[3])\n{body}\n"
        )
        path.chmod(0o755)
        return str(path)

    return make


GOOD = """
say(version="1.2")
get_seconds = 9.0
for line in sys.stdin:
    if line == "get\\n":
        say(seconds=get_seconds, lookup=0.5, chunks=CHUNKS, good=True)
        get_seconds = 2.0
    else:
        say(seconds=2.0)
"""


def test_pages_are_written_and_read_and_compared(stored):
    chunks, url, pages, settings = stored
    assert connectors.stored_pages(url) == (pages, settings)
    chunks.write(pages)
    assert chunks.file.stat().st_size == N * chunks.chunk_bytes
    assert chunks.file.read_bytes()[: chunks.chunk_bytes] == pages[0].payload[:-8]
    ours = Ours(url, chunks, pages, settings)
    answer = ours.ask("get")
    assert (answer["chunks"], answer["good"]) == (N, True)
    assert 0 < answer["lookup"] < answer["seconds"]
    # what is there is deleted first
    assert ours.ask("put")["seconds"] > 0
    assert ours.ask("get")["good"]
    ours.close()
    other = [page._replace(payload=page.payload[::-1]) for page in pages]
    ours = Ours(url, chunks, other, settings)
    assert not ours.ask("get")["good"]
    ours.close()


def test_clients_are_asked_in_turns_and_the_first_answer_is_not_counted(stored, peer):
    chunks, url, pages, settings = stored
    with ExitStack() as stack:
        ours = Ours(url, chunks, pages, settings)
        stack.callback(ours.close)
        python = peer(GOOD.replace("CHUNKS", str(N)))
        among = stack.enter_context(connectors.clients("Valkey, TCP", python, ours, chunks, "host:1", {"a": 1}))
        asked = []
        for name, client in among.items():
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                client,
                "ask",
                lambda command, ask=client.ask, name=name: asked.append((name, command)) or ask(command),
            )
        found = connectors.measured(among, N, 2, 1)
    names = list(among)
    assert names == [connectors.OURS, *connectors.CLIENTS["Valkey, TCP"]]
    assert asked == [(name, command) for command in ("put", "get", "get", "get") for name in names]
    for name in names[1:]:
        seconds = {"p50": 2.0, "p95": 2.0, "min": 2.0}
        lookup = {"p50": 0.5, "p95": 0.5, "min": 0.5}
        assert found[name] == {"lookup": lookup, "get": seconds, "chunks": N, "put": seconds, "version": "1.2"}
    assert found[connectors.OURS]["chunks"] == N


def test_a_client_that_gives_up_is_not_asked_again(stored, peer):
    chunks = stored[0]
    client = Peer(peer(GOOD.replace("CHUNKS", "1")), chunks, "resp://host:1", {})
    found = connectors.measured({"LMCache": client}, N, 5, 0)
    assert found["LMCache"]["chunks"] == 1
    # what it still waits for does not disturb the others
    assert client.process.poll() is not None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('say(error="ImportError: no such module")', "ImportError: no such module"),
        ('print("boom", file=sys.stderr)', "it ended without an answer: boom"),
        ("time.sleep(100)", "no answer within 0 s"),
        ('say(version="1")\nsys.stdin.readline(); say(seconds=1, lookup=1, chunks=3, good=False)', "other bytes"),
        ('say(version="1")\nsys.stdin.readline(); say(error="OSError: gone")', "OSError: gone"),
        ('say(version="1")\nsys.stdin.readline()', "ended without an answer"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_run_is_told_with_the_reason(body, reason, stored, peer, monkeypatch):
    if body is not None and "sleep" in body:
        monkeypatch.setattr(connectors, "LONGEST", 0.1)
    chunks, url, pages, settings = stored
    ours = Ours(url, chunks, pages, settings)
    python = peer(body) if body is not None else "/no/such/python"
    with connectors.clients("Valkey, socket", python, ours, chunks, "/s") as among:
        found = connectors.measured(among, N, 1, 0)
    ours.close()
    (name,) = connectors.CLIENTS["Valkey, socket"]
    assert reason in found[name]["not_run"]
    assert found[connectors.OURS]["chunks"] == N


def test_the_program_of_a_peer_says_what_it_lacks(stored):
    with pytest.raises(NotRunError, match=r"ModuleNotFoundError: No module named '(torch|lmcache)'"):
        Peer(sys.executable, stored[0], "resp://127.0.0.1:1", {})


@pytest.mark.slow
def test_without_lmcache_the_rows_say_so_and_with_it_each_line_has_its_own(stored, peer, tmp_path):
    line = "1 Gbit/s"
    pytest.importorskip("valkey")
    chunks, url, _, _ = stored
    geometry = remote.Geometry(SHAPE, len(chunks.tokens))
    with ExitStack() as stack:
        found = {"LMDB": remote.Place(url), **remote._valkey(stack)}
        if len(found) == 1:
            pytest.skip("no Valkey server")
        remote.copy(url, found["Valkey, TCP"].url)
        given = (geometry, found, list(chunks.tokens), [remote.HERE, line], lambda _: 1, tmp_path)
        without = remote.beside_lmcache(*given, None)
        with_it = remote.beside_lmcache(*given, peer(GOOD.replace("CHUNKS", str(N))))
    assert list(without["lines"]) == [remote.HERE]
    assert with_it["lines"].keys() == {remote.HERE, line}
    assert with_it["lines"][line].keys() == {"Valkey, TCP"}
    assert with_it["lines"][remote.HERE].keys() == {"Valkey, TCP", "Valkey, socket"}
    for measured in with_it["lines"].values():
        assert all(each["chunks"] == N for each in measured["Valkey, TCP"].values())
        assert len(measured["Valkey, TCP"]) == 4
    lines = connectors.section(without)
    assert any(one.startswith(f"| {remote.HERE} | Valkey, socket |") and "| not run |" in one for one in lines)
    assert NOT_NAMED in " ".join(lines)
    assert max(len(line) for line in lines if line[:1] != "|") <= 118
    lines = connectors.section(with_it)
    size = N * chunks.chunk_bytes / 2.0 / 1e9
    cell = f"500.0 ms; 2000.0 ms ({size:.3f})"
    here, there = (
        next(row for row in lines if row.startswith(f"| {one} | Valkey, TCP |")) for one in (remote.HERE, line)
    )
    assert f"| {cell}; 2000.0 ms |" in here
    # what is put is there for all lines
    assert f"| {cell} |" in there
    assert "LMCache 1.2" in " ".join(lines)
    assert "not run" not in " ".join(lines)


@pytest.mark.skipif(connectors.interpreter() is None, reason=f"{connectors.VARIABLE} names no environment with LMCache")
def test_the_connectors_of_lmcache_give_back_what_they_are_given(stored):
    pytest.importorskip("valkey")
    chunks, url, pages, settings = stored
    chunks.write(pages)
    ours = Ours(url, chunks, pages, settings)
    with ExitStack() as stack:
        stack.callback(ours.close)
        places = remote._valkey(stack)
        if not places or weed() is None:
            pytest.skip("no Valkey server, or no SeaweedFS")
        addresses = {
            "Valkey, socket": (places["Valkey, socket"].url.partition("://")[2], None),
            "Valkey, TCP": (places["Valkey, TCP"].target, None),
            connectors.BUCKETS: stack.enter_context(connectors.object_storage()),
        }
        for server, (address, options) in addresses.items():
            python = connectors.interpreter()
            with connectors.clients(server, python, ours, chunks, address, options) as among:
                found = connectors.measured(among, N, 1, 1)
            for name in connectors.CLIENTS[server]:
                assert found[name].get("chunks") == N, (name, found[name])
