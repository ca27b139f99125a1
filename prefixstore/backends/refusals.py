"""Errors that several backends raise, with one wording."""

from __future__ import annotations

from prefixstore.errors import IncompatibleError, LocationError, UnavailableError

CREATED_BY = "the first writer creates a store: PrefixStore(...), prefixstore warm, serve, import or copy"


def closed(where: object) -> UnavailableError:
    """The error for using a closed location."""
    return UnavailableError(f"{where} is closed")


def read_only(where: object) -> UnavailableError:
    """The error for writing to a location opened with ``read_only=True``."""
    return UnavailableError(f"{where} is open read-only")


def missing(path: object, kind: str) -> LocationError:
    """The error for opening a path read-only that does not exist."""
    return LocationError(
        f"{path} does not exist, so there is no store ({kind}) yet; check the path, or fill it: {CREATED_BY}"
    )


def no_store(where: object) -> LocationError:
    """The error for opening a location read-only that has no store yet."""
    return LocationError(f"{where} exists but has no store yet; choose another location, or fill it: {CREATED_BY}")


def foreign(where: object, what: str) -> IncompatibleError:
    """The error for a location with data that prefixstore did not write."""
    return IncompatibleError(f"{where} holds another application's {what}; choose another location")


def other_format(where: object, found: int, known: int) -> IncompatibleError:
    """The error for a format that this version does not read."""
    if found < known:
        return IncompatibleError(
            f"{where} has format {found}, this prefixstore reads {known} only; choose another location, or "
            "delete this one: its pages will be computed again"
        )
    return IncompatibleError(
        f"{where} has format {found}, this prefixstore reads up to {known}; upgrade prefixstore, or choose "
        "another location"
    )
