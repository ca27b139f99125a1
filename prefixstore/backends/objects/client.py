"""Where a bucket is, the requests to it, and what their errors mean.

Messages name the location, the status and the server's error code, and nothing else that came over the wire: the
server's reply may repeat credentials, and a URL may hold a signature.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np

from prefixstore.backends import refusals
from prefixstore.backends.location import without_password
from prefixstore.backends.objects.read_ahead import Arrived, Window
from prefixstore.errors import InvalidParameterError, LocationError, UnavailableError
from prefixstore.format.record import Buffer

__all__ = ["Address", "Client", "GoneError", "Listed", "Version"]

# Seconds: to connect; for one request with its body; without a byte from the server, while a body is sent, too.
CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 120.0
SILENCE_SECONDS = 30.0
# A request that fails by itself is sent again, so often, and no later than so many seconds after it was first sent.
RETRIES = 2
RETRY_SECONDS = 15.0

# objects that one request lists or deletes
LISTED_AT_ONCE = 1000
DELETED_AT_ONCE = 1000

# obstore, and what it raises where it gives up
LIBRARY = "obstore._obstore"
PANIC = "PanicException"
FORKED = "obstore does not work in a process that was forked from one that uses it; start processes by spawn"
# of a payload, received at a time
PIECE_BYTES = 256 << 10

# options of a URL, by scheme, and what obstore calls them
_COMMON = {"connect_timeout": "connect_timeout", "timeout": "timeout"}
_OPTIONS = {
    "s3": {
        "endpoint": "endpoint",
        "region": "region",
        "virtual_hosted_style": "virtual_hosted_style_request",
        "anonymous": "skip_signature",
    },
    "gs": {},
    "az": {"account": "account_name", "endpoint": "endpoint"},
}
_SWITCHES = ("virtual_hosted_style", "anonymous")
# bytes: S3 has names of at most 1,024, and ours are up to 750 long
LONGEST_PREFIX = 250
_SECONDS = re.compile(r"[0-9]{1,5}(\.[0-9]+)?")
# what can be a part of the URL of a request: for anything else obstore panics
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
_ENDPOINT = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?")

T = TypeVar("T")

# which version of an object is meant: what obstore's `put` has returned
Version = Mapping[str, str]


@dataclass(frozen=True)
class Address:
    """Where a store is. The prefix has no slash at its ends, and may be empty.

    `options` are for obstore, by its names; `timeouts` are seconds, by the names of its ``client_options``.
    """

    scheme: str
    bucket: str
    prefix: str
    shown: str
    options: Mapping[str, str | bool] = field(default_factory=dict)
    timeouts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, location: str) -> Address:
        """Read a URL such as ``"s3://bucket/prefix?endpoint=http://127.0.0.1:8333"``.

        Raises `InvalidParameterError` if it is not valid, or has a user name or a password.
        """
        shown = without_password(location)
        try:
            parts = urlsplit(location)
        except ValueError:
            raise InvalidParameterError(f"location={shown!r} is not a valid URL") from None
        if "@" in parts.netloc:
            raise InvalidParameterError(
                "location has a user name or a password in it; leave credentials to the environment "
                "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a role, ...)"
            )
        scheme = parts.scheme.lower()
        if scheme == "file":
            raise InvalidParameterError(
                f"location={shown!r}: objects in a directory have no conditional writes; use lmdb:///path or "
                "sqlite:////path"
            )
        bucket, prefix = unquote(parts.netloc), unquote(parts.path).strip("/")
        if parts.fragment or not bucket:
            raise InvalidParameterError(f'location={shown!r} names no bucket; pass for example "s3://bucket/prefix"')
        if not _BUCKET.fullmatch(bucket):
            raise InvalidParameterError(f"location={shown!r}: the name of a bucket has letters, digits, . _ and - only")
        if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
            raise InvalidParameterError(f"location={shown!r} has an empty segment, . or .. in its prefix")
        if len(prefix.encode()) > LONGEST_PREFIX:
            raise InvalidParameterError(f"location={shown!r}: a prefix has at most {LONGEST_PREFIX} bytes")
        options, timeouts = _read_options(scheme, shown, parts.query)
        return cls(scheme, bucket, prefix, shown, options, timeouts)


def _read_options(scheme: str, shown: str, query: str) -> tuple[dict[str, str | bool], dict[str, float]]:
    """Options for obstore, and timeouts in seconds."""
    options: dict[str, str | bool] = {}
    timeouts: dict[str, float] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in _COMMON:
            if not _SECONDS.fullmatch(value) or not float(value):
                raise InvalidParameterError(f"location={shown!r}: {name} must be a number of seconds")
            timeouts[name] = float(value)
        elif name not in _OPTIONS[scheme]:
            known = ", ".join(sorted(_OPTIONS[scheme].keys() | _COMMON.keys()))
            # a credential may be among the options: neither names nor values are repeated
            raise InvalidParameterError(f"location has an unknown option; known for {scheme}:// are {known}")
        elif name in _SWITCHES:
            if value.lower() not in ("true", "false"):
                raise InvalidParameterError(f"location={shown!r}: {name} must be true or false")
            options[_OPTIONS[scheme][name]] = value.lower() == "true"
        else:
            if name == "endpoint" and not _ENDPOINT.fullmatch(value):
                raise InvalidParameterError("location: endpoint must be http://host:port or https://host:port")
            if name != "endpoint" and not _NAME.fullmatch(value):
                raise InvalidParameterError(f"location={shown!r}: {name} must have letters, digits and - only")
            options[_OPTIONS[scheme][name]] = value
    return options, timeouts


class GoneError(LocationError):
    """An object that was there is gone."""


class Listed(NamedTuple):
    """An object in a listing."""

    name: str
    size: int


class Client:
    """The objects of one store, by their names below its prefix. Safe to use from many threads.

    `n_requests` counts those that were sent, without those that obstore itself repeats; `window` says how many payloads
    are requested at a time.
    """

    # the process that was the first to use obstore: its threads do not exist in a forked child
    _user: int | None = None

    def __init__(self, address: Address) -> None:
        self._address = address
        self.n_requests = 0
        # obstore's functions, its `_store` and its `exceptions`
        self._library = import_module(LIBRARY)
        self._store: Any = None
        Client._user = Client._user or os.getpid()
        self._require_no_fork()
        self.window = Window()
        with self._translated():
            self._store = self._connect()

    @property
    def where(self) -> str:
        """The location, as it may be shown."""
        return self._address.shown

    def close(self) -> None:
        """End all connections that are not in use."""
        self._store = None

    def inherited(self) -> None:
        """In a forked child: what belongs to the parent is not destroyed either, also when the interpreter ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))

    def _require_no_fork(self) -> None:
        if Client._user != os.getpid():
            raise UnavailableError(f"{self.where}: {FORKED}")

    def _connect(self) -> Any:
        address, stores = self._address, self._library._store  # noqa: SLF001 - where obstore has its classes
        prefix = address.prefix or None
        timeouts = {"connect_timeout": CONNECT_SECONDS, "timeout": REQUEST_SECONDS, **address.timeouts}
        client_options = {name: timedelta(seconds=seconds) for name, seconds in timeouts.items()}
        client_options["read_timeout"] = timedelta(seconds=min(SILENCE_SECONDS, timeouts["timeout"]))
        kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[address.scheme]
        return kind(
            address.bucket,
            prefix=prefix,
            client_options={"allow_http": True, **client_options},
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
            **address.options,
        )

    def get(self, name: str) -> tuple[memoryview, Version] | None:
        """An object, and which version it is; None if there is none."""
        try:
            return self.get_if_changed(name, {})
        except GoneError:
            return None

    def get_if_changed(self, name: str, known: Version) -> tuple[memoryview, Version] | None:
        """An object; None if it is still the known version. Raises `GoneError` if there is none."""
        options = {"if_none_match": known["e_tag"]} if "e_tag" in known else None

        def work() -> tuple[memoryview, Version]:
            result = self._library.get(self._opened(), name, options=options)
            return memoryview(result.bytes()), _version(result.meta)

        return self._asked(work, name)

    def receive(self, name: str, arrived: Arrived) -> memoryview | None:
        """An object, piece by piece; None if there is none. If `arrived` raises, the server is told to stop."""

        def work() -> memoryview:
            result = self._library.get(self._opened(), name)
            whole = np.empty(result.meta["size"], np.uint8).data
            at = 0
            for piece in result.stream(min_chunk_size=PIECE_BYTES):
                whole[at : at + len(piece)] = piece
                at += len(piece)
                arrived(len(piece))
            if at < len(whole):
                raise UnavailableError(f"{self.where}: a response ended after {at} of {len(whole)} bytes")
            return whole

        try:
            return self._asked(work, name)
        except GoneError:
            return None

    def put(self, name: str, data: Buffer, mode: str | Version = "overwrite") -> Version | None:
        """Write an object; with the mode ``"create"``, or a version, only if there is none, or that one: or None.

        Raises `GoneError` if a version is to be replaced, and there is no object.
        """
        how = mode if isinstance(mode, str) else dict(mode)
        return self._asked(lambda: _version(self._library.put(self._opened(), name, data, mode=how)), name)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are gone already do not count."""
        # S3 alone has a request for many
        at_once = DELETED_AT_ONCE if self._address.scheme == "s3" else 1
        for at in range(0, len(names), at_once):
            some = list(names[at : at + at_once])
            with suppress(GoneError):
                self._asked(partial(self._library.delete, self._opened(), some), some[0])

    def list(self, folder: str = "", after: str = "") -> Iterator[Listed]:
        """The objects in a folder and below it, or all there are, whose names come after this one, in their order."""
        with self._translated(folder):
            offset = after or None
            for some in self._library.list(self._opened(), folder or None, offset=offset, chunk_size=LISTED_AT_ONCE):
                self.n_requests += 1
                yield from (Listed(one["path"], one["size"]) for one in some)

    def folders(self) -> Sequence[str]:
        """The outermost folders that have objects."""
        found = self._asked(lambda: self._library.list_with_delimiter(self._opened())["common_prefixes"], "")
        return found or ()

    def require_open(self) -> None:
        """Raise `UnavailableError` if it was closed, or inherited."""
        self._opened()

    def _opened(self) -> Any:
        self._require_no_fork()
        store = self._store
        if store is None:
            raise refusals.closed(self.where)
        return store

    def _asked(self, work: Callable[[], T], name: str) -> T | None:
        """What a request for an object returns; None if a condition of it is not met."""
        self.n_requests += 1
        errors = self._library.exceptions
        with self._translated(name):
            try:
                return work()
            except (errors.NotModifiedError, errors.PreconditionError, errors.AlreadyExistsError):
                return None

    @contextmanager
    def _translated(self, name: str = "") -> Iterator[None]:
        """Translate obstore's errors. They are not given as the cause: their texts have whole replies."""
        errors = self._library.exceptions
        try:
            yield
        except (LocationError, UnavailableError):
            raise
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise LocationError(f"{self.where}: access is denied ({_reason(error)}); see AWS_ACCESS_KEY_ID, "
                                "AWS_SECRET_ACCESS_KEY and the policy of the bucket") from None  # fmt: skip
        except (errors.UnknownConfigurationKeyError, errors.InvalidPathError) as error:
            raise LocationError(f"{self.where} cannot be opened ({type(error).__name__})") from None
        except (FileNotFoundError, PermissionError) as error:
            if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
                raise GoneError(f"{self.where}: {name} is missing; the store was deleted") from None
            raise LocationError(f"{self.where}: {_reason(error)}; create the bucket first") from None
        except (errors.BaseError, OSError, ValueError) as error:
            raise UnavailableError(f"{self.where}: {_reason(error)}") from None
        except BaseException as error:
            # not an exception for Python, as an endpoint that is none in the environment raises it
            if type(error).__name__ != PANIC:
                raise
            raise UnavailableError(f"{self.where}: obstore has panicked; see AWS_ENDPOINT_URL") from None


def _version(found: Mapping[str, str | None]) -> Version:
    return {name: value for name in ("e_tag", "version") if (value := found.get(name))}


def _reason(error: Exception) -> str:
    """What went wrong, in the server's words for it, without anything else of its reply."""
    text = str(error).split("\n\nDebug source", 1)[0]
    if "169.254.169.254" in text or "169.254.170.2" in text:
        return "there are no credentials in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    status = re.search(r"status code: (\d+(?: [A-Z][A-Za-z]*)*)", text)
    code = re.search(r"<Code>(\w{1,60})</Code>", text)
    if status is not None or code is not None:
        return ", ".join(found[1] for found in (status, code) if found is not None)
    cause = re.search(r"HTTP error: ([a-z ]{1,80})", text)
    why = cause[1].strip() if cause is not None else type(error).__name__
    return f"no answer ({why}); a server other than the usual one is set by ?endpoint= in the URL, or AWS_ENDPOINT_URL"
