"""Parses the URL of a location in a Valkey or Redis server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from prefixstore.backends.location import require_plain_password, without_password
from prefixstore.errors import InvalidParameterError

__all__ = ["Address"]

TLS_SCHEMES = ("rediss", "valkeys")
DEFAULT_PORT = 6379
DEFAULT_NAME = "prefixstore"
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
# options of the URL that are given to the connection as they are
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Address:
    """Where a location is.

    Attributes
    ----------
    shown
        The URL without its password.
    name
        Of the location: what its keys have in braces.
    kind
        ``"tcp"``, ``"tls"`` or ``"unix"``.
    options
        What valkey-py's connection of this kind takes, the password included.
    """

    shown: str
    name: str
    kind: str
    options: dict[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, location: str) -> Address:
        """Parse a URL.

        Raises
        ------
        InvalidParameterError
            If it is not valid. The message does not show its password.
        """
        require_plain_password(location)
        shown = without_password(location)
        try:
            parts = urlsplit(location)
            given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            options = _server_of(parts)
        except ValueError:
            raise InvalidParameterError(f"location={shown!r} is not a valid URL") from None
        if options is None:
            raise InvalidParameterError(
                f"location={shown!r}: pass valkey://host:6379/0, valkeys:// with TLS, or unix:///run/valkey/valkey.sock"
            )
        kind = "unix" if "path" in options else "tls" if parts.scheme in TLS_SCHEMES else "tcp"
        for option, value in (("username", parts.username), ("password", parts.password)):
            if value:
                options[option] = unquote(value)
        name = given.pop("name", DEFAULT_NAME)
        if not NAME.fullmatch(name):
            raise InvalidParameterError(
                f"location={shown!r}: name has at most 64 letters, digits and _ . : -, for example ?name=team"
            )
        path = "" if kind == "unix" else parts.path.strip("/")
        database = given.pop("db", path) or "0"
        if not database.isdecimal():
            raise InvalidParameterError(
                f"location={shown!r}: the database is a number, as in valkey://host/0; to name the location pass ?name="
            )
        options["db"] = int(database)
        if kind == "tls":
            options |= _tls_of(given)
        if given or parts.fragment:
            # a credential may be among their values: these are not repeated
            raise InvalidParameterError(
                f"location: unknown options {', '.join(sorted(given)) or '#'}; known are name, db, and with "
                f"TLS {', '.join((*TLS_OPTIONS, 'ssl_check_hostname'))}"
            )
        return cls(shown, name, kind, options)


def _server_of(parts: SplitResult) -> dict[str, Any] | None:
    """Where the server listens; None if the URL does not say it."""
    if parts.scheme == "unix":
        # what comes before the path is a part of it, unless it is a user
        path = unquote(parts.netloc.rpartition("@")[2] + parts.path)
        return {"path": path} if path.strip("/") else None
    if parts.scheme not in (*TLS_SCHEMES, "redis", "valkey") or not parts.netloc:
        return None
    return {"host": parts.hostname or "localhost", "port": parts.port or DEFAULT_PORT}


def _tls_of(given: dict[str, str]) -> dict[str, Any]:
    """The options of TLS, taken out of those that are given; names of servers are checked by default."""
    options: dict[str, Any] = {option: given.pop(option) for option in TLS_OPTIONS if option in given}
    is_checked = given.pop("ssl_check_hostname", "true").lower() not in FALSE
    return options | {"ssl_check_hostname": is_checked and options.get("ssl_cert_reqs") != "none"}
