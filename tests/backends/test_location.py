"""Locations as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixstore.backends.location import path_of, scheme_of, text_of, without_password
from prefixstore.errors import InvalidParameterError, LocationError


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("lmdb:///x", "lmdb"),
        ("/x/y", "lmdb"),
        ("x/y:z", "lmdb"),
        (r"C:\x", "lmdb"),
        ("C:/x", "lmdb"),
        ("memory:", "memory"),
        ("SQLite:////x.db", "sqlite"),
        ("postgresql+psycopg://u@h/d", "postgresql"),
        ("postgresql://[h/x", "postgresql"),
    ],
)
def test_the_scheme_is_the_part_before_the_colon_unless_it_is_a_path(text, scheme):
    assert scheme_of(text) == scheme


def test_a_path_object_is_a_path_whatever_it_looks_like():
    assert scheme_of(text_of(Path("sqlite:x"))) == "lmdb"
    assert text_of(Path("sqlite:x")) == str(Path.cwd() / "sqlite:x")


def test_the_path_of_a_url_is_unquoted_and_a_bare_path_is_not():
    assert path_of("lmdb:///x%20y") == "/x y"
    assert path_of("/x%20y?") == "/x%20y?"


@pytest.mark.parametrize("location", ["", "  ", 7, b"x"])
def test_an_empty_location_or_one_that_is_not_a_string_is_refused(location):
    with pytest.raises(InvalidParameterError, match=r"location (is empty|must be a path or a URL, not)"):
        text_of(location)


def test_a_url_without_a_path_or_with_options_is_refused():
    with pytest.raises(LocationError, match="no path"):
        path_of("lmdb:")
    with pytest.raises(InvalidParameterError, match="options"):
        path_of("lmdb:///x?a=b")


def test_a_password_is_not_shown():
    assert without_password("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"
    assert without_password("postgresql://me@host/db") == "postgresql://me@host/db"
    assert without_password("/a/b:c@d") == "/a/b:c@d"
