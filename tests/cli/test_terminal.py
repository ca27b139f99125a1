"""Text that fits the terminal."""

from __future__ import annotations

import pytest

from prefixstore.cli import output
from prefixstore.cli.output import grid, wrapped


def test_a_table_that_is_too_wide_is_cut_at_its_texts_and_then_at_its_last_columns():
    rows = [["a name that is rather long", "12,345", "", "99"], ["b", "1", "", "2"]]
    assert grid(rows, 80, ["name", "pages", "empty", "hits"]) == [
        "name                         pages  hits",
        "a name that is rather long  12,345    99",
        "b                                1     2",
    ]
    assert grid(rows, 30, ["name", "pages", "empty", "hits"])[1] == "a name that is …  12,345    99"
    assert grid(rows, 22, ["name", "pages", "empty", "hits"])[1] == "a name that i…  12,345"
    assert grid([], 80, ["name"]) == ["name"]


@pytest.mark.parametrize("columns", [20, 60])
def test_lines_are_broken_between_words(monkeypatch, columns):
    monkeypatch.setattr(output, "terminal_width", lambda _: columns)
    text = "What follows is the same in both-of-them, for at least 1,293 characters."
    lines = wrapped(text).split("\n")
    assert " ".join(line.strip() for line in lines) == text
    assert max(map(len, lines)) <= columns
    assert [line[:3].count(" ") for line in lines[1:]] == [2] * (len(lines) - 1)
