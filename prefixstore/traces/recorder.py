"""Records the requests to a store: hashes and lengths, one JSON object a line. docs/operations.md has the format."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from prefixstore.backends.threads import caller
from prefixstore.engine.page import Page
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import PAGE, TOKEN_BYTES, Tokens, page_key
from prefixstore.units import parse_bytes, shown

log = logging.getLogger("prefixstore")

VERSION = 1
# what a file may take: some ten thousand requests of a chat
MAX_BYTES = "64MiB"
# tokens that have one hash
BLOCK_TOKENS = 32
# hexadecimal digits of a hash
DIGITS = 16
# hashes that are remembered as written; then all are forgotten, and written again when they come up
REMEMBERED = 1 << 17
# a model with a sliding window is asked for in two
NAMESPACES_ASKED = 2
# whole states are not recorded: pages of any length
LONGEST_PAGE = 1 << 16


class Recorder(AbstractContextManager["Recorder"]):
    """Writes a trace. It never breaks a completion: if the file cannot be written, recording ends with a warning.

    Several stores and processes may append to one file. A block of tokens is named by the key that a page has which
    ends there; so equal names are equal prefixes, and a sequence is known by the last of them.

    Parameters
    ----------
    path
        The file; it is created with mode 0600, or appended to.
    about
        Parameters of the store, for the first line.
    max_bytes
        Recording ends when the file is that long.
    block_tokens
        Tokens that have one hash: fewer are more exact, and take more space.

    Raises
    ------
    InvalidParameterError
        If the file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        about: dict[str, Any],
        *,
        max_bytes: int | str = MAX_BYTES,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
            raise InvalidParameterError(f"block_tokens={shown(block_tokens)} must be an integer of at least 1")
        try:
            self.path = os.fspath(path)
        except TypeError:
            raise InvalidParameterError(f"path={shown(path)} must be the path of a file") from None
        self._left = parse_bytes(max_bytes, "max_bytes")
        self._block = block_tokens
        self._lock = threading.Lock()
        # by whom they were looked up: another thread does the work
        self._asked: dict[object, dict[bytes, tuple[Tokens, int, int]]] = {}
        self._process = os.getpid()
        self._known: set[bytes] = set()
        self._is_open = False
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            # a pipe that nobody reads must not keep a completion waiting
            self._file = os.open(self.path, flags | getattr(os, "O_NONBLOCK", 0), 0o600)
            self._is_open = True
            if size := os.fstat(self._file).st_size:
                # a kill or a full disk may have cut the last line
                os.write(self._file, b"\n")
                self._left -= size + 1
            self._write({"prefixstore_trace": VERSION, "block_tokens": block_tokens, **about})
        except (OSError, ValueError) as error:
            self.close()
            raise InvalidParameterError(f"trace: {shown(self.path)} cannot be written: {error}") from None
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether it is still recording."""
        return self._is_open

    def close(self) -> None:
        """Stop recording. A second call does nothing."""
        self._own_process()
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        """Close the file; the caller holds the lock."""
        if self._is_open:
            self._is_open = False
            os.close(self._file)

    # -- what the engine tells ----------------------------------------------------------------------------------------

    def asked(self, namespace: bytes, tokens: Tokens, page_tokens: int, n_matched: int) -> None:
        """Remember the sequence, in case it turns out to be a request: see `Tap`."""
        found = self._asked.setdefault(caller().key, {})
        found.pop(namespace, None)
        found[namespace] = (tokens, page_tokens, n_matched)
        while len(found) > NAMESPACES_ASKED:
            del found[next(iter(found))]

    def used(self, namespace: bytes, pages: Sequence[Page], n_tokens: int) -> None:
        """Record a request."""
        found = self._asked.pop(caller().key, {}).get(namespace)
        if found is None or not self._is_open:
            return
        tokens, page_tokens, n_matched = found
        if page_tokens > LONGEST_PAGE or len(tokens) not in (n_tokens, n_tokens - 1):
            return
        self._guarded(self._record_request, namespace, tokens, page_tokens, n_tokens, n_matched if pages else 0)

    def captured(self, page: Page) -> None:
        """Record a page that is stored."""
        if self._is_open and page.form == PAGE and page.n_tokens <= LONGEST_PAGE:
            self._guarded(self._record_page, page)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _guarded(self, record: Callable[..., None], *arguments: Any) -> None:
        try:
            record(*arguments)
        except Exception as error:  # noqa: BLE001 - recording must never break a completion
            log.warning("recording to %s ends: %s", self.path, error)
            self.close()

    def _record_request(
        self, namespace: bytes, tokens: Tokens, page_tokens: int, n_tokens: int, n_matched: int
    ) -> None:
        names: list[bytes] = []
        parent, raw, step = namespace, tokens.tobytes(), page_tokens * TOKEN_BYTES
        for at in range(0, len(raw), step):
            piece = raw[at : at + step]
            names += self._names(parent, piece, page_tokens)
            parent = page_key(parent, piece)
        line = self._line(namespace, names, None)
        line |= {
            "input_length": n_tokens,
            "hit_length": max(min(n_matched, n_tokens - 1), 0),
            "page_tokens": page_tokens,
        }
        self._write(line, names)

    def _record_page(self, page: Page) -> None:
        names = self._names(page.parent, page.tokens, page.n_tokens)
        whole = page_key(page.parent, page.tokens)
        line = self._line(page.namespace, names, page.parent if page.start else None)
        line |= {"stored_length": page.n_tokens, "bytes": page.raw_bytes}
        if not names or names[-1] != whole:
            line["cut"] = whole.hex()[:DIGITS]
        self._write(line, names)

    def _names(self, parent: bytes, tokens: bytes, page_tokens: int) -> list[bytes]:
        """The names of the blocks of a page that are complete; the last one of a full page may be shorter."""
        n, full = len(tokens) // TOKEN_BYTES, page_tokens
        ends = [end for end in [*range(self._block, full, self._block), full] if end <= n]
        return [page_key(parent, tokens[: end * TOKEN_BYTES]) for end in ends]

    def _line(self, namespace: bytes, names: Sequence[bytes], parent: bytes | None) -> dict[str, Any]:
        """A line with the blocks after those that the file has already."""
        # if a block was written, so were all before it
        n_known = bisect_left(names, True, key=lambda name: name not in self._known)
        before = names[n_known - 1] if n_known else parent
        line: dict[str, Any] = {"timestamp": time.time_ns() // 1_000_000, "namespace": namespace.hex()[:DIGITS]}
        if before is not None:
            line["after"] = before.hex()[:DIGITS]
        return line | {"hash_ids": [name.hex()[:DIGITS] for name in names[n_known:]]}

    def _own_process(self) -> None:
        """After a fork, another thread of the parent may have held the lock, or be about to write."""
        if self._process != os.getpid():
            self._lock, self._process = threading.Lock(), os.getpid()

    def _write(self, line: dict[str, Any], names: Sequence[bytes] = ()) -> None:
        self._own_process()
        written = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        with self._lock:
            if not self._is_open:
                return
            self._left -= len(written)
            if self._left < 0:
                self._stop()
                log.info("%s has reached its size; recording ends", self.path)
                return
            # one call: lines of several processes do not mix
            if os.write(self._file, written) != len(written):
                raise OSError("the disk is full")
            if len(self._known) > REMEMBERED:
                self._known.clear()
            self._known.update(names)
