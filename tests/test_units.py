"""Sizes and durations as text, and what fits a budget."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.engine.budget import Budget
from prefixstore.engine.page_view import Used
from prefixstore.errors import InvalidParameterError
from prefixstore.units import format_bytes, format_number, format_seconds, format_share, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1B", 1),
        ("500MB", 500 * 10**6),
        ("20GiB", 20 * 2**30),
        (" 1.5 kib ", 1536),
        ("2K", 2048),
        (4096, 4096),
    ],
)
def test_a_size_is_parsed_with_its_unit(text, size):
    assert parse_bytes(text, "max_bytes") == size


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [(90, 90), ("90s", 90), ("1.5m", 90), ("2d", 172_800), (timedelta(days=2), 172_800)],
)
def test_a_duration_is_seconds_or_text_or_a_timedelta(duration, seconds):
    assert parse_seconds(duration, "ttl") == seconds


@pytest.mark.parametrize("ttl", ["soon", "-1s", 0, -5, float("nan"), float("inf"), True, None, "1 fortnight", [1]])
def test_an_invalid_duration_is_named_in_the_error(ttl):
    with pytest.raises(InvalidParameterError, match="ttl="):
        parse_seconds(ttl, "ttl")


@pytest.mark.parametrize("parse", [parse_bytes, parse_seconds])
def test_a_text_without_a_unit_is_refused(parse):
    with pytest.raises(InvalidParameterError, match="'80' has no unit"):
        parse("80", "to")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (3 * 2**50, "3072.0 TiB")]
)
def test_a_size_is_formatted_with_a_unit(size, text):
    assert format_bytes(size) == text


@given(st.integers(1, 2**60))
def test_a_formatted_size_can_be_parsed_again(size):
    assert parse_bytes(format_bytes(size), "x") == pytest.approx(size, rel=0.06)


def test_numbers_are_short():
    assert [format_number(n) for n in (0, 7, 0.25, 2.5, 12_345, 999_949, 1_234_567, 5e9)] == [
        *("0", "7", "0.25", "2.5", "12,345", "999,949", "1.23 M", "5 G")
    ]
    assert [format_share(share) for share in (None, 0.0, 0.333, 1.0)] == ["-", "0 %", "33 %", "100 %"]
    assert format_share(0.0004, 2) == "0.04 %"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00032, "0.32 ms"),
        (0.0296, "30 ms"),
        (0.629, "629 ms"),
        (1.2345, "1.2 s"),
        (100, "1.7 min"),
        (7200, "2 h"),
        (200_000, "2.3 d"),
        (90 * 86_400, "90 d"),
        (-3, "-3 s"),
    ],
)
def test_a_duration_has_two_digits_and_the_unit_that_suits_it(seconds, text):
    assert format_seconds(seconds) == text


sizes = st.integers(0, 20)


@given(sizes, sizes, st.none() | sizes, sizes, sizes, sizes)
def test_a_budget_is_exceeded_by_the_first_byte_and_the_first_entry_too_many(
    max_bytes, used, max_entries, entries, adding, more
):
    budget = Budget(max_bytes, max_entries)
    fits = used + adding <= max_bytes and (max_entries is None or entries + more <= max_entries)
    assert budget.exceeded(Used(used, entries), adding=adding, entries=more) is not fits
