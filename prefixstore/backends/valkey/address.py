"""Parses the URL of a location in a Valkey or Redis server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from valkey.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url

from prefixstore.backends.location import require_plain_password, without_password
from prefixstore.errors import InvalidParameterError

__all__ = ["Address"]

DEFAULT = {"host": "localhost", "port": 6379}
DEFAULT_NAME = "prefixstore"
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
# options of the URL that are given to the connection as they are
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Address:
    """Where a location is: its URL without the password, its name, and the class of its connections and what they take.

    The keys of the location have its name in braces. The password is among the options.
    """

    shown: str
    name: str
    kind: type[Any]
    options: dict[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, location: str) -> Address:
        """Parse a URL. Raises `InvalidParameterError`, without its password, if it is not valid."""
        require_plain_password(location)
        shown = without_password(location)
        try:
            parts = urlsplit(location)
            given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            options: dict[str, Any] = dict(parse_url(parts._replace(query="", fragment="").geturl()))
        except ValueError:
            raise InvalidParameterError(f"location={shown!r} is not a valid URL") from None
        kind = options.pop("connection_class", Connection)
        is_path = kind is UnixDomainSocketConnection
        if not options.get("path", "").strip("/") if is_path else not parts.netloc:
            raise _other(shown, "pass valkey://host:6379/0, valkeys:// with TLS, or unix:///run/valkey/valkey.sock")
        name = given.pop("name", DEFAULT_NAME)
        if not NAME.fullmatch(name):
            raise _other(shown, "name has at most 64 letters, digits and _ . : -, for example ?name=team")
        database = given.pop("db", "" if is_path else parts.path.strip("/")) or "0"
        if not database.isdecimal():
            raise _other(shown, "the database is a number, as in valkey://host/0; to name the location pass ?name=")
        options = ({} if is_path else DEFAULT) | options | {"db": int(database)}
        if kind is SSLConnection:
            options |= {option: given.pop(option) for option in TLS_OPTIONS if option in given}
            is_checked = given.pop("ssl_check_hostname", "true").lower() not in FALSE
            options["ssl_check_hostname"] = is_checked and options.get("ssl_cert_reqs") != "none"
        if given or parts.fragment:
            # a credential may be among their values: these are not repeated
            raise InvalidParameterError(
                f"location: unknown options {', '.join(sorted(given)) or '#'}; known are name, db, and with "
                f"TLS {', '.join((*TLS_OPTIONS, 'ssl_check_hostname'))}"
            )
        return cls(shown, name, kind, options)


def _other(shown: str, advice: str) -> InvalidParameterError:
    return InvalidParameterError(f"location={shown!r}: {advice}")
