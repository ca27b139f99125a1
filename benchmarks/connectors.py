"""LMCache's connectors beside ours: the same values into the same servers and back, for `benchmarks.remote`.

LMCache lives in an environment of its own, whose interpreter `--lmcache` of `benchmarks.remote` names, or the variable
PREFIXSTORE_LMCACHE_PYTHON. It needs no GPU for this. CONTRIBUTING.md says how to make one.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import summary
from benchmarks.tables import milliseconds, paragraph, table
from prefixstore.format.keys import as_tokens
from prefixstore.format.record import StoredPage
from prefixstore.maintenance.archive import Archive

VARIABLE = "PREFIXSTORE_LMCACHE_PYTHON"
NOT_NAMED = f"no environment with LMCache is named (`--lmcache PYTHON`, or {VARIABLE}; see CONTRIBUTING.md)"
PROGRAM = Path(__file__).parent / "lmcache_peer.py"
# seconds until a peer has started, and for one answer
LONGEST = 240.0
PUTS = 3
OURS = "prefixstore"
BUCKETS = "S3 (SeaweedFS)"
# what each server is asked by: names of the connectors, and their URLs of an address
CLIENTS: dict[str, dict[str, str]] = {
    "Valkey, socket": {"LMCache `redis://` (redis-py)": "unix://{}"},
    "Valkey, TCP": {
        "LMCache `resp://` (its own client, C++)": "resp://{}",
        "LMCache `valkey://` (GLIDE)": "valkey://{}",
        "LMCache `redis://` (redis-py)": "redis://{}",
    },
    BUCKETS: {"LMCache `s3://` (awscrt)": "s3://{}"},
}


class NotRunError(Exception):
    """A peer cannot be run, or does not answer."""


def interpreter(given: str | None = None) -> str | None:
    """The interpreter of LMCache's environment."""
    return given or os.environ.get(VARIABLE)


@dataclass(frozen=True)
class Chunks:
    """The values: pages of one prompt, as LMCache's chunks."""

    # one chunk after another
    file: Path
    # whole pages
    tokens: Sequence[int]
    layers: int
    heads: int
    head_dim: int
    page_tokens: int = 256

    @property
    def chunk_bytes(self) -> int:
        """K and V of a chunk, 16 bits each."""
        return 2 * 2 * self.layers * self.heads * self.head_dim * self.page_tokens

    def write(self, pages: Sequence[StoredPage]) -> None:
        """Write the pages; what a page holds beside K and V is left out, since a chunk has exactly their size."""
        with self.file.open("wb") as file:
            for page in pages:
                assert len(page.payload) >= self.chunk_bytes, "a page must hold as much as a chunk"
                file.write(memoryview(page.payload)[: self.chunk_bytes])


class Peer:
    """A process of LMCache with one connector."""

    def __init__(self, python: str, chunks: Chunks, url: str, options: dict[str, Any]) -> None:
        shape = {"layers": chunks.layers, "heads": chunks.heads, "head_dim": chunks.head_dim}
        where = {"url": url, "values": str(chunks.file), "chunk_tokens": chunks.page_tokens, "options": options}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer
        try:
            self.process = subprocess.Popen(
                [python, "-I", str(PROGRAM), json.dumps({**shape, **where})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        except OSError as error:
            self._log.close()
            raise NotRunError(str(error)) from error
        try:
            self.version: str = self._answer()["version"]
        except NotRunError:
            self.close()
            raise

    def ask(self, command: str) -> dict[str, Any]:
        """Have it put or get all chunks."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{command}\n".encode())
            self.process.stdin.flush()
        except OSError as error:
            raise NotRunError(f"it has ended: {error}") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], LONGEST)[0]:
            raise NotRunError(f"no answer within {LONGEST:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise NotRunError(f"it ended without an answer: {''.join(last)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NotRunError(answer["error"])
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait(60)
        with suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
        self._log.close()


class Ours:
    """The same work by a location of ours, without a context: lookup, and verified pages in memory."""

    def __init__(self, url: str, chunks: Chunks, pages: Sequence[StoredPage], settings: Mapping[bytes, bytes]) -> None:
        self._archive = Archive(url)
        self._tokens = as_tokens(np.asarray(chunks.tokens, np.int32))
        self._page_tokens = chunks.page_tokens
        self._pages, self._settings = pages, settings
        # its memory is there before the first page comes
        self._memory = np.ones(sum(page.record.raw_bytes for page in pages), np.uint8)

    def ask(self, command: str) -> dict[str, Any]:
        """Put or get all pages."""
        return self._put() if command == "put" else self._get()

    def _put(self) -> dict[str, Any]:
        """Store the pages in the empty location: records, index and payloads, in one transaction."""
        engine = self._archive.engine
        for namespace in self._settings:
            engine.upkeep.clear(namespace)
        started = time.perf_counter()
        done = engine.importer.import_pages(self._pages, self._settings)
        engine.sync()
        seconds = time.perf_counter() - started
        assert done.pages == len(self._pages)
        return {"seconds": seconds}

    def _get(self) -> dict[str, Any]:
        """Look the prompt up and read its pages, as a restore reads them, each to a place of its own."""
        engine = self._archive.engine
        started = time.perf_counter()
        path = engine.match(next(iter(self._settings)), self._tokens, self._page_tokens)
        looked_up = time.perf_counter()
        at = 0
        with engine.fetching(path.pages, streamed=True) as states:
            for state in states:
                self._memory[at : at + len(state)] = state
                at += len(state)
            n = states.verified()
        seconds = time.perf_counter() - started
        return {"lookup": looked_up - started, "seconds": seconds, "chunks": n, "good": self._is_good(n)}

    def _is_good(self, n: int) -> bool:
        at = 0
        for page in self._pages[:n]:
            size = len(page.payload)
            if not np.array_equal(self._memory[at : at + size], np.frombuffer(page.payload, np.uint8)):
                return False
            at += size
        return True

    def close(self) -> None:
        self._archive.close()


def stored_pages(url: str) -> tuple[list[StoredPage], dict[bytes, bytes]]:
    """The raw pages of a location, in memory, parents first; and the settings of their namespaces."""
    found = []
    with Archive(url, read_only=True) as archive:
        pages = archive.pages()
        with archive.backend.view() as view:
            for page in pages:
                ((record, payload),) = view.fetch([page.key])
                usage = view.usage(page.key)
                assert usage is not None
                found.append(StoredPage(page.key, record, usage, bytes(payload)))
            settings = dict(view.namespaces())
    return found, settings


@contextmanager
def object_storage() -> Iterator[tuple[str, dict[str, Any]]]:
    """A private SeaweedFS for LMCache's client, which knows a bucket only as a part of the host's name.

    The server takes the name 127.0.0.1 for the bucket 127 of the domain 0.0.1, and no name has to be resolved.
    """
    from tests.support.s3 import KEY_ID, SECRET, SeaweedFS, private_server

    class Named(SeaweedFS):
        def command(self) -> list[str]:
            return [*super().command(), "-s3.domainName=0.0.1"]

    with private_server(Named) as server:
        keys = {"aws_access_key_id": KEY_ID, "aws_secret_access_key": SECRET}
        yield f"127.0.0.1:{server.port}", {"s3_region": "us-east-1", "disable_tls": True, **keys}


@contextmanager
def clients(
    server: str, python: str | None, ours: Ours, chunks: Chunks, address: str, options: dict[str, Any] | None = None
) -> Iterator[dict[str, Ours | Peer | str]]:
    """All clients of a server by name; instead of one that cannot be run, the reason."""
    with ExitStack() as stack:
        found: dict[str, Ours | Peer | str] = {OURS: ours}
        for name, url in CLIENTS[server].items():
            if python is None:
                found[name] = NOT_NAMED
                continue
            try:
                peer = Peer(python, chunks, url.format(address), options or {})
            except NotRunError as error:
                found[name] = str(error)
            else:
                stack.callback(peer.close)
                found[name] = peer
        yield found


def measured(among: Mapping[str, Ours | Peer | str], n_chunks: int, rounds: int, puts: int) -> dict[str, Any]:
    """Puts and then gets, in turns: the figures by client."""
    taken: dict[str, dict[str, Any]] = {}
    for name, client in among.items():
        taken[name] = {"put": [], "get": []}
        if isinstance(client, str):
            taken[name]["not_run"] = client
    asked = {name: client for name, client in among.items() if not isinstance(client, str)}
    # of the first get, the caches of the server and its clients know nothing
    for command, i in [*(("put", i) for i in range(puts)), *(("get", i) for i in range(-1, rounds))]:
        for name, client in list(asked.items()):
            try:
                answer = client.ask(command)
                if not answer.get("good", True):
                    raise NotRunError("it gave other bytes than it was given")
            except NotRunError as error:
                taken[name]["not_run"] = str(error)
                del asked[name]
                continue
            if answer.get("chunks", n_chunks) < n_chunks:
                # it has given up, and would go on to receive what it asked for during the turns of the others
                taken[name][command] = [answer]
                asked.pop(name).close()
            elif i >= 0:
                taken[name][command].append(answer)
    return {name: _figures(one, version=getattr(among[name], "version", None)) for name, one in taken.items()}


def _figures(taken: dict[str, Any], version: str | None) -> dict[str, Any]:
    """What is reported of one client."""
    if "not_run" in taken:
        return {"not_run": taken["not_run"]}
    gets = taken["get"]
    found: dict[str, Any] = {
        "lookup": summary([one["lookup"] for one in gets]),
        "get": summary([one["seconds"] for one in gets]),
        "chunks": min(one["chunks"] for one in gets),
    }
    if taken["put"]:
        found["put"] = summary([one["seconds"] for one in taken["put"]])
    return found if version is None else {**found, "version": version}


# -- the report -------------------------------------------------------------------------------------------------------


def section(found: dict[str, Any]) -> list[str]:
    """The figures of one model as Markdown."""
    places = {(line, server): by for line, servers in found["lines"].items() for server, by in servers.items()}
    measured = [(name, each) for by_client in places.values() for name, each in by_client.items()]
    clients = list(dict.fromkeys(name for name, _ in measured))
    rows = [[*place, *(_cell(by.get(name), found) for name in clients)] for place, by in places.items()]
    versions = {each["version"] for _, each in measured if "version" in each}
    reasons: dict[str, dict[str, None]] = {}
    for name, each in measured:
        if "not_run" in each:
            reasons.setdefault(each["not_run"], {})[name] = None
    about = f"LMCache {', '.join(sorted(versions))}" if versions else "LMCache"
    beside = f" In a run of its own, beside {found['beside']}." if "beside" in found else ""
    lines = paragraph(
        f"""{about} on the same values: {found["chunks"]} chunks of {found["chunk_bytes"]:,} bytes, K and V of
        {found["page_tokens"]} tokens each, into the same server and back, in turns. LMCache: its `RemoteBackend`
        with the connector that the URL names, with its defaults; nothing is verified, and it gives up after 10 s.
        prefixstore: lookup, and each page verified and copied. Lookup; lookup and values (GB/s; fewer tokens, where it
        gave up); written. LMCache's client of object storage remembers which objects there are, and looks up without
        asking.{beside}"""
    )
    lines += table(["line", "server", *clients], rows)
    for reason, names in reasons.items():
        lines += paragraph(f"Not run: {'; '.join(names)}. Reason: {reason}.")
    return lines


def _cell(each: dict[str, Any] | None, found: dict[str, Any]) -> str:
    if each is None:
        return ""
    if "not_run" in each:
        return "not run"
    seconds, n = each["get"]["p50"], each["chunks"]
    missing = "" if n == found["chunks"] else f", {n * found['page_tokens']:,} tokens"
    rate = f"{n * found['chunk_bytes'] / seconds / 1e9:.3f}"
    written = f"; {milliseconds(each['put']['p50'])}" if "put" in each else ""
    return f"{milliseconds(each['lookup']['p50'])}; {milliseconds(seconds)} ({rate}{missing}){written}"
