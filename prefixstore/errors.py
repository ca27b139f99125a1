"""The errors of prefixstore, one tree.

::

    PrefixStoreError
    ├── MisuseError                the caller can fix it: the message names the parameter
    │   ├── InvalidParameterError  a parameter has an invalid value (also a ValueError)
    │   ├── ClosedError            the store was used after close()
    │   ├── NotAttachedError       the call needs a Llama that the store is attached to
    │   ├── StaleLeaseError        a session was used after its lease had ended
    │   └── MissingExtraError      an optional package is not installed (also an ImportError)
    ├── StorageError               an operation on the location failed
    │   ├── LocationError          the path or address cannot be opened as a store
    │   ├── FullError              no space, even after evicting everything that may be evicted
    │   ├── UnavailableError       locked, unreachable or failing now; a retry may work
    │   ├── CorruptError           stored bytes differ from what was written
    │   │   └── UndecryptableError they cannot be decrypted: they were changed, or a key is missing
    │   └── IncompatibleError      written by a newer version, or by another application
    ├── ContextError               an operation on the model or its llama.cpp context failed
    ├── BusyError                  another session has the Llama (also a TimeoutError)
    └── ServerError                a request to a llama-server failed
        ├── ServerUnreachableError it does not answer
        ├── ServerBusyError        it is loading, or the slot is in use; a retry may work
        ├── ServerRefusedError     it refused the request: switched off there, or not valid
        ├── ServerTooOldError      it does not have what is needed, or answers in another form
        └── UnknownVersionError    it writes slot files of a version that is not known here

Inside a completion, lookups and saves raise only `MisuseError`: any other failure there is a miss, counted and logged.
Absence is not an error: it is ``None`` or an empty match.
"""

from __future__ import annotations


class PrefixStoreError(Exception):
    """Base of all errors that prefixstore raises."""


class MisuseError(PrefixStoreError):
    """The caller can fix it; the message names the parameter and says what to do."""


class InvalidParameterError(MisuseError, ValueError):
    """A parameter has an invalid value."""


class ClosedError(MisuseError):
    """The store was used after ``close()``."""


class NotAttachedError(MisuseError):
    """The call needs a ``Llama`` that the store is attached to."""


class StaleLeaseError(MisuseError):
    """A session was used after its lease had ended: admit it again."""


class MissingExtraError(MisuseError, ImportError):
    """An optional package is not installed; the message names the extra to install."""

    @classmethod
    def of_location(cls, error: BaseException | None, extra: str) -> MissingExtraError:
        """The error of a location whose package cannot be imported: missing, or installed and broken."""
        if isinstance(error, ModuleNotFoundError) and error.name:
            reason = f"this location needs {error.name.partition('.')[0]}, which is not installed"
        else:
            reason = f"a package that this location needs cannot be imported: {error}"
        package = f"prefixstore[{extra}]" if extra else "prefixstore"
        return cls(f'{reason}; pip install "{package}"')


class StorageError(PrefixStoreError):
    """An operation on the location failed."""


class LocationError(StorageError):
    """The path or address cannot be opened as a store."""


class FullError(StorageError):
    """There is no space, even after evicting everything that may be evicted.

    Attributes
    ----------
    asked, available
        How many bytes were to be written together, and how many the file or the disk has left; None if not known.
    """

    def __init__(self, message: str, *, available: int | None = None) -> None:
        super().__init__(message)
        self.asked: int | None = None
        self.available = available

    def __str__(self) -> str:
        figures = (("asked for", self.asked), ("available", self.available))
        shown = ", ".join(f"{n:,} bytes {name}" for name, n in figures if n is not None)
        return f"{super().__str__()} ({shown})" if shown else super().__str__()


class UnavailableError(StorageError):
    """The location is locked, unreachable or failing at present; a retry may succeed."""


class CorruptError(StorageError):
    """Stored bytes differ from what was written."""


class UndecryptableError(CorruptError):
    """Stored bytes cannot be decrypted: they were changed, or moved, or a key is missing."""


class IncompatibleError(StorageError):
    """The location was written by a newer version of prefixstore, or by another application."""


class ContextError(PrefixStoreError):
    """An operation on the model or its llama.cpp context failed."""


class BusyError(PrefixStoreError, TimeoutError):
    """Another session has the ``Llama``, and did not leave it in time."""


class ServerError(PrefixStoreError):
    """A request to a llama-server failed."""


class ServerUnreachableError(ServerError):
    """The llama-server does not answer."""


class ServerBusyError(ServerError):
    """The llama-server is loading its model, or the slot is in use; a retry may succeed."""


class ServerRefusedError(ServerError):
    """The llama-server refused the request: it is not valid there, or the server was started without what it needs."""


class ServerTooOldError(ServerError):
    """The llama-server lacks a needed feature, or answers in an unknown format."""


class UnknownVersionError(ServerError):
    """The llama-server writes slot files of a version that this prefixstore does not know: use a newer one."""
