"""Tokens and the keys made of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import (
    as_tokens,
    page_keys,
)

token_lists = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30)
few = st.lists(st.integers(0, 1), max_size=12)


@given(token_lists)
def test_tokens_are_the_same_from_any_container(tokens):
    expected = b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)
    strided = np.zeros(2 * len(tokens), "<i4")
    strided[::2] = tokens
    for given_as in (tokens, tuple(tokens), np.array(tokens, np.int64), np.array(tokens, ">i4"), strided[::2]):
        array = as_tokens(given_as)
        assert array.tobytes() == expected
        assert array.dtype == np.dtype("<i4")
        assert array.flags.c_contiguous


@pytest.mark.parametrize(
    "wrong",
    [
        *("text", b"bytes", None, 7, {1: 2}, [[1, 2]], [[1], [2, 3]]),
        *([1.5], [True], [None], ["1"], [2**31], [-(2**31) - 1], [2**63], [2**70]),
        *(np.zeros((2, 2), "<i4"), np.zeros(3), np.array([2**32], np.uint64), np.zeros((0, 3), "<i4")),
    ],
    ids=repr,
)
def test_anything_but_a_sequence_of_tokens_is_refused(wrong):
    with pytest.raises(InvalidParameterError, match="tokens must"):
        as_tokens(wrong)


@given(few, few, st.integers(1, 4))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are_equal(a, b, page_tokens):
    keys_a, keys_b = (page_keys(bytes(32), as_tokens(tokens), page_tokens) for tokens in (a, b))
    assert len(keys_a) == len(a) // page_tokens
    for i, (x, y) in enumerate(zip(keys_a, keys_b, strict=False), 1):
        assert (x == y) == (a[: i * page_tokens] == b[: i * page_tokens])
    assert not set(keys_a) & set(page_keys(b"x" * 32, as_tokens(a), page_tokens))
    assert len(set(keys_a)) == len(keys_a)
