"""Where a bucket is, the requests to it, and what their errors mean.

Messages name the location, the status and the server's error code, and nothing else that came over the wire: the
server's reply may repeat credentials, and a URL may hold a signature.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from prefixstore.backends import refusals
from prefixstore.backends.forks import abandon
from prefixstore.backends.location import without_password
from prefixstore.backends.objects.read_ahead import Arrived
from prefixstore.errors import InvalidParameterError, LocationError, UnavailableError
from prefixstore.format.record import Buffer

# Seconds: to connect; for one request with its body; without a byte from the server, while a body is sent, too.
CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 120.0
SILENCE_SECONDS = 30.0
# A request that fails by itself is sent again, this often, and no later than this many seconds after it was first sent.
RETRIES = 2
RETRY_SECONDS = 15.0
# objects that one request lists or deletes
LISTED_AT_ONCE = 1000
DELETED_AT_ONCE = 1000
# of a payload, received at a time; and what is larger is sent in parts, which are three requests more
PIECE_BYTES = 256 << 10
PART_BYTES = 64 << 20
# what a server says of a bucket that there is not; what obstore raises where it gives up
# what S3 and Azure call a bucket that is not there
NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
PANIC = "PanicException"
FORKED = "obstore does not work in a process that was forked from one that uses it; start processes by spawn"

_KINDS: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
# What can be a part of the URL of a request: for anything else obstore panics.
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]*")
_NAME = r"[A-Za-z0-9][A-Za-z0-9-]*", "letters, digits and - only"
_HOST = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)"
_ENDPOINT = rf"https?://{_HOST}(:[0-9]{{1,5}})?(/[A-Za-z0-9._~/-]*)?", "http://host:port or https://host:port"
_SECONDS = r"(?=.*[1-9])[0-9]{1,5}(\.[0-9]+)?", "a number of seconds"
_SWITCH = r"(?i:true|false)", "true or false"
# options of a URL, by scheme: what obstore calls them, what their values are, and how that is said
_TIMES = {"connect_timeout": ("connect_timeout", *_SECONDS), "timeout": ("timeout", *_SECONDS)}
_OPTIONS = {
    "s3": {
        **_TIMES,
        "endpoint": ("endpoint", *_ENDPOINT),
        "region": ("region", *_NAME),
        "virtual_hosted_style": ("virtual_hosted_style_request", *_SWITCH),
        "anonymous": ("skip_signature", *_SWITCH),
    },
    "gs": _TIMES,
    "az": {**_TIMES, "account": ("account_name", *_NAME), "endpoint": ("endpoint", *_ENDPOINT)},
}
# bytes: S3 has names of at most 1,024, and ours are up to 750 long
LONGEST_PREFIX = 250

T = TypeVar("T")

# which version of an object is meant: what obstore's `put` has returned
Version = Mapping[str, str]


@dataclass(frozen=True)
class Bucket:
    """Where a store is. The prefix has no slash at its ends, and may be empty. `options` have obstore's names."""

    scheme: str
    bucket: str
    prefix: str
    shown: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, location: str) -> Bucket:
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
        scheme, bucket, prefix = parts.scheme.lower(), unquote(parts.netloc), unquote(parts.path).strip("/")
        if scheme == "file":
            wrong = ": objects in a directory have no conditional writes; use lmdb:///path or sqlite:////path"
        elif parts.fragment or not bucket:
            wrong = ' names no bucket; pass for example "s3://bucket/prefix"'
        elif not _BUCKET.fullmatch(bucket):
            wrong = ": the name of a bucket has letters, digits, . _ and - only"
        elif prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
            wrong = " has an empty segment, . or .. in its prefix"
        elif len(prefix.encode()) > LONGEST_PREFIX:
            wrong = f": a prefix has at most {LONGEST_PREFIX} bytes"
        else:
            return cls(scheme, bucket, prefix, shown, _read_options(scheme, shown, parts.query))
        raise InvalidParameterError(f"location={shown!r}{wrong}")


def _read_options(scheme: str, shown: str, query: str) -> dict[str, str]:
    known, options = _OPTIONS[scheme], {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            # a credential may be among the options: neither names nor values are repeated
            raise InvalidParameterError(
                f"location has an unknown option; known for {scheme}:// are {', '.join(sorted(known))}"
            )
        theirs, values, says = known[name]
        if not re.fullmatch(values, value):
            raise InvalidParameterError(f"location={shown!r}: {name} must be {says}")
        options[theirs] = value
    return options


class Listed(NamedTuple):
    """An object in a listing."""

    name: str
    size: int


class Client:
    """The objects of one store, by their names below its prefix. Safe to use from many threads."""

    # the process that was the first to use obstore: its threads do not exist in a forked child
    _user: int | None = None

    def __init__(self, address: Bucket) -> None:
        self._address = address
        self._store: Any = None
        Client._user = Client._user or os.getpid()
        self._require_no_fork()
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
        """In a forked child: what belongs to the parent is not destroyed either."""
        abandon(self._store)

    def _require_no_fork(self) -> None:
        if Client._user != os.getpid():
            raise UnavailableError(f"{self.where}: {FORKED}")

    def _connect(self) -> Any:
        options: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, "timeout": REQUEST_SECONDS}
        options |= self._address.options
        seconds = {name: float(options.pop(name)) for name in _TIMES}
        seconds["read_timeout"] = min(SILENCE_SECONDS, seconds["timeout"])
        return _KINDS[self._address.scheme](
            self._address.bucket,
            prefix=self._address.prefix or None,
            client_options={"allow_http": True} | {name: timedelta(seconds=n) for name, n in seconds.items()},
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
            **options,
        )

    def get(self, name: str, known: Version | None = None) -> tuple[memoryview, Version] | None:
        """An object, and which version it is; None if there is none. If that is `known`, its bytes are not sent."""
        options: Any = {"if_none_match": known["e_tag"]} if known and "e_tag" in known else None

        def work() -> tuple[memoryview, Version]:
            try:
                result = obstore.get(self._opened(), name, options=options)
            except exceptions.NotModifiedError:
                return memoryview(b""), known or {}
            return memoryview(result.bytes()), _version(result.meta)

        return self._asked(work)

    def receive(self, name: str, arrived: Arrived) -> memoryview | None:
        """An object, piece by piece; None if there is none. If `arrived` raises, the server is told to stop."""

        def work() -> memoryview:
            result = obstore.get(self._opened(), name)
            whole = np.empty(result.meta["size"], np.uint8).data
            at = 0
            for piece in result.stream(min_chunk_size=PIECE_BYTES):
                whole[at : at + len(piece)] = piece
                at += len(piece)
                arrived(len(piece))
            if at < len(whole):
                raise UnavailableError(f"{self.where}: a response ended after {at} of {len(whole)} bytes")
            return whole

        return self._asked(work)

    def put(self, name: str, data: Buffer, mode: str | Version = "overwrite") -> Version | None:
        """Write an object; with the mode ``"create"``, or a version, only if there is none, or that one: or None."""
        how: Any = mode if isinstance(mode, str) else dict(mode)

        def work() -> Version:
            return _version(obstore.put(self._opened(), name, data, mode=how, chunk_size=PART_BYTES))

        if mode != "overwrite":
            return self._asked(work)
        # of an object in parts, which the server has forgotten, it says that there is none
        with self._translated():
            return work()

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are gone already do not count."""
        # S3 alone has a request for many
        at_once = DELETED_AT_ONCE if self._address.scheme == "s3" else 1
        for at in range(0, len(names), at_once):
            some = list(names[at : at + at_once])
            self._asked(partial(obstore.delete, self._opened(), some))

    def list(self, folder: str = "", after: str = "") -> Iterator[Listed]:
        """The objects in a folder and below it, or all there are, whose names come after this one, in their order."""
        with self._translated():
            offset = after or None
            for some in obstore.list(self._opened(), folder or None, offset=offset, chunk_size=LISTED_AT_ONCE):
                yield from (Listed(one["path"], one["size"]) for one in some)

    def folders(self) -> Sequence[str]:
        """The outermost folders that have objects."""
        return self._asked(lambda: obstore.list_with_delimiter(self._opened())["common_prefixes"]) or ()

    def require_open(self) -> None:
        """Raise `UnavailableError` if it was closed, or inherited."""
        self._opened()

    def _opened(self) -> Any:
        self._require_no_fork()
        store = self._store
        if store is None:
            raise refusals.closed(self.where)
        return store

    def _asked(self, work: Callable[[], T]) -> T | None:
        """What a request for an object returns; None if there is none, or a condition of it is not met."""
        with self._translated():
            try:
                return work()
            except (exceptions.PreconditionError, exceptions.AlreadyExistsError):
                return None
            except FileNotFoundError as error:
                if NO_BUCKET.search(str(error)):
                    raise
                return None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate obstore's errors. They are not given as the cause: their texts have whole replies."""
        try:
            yield
        except (LocationError, UnavailableError):
            raise
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise LocationError(f"{self.where}: access is denied ({_reason(error)}); see AWS_ACCESS_KEY_ID, "
                                "AWS_SECRET_ACCESS_KEY and the policy of the bucket") from None  # fmt: skip
        except (exceptions.UnknownConfigurationKeyError, exceptions.InvalidPathError) as error:
            raise LocationError(f"{self.where} cannot be opened ({type(error).__name__})") from None
        except FileNotFoundError as error:
            if not NO_BUCKET.search(str(error)):
                raise UnavailableError(f"{self.where}: {_reason(error)}") from None
            raise LocationError(f"{self.where}: {_reason(error)}; create the bucket first") from None
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise UnavailableError(f"{self.where}: {_reason(error)}") from None
        except BaseException as error:
            # not an exception for Python, as an endpoint that is none in the environment raises it
            if type(error).__name__ != PANIC:
                raise
            raise UnavailableError(f"{self.where}: obstore has panicked; see AWS_ENDPOINT_URL") from None


def _version(found: Mapping[str, Any]) -> Version:
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
