"""Which parts of a sequence are not stored, as ranges of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from prefixstore.engine.engine import Engine
from prefixstore.format.keys import Tokens

__all__ = ["missing_ranges"]


def missing_ranges(
    engine: Engine, namespace: bytes, keys: Sequence[bytes], tokens: Tokens, page_tokens: int, *, tail: bool
) -> list[tuple[int, int]]:
    """First position and boundary of each page of a sequence that is not stored.

    Parameters
    ----------
    engine
        Knows what is stored.
    namespace
        Key of the namespace.
    keys
        The keys of all full pages.
    tokens
        The sequence.
    page_tokens
        Length of a page.
    tail
        Whether the tokens after the last full page are one, too.
    """
    missing = engine.missing(namespace, tokens, page_tokens)
    ranges = [(i * page_tokens, (i + 1) * page_tokens) for i in missing]
    start = len(keys) * page_tokens
    if tail and start < len(tokens):
        # a page that is taken now has no children yet, so nothing can cover the tail
        parent = keys[-1] if keys else namespace
        if missing or engine.wants(namespace, parent, tokens[start:].tobytes()):
            ranges.append((start, len(tokens)))
    return ranges
