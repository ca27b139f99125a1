"""Locations in a Valkey or Redis server. The client is imported when one is opened."""

from __future__ import annotations

from prefixstore.backends.contract import Backend
from prefixstore.errors import MissingExtraError

__all__ = ["open_valkey"]


def open_valkey(location: str, *, max_bytes: int, read_only: bool) -> Backend:
    """The rows in this server; its budget is the engine's to keep.

    Raises
    ------
    MissingExtraError
        If valkey-py is not installed.
    """
    try:
        from prefixstore.backends.valkey.address import Address  # noqa: PLC0415 - needs an extra
        from prefixstore.backends.valkey.backend import ValkeyBackend  # noqa: PLC0415 - as above
    except ImportError as error:
        raise MissingExtraError.of_location(error, "valkey") from error
    return ValkeyBackend(Address.parse(location), read_only=read_only)
