"""Keys: chained hashes of the namespace and of all tokens up to the end of a page.

They must be collision resistant: an attacker who could construct two prompts with one key could have the state of one
stored under the key of the other, and everyone in that namespace would restore it. So they are BLAKE2b, which is also
faster than SHA-256. Checksums are not keys: they detect accidents, and are xxh3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.errors import InvalidParameterError

Tokens: TypeAlias = npt.NDArray[np.int32]
TokenSequence: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
NO_TOKENS: Tokens = np.empty(0, "<i4")
TOKEN_BYTES = 4
# of page keys and namespace keys
KEY_BYTES = 32

# Forms. A page is the state of its tokens; a snapshot the state needed to resume after them.
PAGE = 0
SNAPSHOT = 1

# BLAKE2b's personalization, 16 bytes: equal bytes of different kinds have different keys.
_OF_NAMESPACE = b"prefixstore name"
_OF_FORM = {PAGE: b"prefixstore page", SNAPSHOT: b"prefixstore snap"}


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
    except (ValueError, OverflowError) as error:
        raise InvalidParameterError(f"tokens must be a flat sequence of integers: {error}") from error
    if wide.size == 0 and wide.ndim == 1:
        return np.empty(0, dtype="<i4")
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise InvalidParameterError(
            f"tokens must be a flat sequence of integers, not {type(tokens).__name__} of shape {wide.shape} and "
            f"type {wide.dtype}; tokenize text first, with llm.tokenize(text)"
        )
    if wide.min() < -(2**31) or wide.max() >= 2**31:
        raise InvalidParameterError(
            f"tokens must be 32-bit integers, as llama.cpp's token ids are; these are {wide.min()} to {wide.max()}"
        )
    return np.ascontiguousarray(wide, dtype="<i4")


def namespace_key(settings: bytes) -> bytes:
    """The key of the namespace with these canonical settings."""
    return _digest(settings, _OF_NAMESPACE)


def page_key(parent: bytes, tokens: bytes, form: int = PAGE) -> bytes:
    """The key of the page, or of the snapshot, with these token bytes after `parent`.

    The parent of a first page is the namespace. Tokens are little-endian int32 bytes.
    """
    return _digest(parent + tokens, _OF_FORM[form])


def _digest(content: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES, person=person).digest()


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
