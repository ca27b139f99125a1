"""Locations as users write them."""

import logging
import sys
from contextlib import closing
from pathlib import Path

import pytest

from prefixstore.backends import open_backend
from prefixstore.backends.lmdb.lmdb_backend import LMDBBackend
from prefixstore.backends.location import cache_directory, path_of, scheme_of, text_of, without_password
from prefixstore.backends.memory import MemoryBackend
from prefixstore.errors import InvalidParameterError, LocationError, PrefixStoreError

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


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("lmdb:///x%20y", "/x y"),
        ("/x%20y?", "/x%20y?"),
        ("sqlite:////x%20y#z", "/x%20y#z"),
        ("SQLite+pysqlite:///x/y.db", "x/y.db"),
    ],
)
def test_the_path_of_a_url_is_unquoted_but_that_for_sqlite_and_a_bare_path_are_not(text, path):
    assert path_of(text) == path


REFUSED = {
    "location is empty": ["", "  "],
    "must be a path or a URL, not": [7, b"x"],
    "is unknown; known are az, ": ["http://x", "mongodb://host"],
    "is not a valid URL": ["redis+x:", "valkey:", "valkey://h:port"],
    "options in the URL": ["lmdb:///x?y=1", "sqlite:///x.db?mode=ro", "sqlite:///x.db? y"],
    "memory has no path": ["memory:/x", "memory:x"],
    "characters that no file name can have": ["lmdb:///x\ud800", "/x\0y"],
    "not valid text": ["postgresql://\udcff@h/x"],
    "names no file": ["sqlite:x", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://host/x"],
    "unknown driver": ["sqlite+other:///x", "postgresql+asyncpg://h/x"],
    "not a valid database URL": ["postgresql://h:port/x"],
    "the database is a number": ["valkey://h/kv", "valkey://h?db=x"],
    "name has at most 64": ["valkey://h?name=a%20b", "valkey://h?name="],
    "unknown options": ["valkey://h?timeout=1", "valkey://h?ssl_ca_certs=/x", "valkey://h#f"],
    "write %40 for @": ["valkey://u:p@ss@h"],
    "or unix:///run": ["unix://"],
}


@pytest.mark.parametrize(("says", "location"), [(says, one) for says in REFUSED for one in REFUSED[says]], ids=ascii)
def test_what_is_no_location_is_refused(says, location):
    with pytest.raises(InvalidParameterError, match="location") as raised:
        open_backend(location, max_bytes=MIB)
    assert says in str(raised.value)


def test_a_url_without_a_path_is_refused():
    with pytest.raises(LocationError, match="no path"):
        path_of("lmdb:")


SECRETS = [
    "postgresql://127.0.0.1:1/db?password=S3CRET",
    "postgresql://me@127.0.0.1:1/db?connect_timeout=3&PassWord=S3CRET&x=y",
    "postgresql://127.0.0.1:1/db?p%61ssword=S3CRET&connect_timeout=abc",
    "postgresql://127.0.0.1:1/db?sslpassword=S3CRET&sslmode=nonsense",
    "postgresql://127.0.0.1:1/db?options=-c%20my.secret%3DS3CRET",
    "postgresql://127.0.0.1:1/db?dbname=postgresql%3A%2F%2Fu%3AS3CRET%40h%2Fx",
    "postgresql://127.0.0.1:1/db?passwrd=S3CRET",
    *(f"postgresql://me:S3{sign}CRET@127.0.0.1:1/db" for sign in "@/?#:"),
    "postgresql://:S3CRET@127.0.0.1:1/db",
    "postgresql://me:%53S3CRET@127.0.0.1:1/db?password=S3CRET",
    "postgresql://joe:S3CRET@127.0.0.1:port/x",
    "postgresql+asyncpg://joe:S3CRET@h/x?password=S3CRET",
    "postgresql://127.0.0.1:1/db?password=S3@CRET",
    "postgresql://joe:S3CRET@h:1/x?password=S3@CRET",
    "redis://me:S3CRET@127.0.0.1:1",
    "sqlite://joe:S3CRET@host/x.db?password=S3CRET",
    "lmdb://joe:S3CRET@host/x?password=S3CRET",
    "nothing://joe:S3CRET@host?password=S3CRET",
]


@pytest.mark.parametrize("url", SECRETS)
def test_no_part_of_a_secret_in_a_url_is_shown_or_in_a_message(url, caplog):
    assert "CRET" not in without_password(url)
    assert without_password(url).startswith(url[: url.index("://")])
    caplog.set_level(logging.DEBUG)
    with pytest.raises(PrefixStoreError) as caught:
        open_backend(url, max_bytes=MIB)
    shown, error = caplog.text, caught.value
    while error is not None:
        shown, error = f"{shown} {error}", error.__cause__ or error.__context__
    assert "CRET" not in shown


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


def test_the_default_location_is_in_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    with closing(open_backend(None, max_bytes=MIB)) as backend:
        assert backend.location == f"lmdb://{cache_directory()}/kv"
    assert (tmp_path / "prefixstore" / "kv" / "data.mdb").exists()
