"""Locations in object storage: S3 and what speaks its protocol. The package obstore is imported when one is opened."""

from __future__ import annotations

from prefixstore.backends.contract import Backend
from prefixstore.backends.objects.address import Address

__all__ = ["open_objects"]


def open_objects(location: str, *, max_bytes: int, read_only: bool) -> Backend:
    """The store under this prefix of a bucket; its budget is the engine's to keep.

    Raises
    ------
    InvalidParameterError
        If the location is not a valid address.
    MissingExtraError
        If obstore is not installed.
    LocationError, IncompatibleError
        If it cannot be opened, or the server ignores conditional writes.
    """
    address = Address.parse(location)
    from prefixstore.backends.objects.backend import ObjectsBackend  # noqa: PLC0415 - only where it is used

    return ObjectsBackend(address, read_only=read_only)
