"""Tokens to chained boundary hashes: the keys of pages."""

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
        If `tokens` is not a flat sequence of integers that fit into int32.
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
        raise InvalidParameterError("tokens must fit into int32; llama.cpp's token ids are 32-bit integers")
    return np.ascontiguousarray(wide, dtype="<i4")


def page_key(parent: bytes, tokens: bytes, form: int = 0) -> bytes:
    """The key of the page with these token bytes behind `parent`: xxh3-128, 16 bytes.

    Parameters
    ----------
    parent
        The key of the page before, or the key of the namespace for a first page.
    tokens
        The page's tokens as little-endian int32 bytes.
    form
        The seed: a page and a snapshot of the same tokens have different keys.
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
    """The number of tokens at the start of `a` and `b` that are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
