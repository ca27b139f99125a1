"""Locations as users write them."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from prefixstore.backends import open_backend
from prefixstore.backends.lmdb.backend import LMDBBackend
from prefixstore.backends.location import cache_directory, path_of, scheme_of, text_of, without_password
from prefixstore.backends.memory import MemoryBackend
from prefixstore.errors import InvalidParameterError, LocationError

MIB = 1 << 20


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


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h/db?password=S3CRET",
        "postgresql://me@h/db?connect_timeout=3&PassWord=S3CRET&x=y",
        "postgresql://h/db?p%61ssword=S3CRET",
        "postgresql://h/db?sslpassword=S3CRET",
        "postgresql://h/db?options=-c%20my.secret%3DS3CRET",
        "postgresql://h/db?dbname=postgresql%3A%2F%2Fu%3AS3CRET%40h%2Fx",
        "postgresql://h/db?passwrd=S3CRET",
        "postgresql://me:a@S3CRET@h/db",
        "postgresql://me:a/S3CRET@h/db",
        "postgresql://me:a?S3CRET@h/db",
        "postgresql://me:a#S3CRET@h/db",
        "postgresql://me:a:S3CRET@h/db",
        "postgresql://:S3CRET@h/db",
        "postgresql://me:%53S3CRET@h/db?password=S3CRET",
        "redis://me:S3CRET@h",
    ],
)
def test_no_secret_of_a_url_is_shown_wherever_it_is(url):
    assert "S3CRET" not in without_password(url)
    assert without_password(url).startswith(url[: url.index("://")])


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me@h/db?options=-csearch_path%3Dx&passfile=/home/me/.pgpass",
        "/a/b:c@d",
        "sqlite:////a/b:c@d",
        "lmdb:///x?y",
    ],
)
def test_what_is_no_secret_is_shown(url):
    assert without_password(url) == url


# -- which location is which backend -----------------------------------------------------------------------------------


def test_a_location_names_its_backend(tmp_path):
    with closing(open_backend("memory:", max_bytes=MIB)) as backend:
        assert isinstance(backend, MemoryBackend)
    for location in (tmp_path / "a", str(tmp_path / "b"), f"lmdb://{tmp_path}/c"):
        with closing(open_backend(location, max_bytes=MIB)) as backend:
            assert isinstance(backend, LMDBBackend)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "location", ["", " ", "http://x", "lmdb:///x?y=1", "memory:/x", b"x", "valkey://h/x", "redis+x:"]
)
def test_a_location_without_a_known_backend_is_refused(location):
    with pytest.raises(InvalidParameterError, match="location"):
        open_backend(location, max_bytes=MIB)


def test_the_default_location_is_in_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    with closing(open_backend(None, max_bytes=MIB)) as backend:
        assert backend.location == f"lmdb://{cache_directory()}/kv"
    assert (tmp_path / "prefixstore" / "kv" / "data.mdb").exists()
