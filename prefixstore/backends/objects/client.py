"""The requests to a bucket, and what their errors mean.

Messages name the location, the status and the server's error code, and nothing else that came over the wire: the
server's reply may repeat credentials, and a URL may hold a signature.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import numpy as np

from prefixstore.backends import refusals
from prefixstore.backends.objects.address import Address
from prefixstore.backends.objects.read_ahead import Arrived, Window
from prefixstore.errors import LocationError, UnavailableError
from prefixstore.format.record import Buffer

__all__ = ["Client", "GoneError", "Listed", "Version"]

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

T = TypeVar("T")

# which version of an object is meant: what obstore's `put` has returned
Version = Mapping[str, str]


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
        self.renew()

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

    def renew(self) -> None:
        """Connect."""
        self.window = Window()
        with self._translated():
            self._store = self._connect()

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

        Raises
        ------
        GoneError
            If a version is to be replaced, and there is no object.
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
