"""Locations as users write them: a URL, a path, nothing."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from prefixstore.errors import InvalidParameterError, LocationError

# the variable that names the location where nothing else does
ENVIRONMENT = "PREFIXSTORE_LOCATION"
# in names of options, and in values, that are not shown
SECRET = re.compile(r"passw|pwd|passphrase|secret|token", re.IGNORECASE)
# one letter is a Windows drive
URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):")


def cache_directory() -> Path:
    """The directory of prefixstore in the user's cache directory. Raises `LocationError` if there is no home."""
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        # as in a container that runs as a number, without HOME
        raise LocationError(f"this user has no home directory; set HOME, or {ENVIRONMENT} to a location") from None
    return base / "prefixstore"


def default_location() -> str:
    """The location if none is given: that of `ENVIRONMENT`, or else LMDB in the user's cache directory."""
    return os.environ.get(ENVIRONMENT) or str(cache_directory() / "kv")


def text_of(location: str | os.PathLike[str] | None) -> str:
    """A location as text: a URL as it is, a path object as an absolute path, None as the `default_location`.

    Raises `InvalidParameterError` if it is empty, or not a string.
    """
    if location is None:
        location = default_location()
    if isinstance(location, os.PathLike):
        # absolute, so that nothing in it reads as a scheme
        location = os.path.abspath(os.fspath(location))  # noqa: PTH100 - a path that is bytes must not raise here
    if not isinstance(location, str):
        raise InvalidParameterError(f"location must be a path or a URL, not {type(location).__name__}")
    if not location.strip():
        raise InvalidParameterError(
            'location is empty; pass a path, a URL such as "lmdb:///var/cache/kv", or "memory:"'
        )
    try:
        is_encodable = b"\0" not in os.fsencode(location)
    except UnicodeEncodeError:
        is_encodable = False
    if not is_encodable or (is_url(location) and "%00" in location):
        raise InvalidParameterError(
            f"location={without_password(location)!r} has characters that no file name can have"
        )
    return location


def is_url(text: str) -> bool:
    """Whether a location has a scheme; otherwise it is a path."""
    return URL.match(text) is not None


def scheme_of(text: str) -> str:
    """The scheme of a location; a path is LMDB's. Of ``"postgresql+psycopg://…"`` it is the part before the plus."""
    found = URL.match(text)
    return found["scheme"].lower().split("+")[0] if found is not None else "lmdb"


def without_password(text: str) -> str:
    """A location as it may be shown and logged: without passwords, wherever in a URL they are."""
    # up to the last @: a password may hold others, although they should be written %40
    hidden = re.sub(r"(://[^/@:?#]*):.*@", r"\1:***@", text, flags=re.DOTALL)
    if "@" in text.partition("?")[2] and hidden != text:
        # what comes after that @ may be of a password, too: no such URL can be opened
        return hidden.rpartition("@")[0]
    address, mark, options = hidden.partition("?")
    if not mark or "://" not in address:
        return hidden
    return address + mark + "&".join(map(_shown_option, options.split("&")))


def without_passwords(message: str) -> str:
    """A message without passwords, even if it repeats a URL that was taken for a path and lost a slash."""
    return re.sub(r"(:/+[^/@:?#\s]*):\S*@", r"\1:***@", message)


def _shown_option(option: str) -> str:
    name, equals, value = option.partition("=")
    # a value may be a URL or options in its turn
    is_secret = SECRET.search(unquote(name)) or SECRET.search(unquote(value)) or "@" in unquote(value)
    return f"{name}{equals}***" if equals and is_secret else option


def require_plain_password(text: str) -> None:
    """Refuse a URL whose password has characters that end it for some parsers: part of it would become the host.

    Raises `InvalidParameterError`, without repeating the URL.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidParameterError("location is not valid text: it has an unpaired surrogate") from None
    rest = text.partition("://")[2]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if rest.count("@") > 1 or rest.count("@") != authority.count("@"):
        raise InvalidParameterError(
            "location has an @, or one of / ? # before it, in a password or an option; write %40 for @, %2F for /, "
            "%3F for ? and %23 for #, or leave the password to ~/.pgpass"
        )


def path_of(text: str) -> str:
    """The path in a location that is a path or a URL with nothing but a path.

    That in a URL for SQLite is not unquoted, and relative unless it begins with a fourth slash.

    Raises `InvalidParameterError` for a URL that is not valid or has options, `LocationError` for one without a path.
    """
    if not is_url(text):
        return text
    shown = f"location={without_password(text)!r}"
    try:
        parts = urlsplit(text, allow_fragments=scheme_of(text) != "sqlite")
    except ValueError as error:
        raise InvalidParameterError(f"{shown} is not a valid URL: {error}") from None
    if parts.query or parts.fragment:
        raise InvalidParameterError(f"{shown}: options in the URL are not supported; pass them as parameters")
    if scheme_of(text) == "sqlite":
        if parts.scheme not in ("sqlite", "sqlite+pysqlite"):
            raise InvalidParameterError(f"{shown}: unknown driver; pass sqlite:////path")
        if "://" not in text or parts.netloc or parts.path in ("", "/", "/:memory:"):
            raise InvalidParameterError(
                f'{shown} names no file; pass "sqlite:////absolute/path.db" or "sqlite:///relative.db"; for a store in '
                'memory pass "memory:"'
            )
        return parts.path[1:]
    path = unquote(parts.netloc + parts.path)
    if not path.strip("/"):
        raise LocationError(f'location={text!r} has no path; pass for example "{parts.scheme}:///var/cache/kv"')
    return path
