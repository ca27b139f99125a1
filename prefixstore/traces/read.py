"""Reads traces: of prefixstore, and of other systems that have ``hash_ids`` (the mooncake format)."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefixstore.errors import InvalidParameterError
from prefixstore.units import shown

# no length and no size is larger
LARGEST = 1 << 62
# of the header: what a replay uses
LIMITS = ("min_tokens", "max_bytes", "max_entries")


@dataclass(frozen=True)
class Event:
    """A request, or the sequence up to the end of a page that was stored."""

    # numbers of the blocks from the start of the sequence; equal numbers are equal prefixes
    blocks: Sequence[int]
    is_request: bool = True
    # of the prompt, or of the page
    n_tokens: int = 0
    # how much of the prompt the live store had; None if that is not known
    hit_tokens: int | None = None
    # blocks in a full page, and tokens (0 if that is not known); its last block may be shorter than others
    page_blocks: int = 1
    namespace: str = ""
    page_tokens: int = 0


@dataclass
class Trace:
    """A trace that was read; of lengths and sizes None if they are not known."""

    events: list[Event] = field(default_factory=list)
    # recorded by prefixstore: it says which pages were stored. In other traces all blocks of a request are
    is_ours: bool = False
    block_tokens: int | None = None
    # parameters of the store that was recorded
    about: dict[str, Any] = field(default_factory=dict)
    # mean size of a page
    page_bytes: float | None = None
    # lines that could not be used
    skipped: int = 0

    @property
    def requests(self) -> list[Event]:
        """The requests alone."""
        return [event for event in self.events if event.is_request]

    @property
    def pages(self) -> int:
        """How many different pages there are."""
        ends: set[int] = set()
        for event in self.events:
            blocks, step = event.blocks, event.page_blocks
            ends.update(blocks[step - 1 :: step], blocks[-1:])
        return len(ends)

    def tokens_of(self, event: Event, n_blocks: int) -> int:
        """Tokens in the first blocks of a sequence; the blocks themselves, where it is not known how long they are."""
        n_pages, n_left = divmod(n_blocks, event.page_blocks) if event.page_tokens else (0, n_blocks)
        return n_pages * event.page_tokens + n_left * (self.block_tokens or 1)

    def blocks_of(self, event: Event, n_tokens: int) -> int:
        """How many blocks of a sequence are complete within its first tokens."""
        n_pages, n_left = divmod(n_tokens, event.page_tokens) if event.page_tokens else (0, n_tokens)
        return n_pages * event.page_blocks + n_left // (self.block_tokens or 1)


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> Trace:
    """Read a trace, plain or compressed by gzip: all of it, or this many requests from its start.

    Raises
    ------
    InvalidParameterError
        If the file cannot be read, or has no request.
    """
    reader = _Reader()
    try:
        for line in _lines(Path(path)):
            if limit is not None and reader.n_requests >= limit:
                break
            reader.take(line)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidParameterError(f"trace {shown(os.fspath(path))} cannot be read: {why}") from None
    trace = reader.trace()
    if not reader.n_requests:
        raise InvalidParameterError(
            f"{os.fspath(path)} has no requests: a trace is JSON lines with hash_ids, as "
            "PREFIXSTORE_TRACE=FILE writes them"
        )
    return trace


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as raw:
        is_packed = raw.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rb") if is_packed else path.open("rb") as file:
        yield from file


def _whole(value: Any) -> int:
    """A length or a size."""
    found = int(value)
    if not 0 <= found <= LARGEST:
        raise ValueError(value)
    return found


class _Reader:
    def __init__(self) -> None:
        self._trace = Trace()
        self._numbers: dict[object, int] = {}
        # of traces of prefixstore: the block before each one, by number; -1 for none
        self._before: dict[int, int] = {}
        # of pages, by their names
        self._sizes: dict[str, int] = {}
        # by namespace: blocks in a page, and tokens
        self._page_sizes: dict[str, tuple[int, int]] = {}
        self.n_requests = 0

    def trace(self) -> Trace:
        """What was read."""
        if self._sizes:
            self._trace.page_bytes = sum(self._sizes.values()) / len(self._sizes) or None
        return self._trace

    def take(self, line: bytes) -> None:
        """Read one line; one that cannot be used is counted."""
        if not line.strip():
            return
        try:
            found = json.loads(line)
            if "prefixstore_trace" in found:
                self._header(found)
            elif self._trace.is_ours:
                self._ours(found)
            else:
                numbers = [self._number(block) for block in found["hash_ids"]]
                self._trace.events.append(Event(numbers, True, _whole(found.get("input_length", 0))))
                self.n_requests += 1
        except InvalidParameterError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            self._trace.skipped += 1

    def _number(self, block: object) -> int:
        return self._numbers.setdefault(block, len(self._numbers))

    def _header(self, found: dict[str, Any]) -> None:
        if found["prefixstore_trace"] != 1:
            raise InvalidParameterError(
                f"the trace has version {shown(found['prefixstore_trace'])}, which is unknown to this prefixstore; "
                "upgrade it"
            )
        block = _whole(found["block_tokens"])
        limits = {name: _whole(found[name]) for name in LIMITS if found.get(name) is not None}
        if block < 1 or self._trace.block_tokens not in (None, block):
            raise InvalidParameterError(
                "the trace has blocks of different lengths; record each length into its own file"
            )
        self._trace.is_ours, self._trace.block_tokens, self._trace.about = True, block, found | limits

    def _ours(self, found: dict[str, Any]) -> None:
        namespace, names = str(found["namespace"]), [str(name) for name in found["hash_ids"]]
        after = found.get("after")
        before = self._numbers[str(after)] if after is not None else -1
        if "stored_length" in found:
            self._stored(found, namespace, names, before)
            return
        assert self._trace.block_tokens is not None
        page_tokens = max(_whole(found["page_tokens"]), 1)
        of_page = -(-page_tokens // self._trace.block_tokens)
        self._page_sizes[namespace] = of_page, page_tokens
        blocks = self._sequence(names, before)
        n_tokens, hit = _whole(found["input_length"]), _whole(found["hit_length"])
        self._trace.events.append(Event(blocks, True, n_tokens, hit, of_page, namespace, page_tokens))
        self.n_requests += 1

    def _stored(self, found: dict[str, Any], namespace: str, names: list[str], before: int) -> None:
        length, cut = _whole(found["stored_length"]), found.get("cut")
        if cut is not None and length < (self._trace.block_tokens or 1):
            # without a complete block. Other pages end with their last one: a longer page has other blocks after it
            names.append(str(cut))
        size = _whole(found["bytes"])
        blocks = self._sequence(names, before)
        last = names[-1] if names else str(found["after"])
        self._sizes[str(cut) if cut is not None else last] = size
        of_page, page_tokens = self._page_sizes.get(namespace, (1, 0))
        self._trace.events.append(Event(blocks, False, length, None, of_page, namespace, page_tokens))

    def _sequence(self, names: Sequence[str], before: int) -> Sequence[int]:
        """The blocks of a sequence from its start, and notes which one follows which."""
        blocks = array("i")
        while before >= 0:
            blocks.append(before)
            before = self._before[before]
        blocks.reverse()
        for name in names:
            number = self._number(name)
            # in a trace that is not consistent, a block may follow several others: the first one counts
            self._before.setdefault(number, blocks[-1] if blocks else -1)
            blocks.append(number)
        return blocks
