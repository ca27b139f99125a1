"""The errors of prefixstore, one tree.

::

    PrefixStoreError
    ├── MisuseError                the caller can fix it: the message names the parameter
    │   ├── InvalidParameterError  a parameter has an invalid value (also a ValueError)
    │   ├── ClosedError            the store was used after close()
    │   ├── NotAttachedError       the call needs a Llama that the store is attached to
    │   └── MissingExtraError      an optional package is not installed (also an ImportError)
    ├── StorageError               an operation on the location failed
    │   ├── LocationError          the path or address cannot be opened as a store
    │   ├── FullError              no space, even after evicting everything that may be evicted
    │   ├── UnavailableError       locked, unreachable or failing now; a retry may work
    │   ├── CorruptError           stored bytes differ from what was written
    │   └── IncompatibleError      written by a newer version, or by another application
    └── ContextError               an operation on the model or its llama.cpp context failed

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


class MissingExtraError(MisuseError, ImportError):
    """An optional package is not installed; the message names the extra to install."""


class StorageError(PrefixStoreError):
    """An operation on the location failed."""


class LocationError(StorageError):
    """The path or address cannot be opened as a store."""


class FullError(StorageError):
    """There is no space, even after evicting everything that may be evicted."""


class UnavailableError(StorageError):
    """The location is locked, unreachable or failing at present; a retry may succeed."""


class CorruptError(StorageError):
    """Stored bytes differ from what was written."""


class IncompatibleError(StorageError):
    """The location was written by a newer version of prefixstore, or by another application."""


class ContextError(PrefixStoreError):
    """An operation on the model or its llama.cpp context failed."""
