"""What a location holds of each namespace, and how one is found by the first digits of its key."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from prefixstore.engine.page import Page
from prefixstore.engine.page_view import PageView
from prefixstore.errors import CorruptError, InvalidParameterError
from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import CLOCK_SLACK, FACTS, Facts

# pages whose facts are read at a time
SLICE = 10_000
SUMMED = ("pages", "tokens", "stored_bytes", "raw_bytes", "hits", "pinned")


@dataclass(frozen=True)
class Holding:
    """What a location holds of one namespace.

    Attributes
    ----------
    key
        Key of the namespace.
    namespace
        Its settings; None if they are missing or damaged.
    pages, tokens, stored_bytes, raw_bytes
        The number of pages and of their tokens, and the sizes of their payloads and of their states.
    hits
        How often its pages were restored.
    pinned
        How many pages are pinned.
    created, last_used
        Of the oldest page, and of the most recently used one; nanoseconds since the epoch.
    """

    key: bytes
    namespace: Namespace | None
    pages: int = 0
    tokens: int = 0
    stored_bytes: int = 0
    raw_bytes: int = 0
    hits: int = 0
    pinned: int = 0
    created: int = 0
    last_used: int = 0

    @property
    def settings(self) -> Mapping[str, str | int | float | bool | None]:
        """The settings of the namespace; none if they are missing or damaged."""
        return self.namespace.settings if self.namespace is not None else {}


def read_facts(view: PageView, now: int | None = None) -> Facts:
    """Facts of all pages, in the order of their keys, including those that cannot be read; `now` is in nanoseconds.

    A time of use that is not believable is 0, as `prefixstore.format.record.time_of_use` has it, and none is after now.
    """
    found, after = [], b""
    while len(some := view.facts(after, SLICE)):
        found.append(some)
        after = bytes(some["key"][-1])
    facts = np.concatenate(found) if found else np.empty(0, FACTS)
    now = time.time_ns() if now is None else now
    used = facts["last_used"].astype(np.int64)
    facts["last_used"] = np.where(used <= now + CLOCK_SLACK, np.minimum(used, now), 0)
    facts.sort(order="key", kind="stable")
    return facts


def holdings_of(view: PageView, facts: Facts | None = None) -> list[Holding]:
    """What there is of each namespace, the most recently used first. With `facts`, these are not read again."""
    facts = read_facts(view) if facts is None else facts
    facts = facts[facts["is_readable"]]
    found = namespaces_of(view)
    keys, group = np.unique(keys_in(facts["namespace"]), return_inverse=True)
    ends = np.cumsum(np.bincount(group, minlength=len(keys)))
    for key, some in zip(keys, np.split(facts[np.argsort(group, kind="stable")], ends[:-1]), strict=False):
        sums: dict[str, Any] = {one: int(some[one].sum()) for one in SUMMED[2:]}
        name = bytes(key).ljust(KEY_BYTES, b"\0")
        found[name] = replace(
            found.get(name, Holding(name, None)),
            pages=len(some),
            tokens=int(some["n_tokens"].sum()),
            **sums,
            created=int(some["created"].min()),
            last_used=int(some["last_used"].max()),
        )
    return sorted(found.values(), key=lambda holding: -holding.last_used)


def namespaces_of(view: PageView) -> dict[bytes, Holding]:
    """The namespaces of a location by their keys, as if they held nothing."""
    found: dict[bytes, Holding] = {}
    for key, stored in view.namespaces().items():
        found[key] = Holding(key, None)
        with suppress(CorruptError):
            found[key] = Holding(key, Namespace.parse(stored))
    return found


def in_all(holdings: Sequence[Holding]) -> Holding:
    """What there is of several namespaces together, as that of the first one."""
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in holdings) for name in SUMMED}
    last_used = max((one.last_used for one in holdings), default=0)
    return replace(holdings[0] if holdings else Holding(b"", None), **sums, last_used=last_used)


def keys_in(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Keys that can be compared and searched. One that ends in zeros lacks these: `bytes.ljust` puts them back."""
    return np.ascontiguousarray(column).view(f"S{KEY_BYTES}").reshape(-1)


_T = TypeVar("_T", Holding, Page)


def only_one(found: Sequence[_T], kind: str, wanted: str, location: str) -> _T:
    """The namespace or page that was found. Raises `InvalidParameterError` if there is none, or several."""
    if not found:
        command = "ls" if kind == "namespace" else "tree"
        raise InvalidParameterError(f"{location}: no {kind} begins with {wanted!r}; prefixstore {command} lists them")
    if len(found) > 1:
        matches = ", ".join(one.key.hex()[:12] for one in found[:4])
        raise InvalidParameterError(f"{kind} {wanted!r} is ambiguous; it matches {matches}")
    return found[0]
