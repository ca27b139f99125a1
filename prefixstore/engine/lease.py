"""A lease: a note in a location that says which engine does some background work, so that others do not repeat it."""

from __future__ import annotations

import os
import struct
import time

from prefixstore.engine.page_update import Transaction
from prefixstore.engine.page_view import View

__all__ = ["Lease"]

# owner, and until when: nanoseconds since the epoch
VALUE = struct.Struct("<16sQ")
# How long a lease is valid. It is renewed by the work itself, when half of this has passed.
SECONDS = 10.0


class Lease:
    """The right of one engine to do some work.

    It saves work and is not needed for safety: two engines that do the same find in each transaction what the other has
    done. So it is enough that clocks agree to within some seconds.

    Parameters
    ----------
    name
        Of the work.
    """

    def __init__(self, name: bytes) -> None:
        self._name = name
        self._owner = os.urandom(16)
        # by the clock of this process
        self._valid_until = 0.0

    def is_free(self, view: View) -> bool:
        """Whether no other engine holds it."""
        owner, left = self._read(view)
        return owner == self._owner or left <= 0

    def take(self, transaction: Transaction) -> bool:
        """Take the lease, or renew it if half of its time has passed; false if another engine holds it."""
        owner, left = self._read(transaction)
        if owner != self._owner and left > 0:
            return False
        if owner != self._owner or left < SECONDS / 2:
            transaction.put_note(self._name, VALUE.pack(self._owner, time.time_ns() + int(SECONDS * 1e9)))
            self._valid_until = time.monotonic() + SECONDS
        return True

    @property
    def may_be_held(self) -> bool:
        """Whether this engine has taken it, and it has not expired."""
        return time.monotonic() < self._valid_until

    def release(self, transaction: Transaction) -> None:
        """Give up the lease, if this engine holds it, so that others need not wait until it expires."""
        if self._read(transaction)[0] == self._owner:
            transaction.put_note(self._name, None)
        self._valid_until = 0.0

    def _read(self, view: View) -> tuple[bytes, float]:
        """The owner, and for how many seconds the lease is valid; 0 if it is not."""
        note = view.note(self._name)
        if note is None or len(note) != VALUE.size:
            return b"", 0.0
        owner, until = VALUE.unpack(note)
        left = (until - time.time_ns()) / 1e9
        # one that is valid for longer than any lease was written by a wrong clock
        return owner, left if 0 < left <= 2 * SECONDS else 0.0
