"""The errors of prefixstore, one tree.

::

    PrefixStoreError
    ├── MisuseError                the caller can mend it: the message names the parameter
    │   ├── InvalidParameterError  a value that cannot be used (also a ValueError)
    │   ├── ClosedError            the store was used after close()
    │   ├── NotAttachedError       the call needs a Llama that the store is attached to
    │   └── MissingExtraError      an optional package is not installed (also an ImportError)
    ├── StorageError               the location cannot do what was asked
    │   ├── LocationError          the path or address cannot be opened as a store
    │   ├── FullError              no room, although everything that may be evicted was
    │   ├── UnavailableError       locked, unreachable or failing now; a retry may work
    │   ├── CorruptError           stored bytes are not what was written
    │   └── IncompatibleError      written by a newer version, or by another application
    └── ContextError               the llama.cpp context did not do what it was asked

A lookup or a save inside a completion raises none of them but a misuse: a fault there is a miss, counted and logged.
Absence is not an error: it is ``None``, or an empty match.
"""

from __future__ import annotations


class PrefixStoreError(Exception):
    """Base of all errors that prefixstore raises."""


class MisuseError(PrefixStoreError):
    """The caller can mend it; the message names the parameter and the way out."""


class InvalidParameterError(MisuseError, ValueError):
    """A parameter has a value that cannot be used."""


class ClosedError(MisuseError):
    """The store was used after ``close()``."""


class NotAttachedError(MisuseError):
    """The call needs a ``Llama`` that the store is attached to."""


class MissingExtraError(MisuseError, ImportError):
    """An optional package is not installed; the message names the extra to install."""


class StorageError(PrefixStoreError):
    """The location cannot do what was asked."""


class LocationError(StorageError):
    """The path or address cannot be opened as a store."""


class FullError(StorageError):
    """There is no room, although everything that may be evicted was."""


class UnavailableError(StorageError):
    """The location is locked, unreachable or failing at the moment; a retry may work."""


class CorruptError(StorageError):
    """Stored bytes are not what was written."""


class IncompatibleError(StorageError):
    """The location was written by a newer version of prefixstore, or by another application."""


class ContextError(PrefixStoreError):
    """The llama.cpp context did not do what it was asked."""
