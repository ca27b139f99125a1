"""Page keys: chained hashes of the namespace and of all tokens up to the end of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from prefixstore.errors import InvalidParameterError

__all__ = ["KEY_BYTES", "TOKEN_BYTES", "TokenSequence", "Tokens", "as_tokens", "common_prefix", "page_key", "page_keys"]

Tokens: TypeAlias = npt.NDArray[np.int32]
TokenSequence: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
TOKEN_BYTES = 4
# of page keys and namespace keys
KEY_BYTES = 16


def as_tokens(tokens: TokenSequence) -> Tokens:
    """Tokens as a contiguous little-endian int32 array of shape ``(n,)``; no copy if they are one already.

    Raises
    ------
    InvalidParameterError
        If `tokens` is not a flat sequence of 32-bit integers.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.dtype("<i4") and tokens.ndim == 1:
        return np.ascontiguousarray(tokens)
    try:
        wide = np.asarray(tokens)
        if wide.size == 0 and wide.ndim == 1:
            return np.empty(0, dtype="<i4")
        if wide.ndim != 1 or wide.dtype.kind not in "iu":
            raise InvalidParameterError(
                f"tokens must be a flat sequence of integers, not {type(tokens).__name__} of shape {wide.shape} and "
                f"type {wide.dtype}; tokenize text first, with llm.tokenize(text)"
            )
    except (ValueError, OverflowError) as error:
        raise InvalidParameterError(f"tokens must be a flat sequence of integers: {error}") from error
    if wide.min() < -(2**31) or wide.max() >= 2**31:
        raise InvalidParameterError(
            f"tokens must be 32-bit integers, as llama.cpp's token ids are; these are {wide.min()} to {wide.max()}"
        )
    return np.ascontiguousarray(wide, dtype="<i4")


def page_key(parent: bytes, tokens: bytes, form: int = 0) -> bytes:
    """The key of the page with these token bytes after `parent`: xxh3-128, 16 bytes.

    Parameters
    ----------
    parent
        The key of the parent; for a first page, the key of the namespace.
    tokens
        The page's tokens as little-endian int32 bytes.
    form
        `PAGE` or `SNAPSHOT`; it seeds the hash, so a page and a snapshot of the same tokens have different keys.
    """
    return xxhash.xxh3_128_digest(parent + tokens, seed=form)


def page_keys(namespace: bytes, tokens: Tokens, page_tokens: int) -> list[bytes]:
    """The keys of all full pages of `tokens`, first page first."""
    raw = tokens.tobytes()
    step = page_tokens * TOKEN_BYTES
    keys: list[bytes] = []
    parent = namespace
    for end in range(step, len(raw) + 1, step):
        parent = page_key(parent, raw[end - step : end])
        keys.append(parent)
    return keys


def common_prefix(a: Tokens, b: Tokens) -> int:
    """The length of the longest common prefix of `a` and `b`, in tokens."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
