"""Where a Valkey server is, connections to it, and what is done when one of them fails.

A connection that is dead is replaced before it is used; one that fails meanwhile fails what it was used for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from valkey.backoff import NoBackoff
from valkey.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection, parse_url
from valkey.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    ValkeyError,
)
from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import TimeoutError as SilentError
from valkey.retry import Retry

from prefixstore.backends import refusals
from prefixstore.backends.location import require_plain_password, without_password
from prefixstore.backends.valkey.scripts import Names
from prefixstore.errors import (
    FullError,
    IncompatibleError,
    InvalidParameterError,
    LocationError,
    StorageError,
    UnavailableError,
)

T = TypeVar("T")
DEFAULT = {"host": "localhost", "port": 6379}
DEFAULT_NAME = "prefixstore"
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
# options of the URL that are given to the connection as they are
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
FALSE = ("0", "false", "no", "off")
CONNECT_SECONDS = 5.0
# A server that works sends something within this many seconds. TCP alone would wait for a quarter of an hour.
SILENT_SECONDS = 5.0
# what a server says of a command that it does not know ends with the arguments: of AUTH, with the password
ARGUMENTS = ", with args beginning with"
TOO_OLD = "Valkey 7.2 or Redis 7.0 is needed"
# what the server answers, by its first words
_ANSWERS: tuple[tuple[str, type[StorageError], str], ...] = (
    ("OOM ", FullError, "the server is out of memory"),
    ("WRONGTYPE", IncompatibleError, "a key of this name belongs to another application; pass another ?name="),
    ("unknown command", IncompatibleError, TOO_OLD),
    ("Unexpected engine", IncompatibleError, TOO_OLD),
    ("DB index is out of range", LocationError, "the server has fewer databases"),
    ("invalid DB index", LocationError, "the server has fewer databases"),
    ("MOVED ", LocationError, "this is a node of a cluster, which is not supported"),
)


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


def valkey_error(error: Exception, where: str) -> StorageError:
    """Translate an error of valkey-py, or of a socket, into a prefixstore error."""
    text = " ".join(str(error).partition(ARGUMENTS)[0].split())
    if isinstance(error, OutOfMemoryError):
        return FullError(f"{where}: the server is out of memory: {text}")
    if isinstance(error, AuthenticationError):
        return LocationError(f"{where}: the server refuses user and password: {text}")
    if isinstance(error, NoPermissionError):
        return LocationError(f"{where}: the user lacks a permission: {text}")
    if isinstance(error, SilentError | TimeoutError):
        return UnavailableError(f"{where}: the server has not answered for {SILENT_SECONDS:.0f} s")
    if isinstance(error, ResponseError):
        for beginning, kind, advice in _ANSWERS:
            if text.removeprefix("ERR ").startswith(beginning):
                return kind(f"{where}: {text}; {advice}")
    return UnavailableError(f"{where}: {text or type(error).__name__}")


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Translate the errors of the block."""
    try:
        yield
    except (ValkeyError, OSError, ValueError) as error:
        # ValueError: an answer without the number that it needs, or the name of a host that cannot be encoded. An error
        # with arguments may have a password in its text.
        raise valkey_error(error, where) from (None if ARGUMENTS in str(error) else error)


class Connections:
    """Connections to one server, used by one thread at a time each. In a forked child the pool begins anew."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.location = address.shown
        self.names = Names.of(address.name)
        self._closed = False
        self._pool = self._new_pool()

    def _new_pool(self) -> ConnectionPool:
        return ConnectionPool(
            **{
                "connection_class": self._address.kind,
                **self._address.options,
                "socket_timeout": SILENT_SECONDS,
                "socket_connect_timeout": CONNECT_SECONDS,
                "retry": Retry(NoBackoff(), 0),
                # answers are those to commands, and nothing else: `payloads` reads some of them from the socket
                "protocol": 2,
                "lib_name": None,
                "lib_version": None,
                "client_name": "prefixstore",
            }
        )

    def close(self) -> None:
        """Close all connections; one that another thread uses, once it gives it back."""
        self._closed = True
        self._pool.disconnect(inuse_connections=False)

    def require_open(self) -> None:
        """Raise `UnavailableError` if they were closed."""
        if self._closed:
            raise refusals.closed(self.location)

    def call(self, *command: Any) -> Any:
        """The server's reply to a command."""
        return self.use(lambda connection: reply_to(connection, *command))

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.call("EVAL", script, len(self.names), *self.names, *arguments)

    def use(self, work: Callable[[Any], T]) -> T:
        """Do some work on a connection."""
        with self.connection() as connection:
            return work(connection)

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """A connection for a block that reads all replies to what it sends, unless it raises an error."""
        pool = self._pool
        connection: Any = None
        with translated(self.location):
            try:
                # also when this is closed: what another thread has begun ends, and gives back its lock
                connection = pool.get_connection("")
                yield connection
            except BaseException as error:
                if connection is not None and not isinstance(error, ResponseError):
                    # what it has not read yet would be taken for the answer to the next command
                    connection.disconnect()
                if isinstance(error, LostError | SilentError | ReadOnlyError):
                    # the others are as old, and the address of a server that has become a replica may be another's now
                    self._pool = self._new_pool()
                raise
            finally:
                if connection is not None:
                    if self._closed:
                        connection.disconnect()
                    pool.release(connection)


def reply_to(connection: Any, *command: Any) -> Any:
    """The reply to a command on this connection."""
    connection.send_command(*command)
    return connection.read_response()
