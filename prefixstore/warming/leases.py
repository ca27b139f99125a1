"""Leases: notes in a store by which jobs claim parts of the work; a lease expires when its owner stops renewing it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from typing import TYPE_CHECKING

from prefixstore.errors import StorageError

if TYPE_CHECKING:
    from typing_extensions import Self

    from prefixstore.engine.upkeep import Upkeep

__all__ = ["Leases"]

PREFIX = b"lease:"
# How long a lease is valid without being renewed. The clocks of machines that share a store must differ by less.
SECONDS = 30.0
RENEWALS = 3  # in that time


class Leases:
    """The leases of one job, renewed by a thread while the ``with`` block runs.

    Parameters
    ----------
    notes
        Its notes are the leases of all jobs.
    seconds
        How long a lease is valid if its owner does not renew it.

    Attributes
    ----------
    owner
        A random name for this job: one process may run several.

    Notes
    -----
    A lease is advisory. If a job pauses for longer than `seconds`, or was killed, another may take its lease over: then
    both do the same work, and the store keeps it once.
    """

    def __init__(self, notes: Upkeep, *, seconds: float = SECONDS) -> None:
        self._notes = notes
        self._seconds = seconds
        self.owner = uuid.uuid4().hex
        self._held: set[bytes] = set()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="prefixstore-leases", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        for name in list(self._held):
            # a lease that cannot be released expires
            with contextlib.suppress(StorageError):
                self.release(name)

    def is_free(self, name: bytes) -> bool:
        """Whether no other job holds a lease; another may still acquire it first. Raises `StorageError`."""
        return not self._is_held_by_another(self._notes.note(PREFIX + name))

    def acquire(self, name: bytes) -> bool:
        """Acquire a lease; False if another live job holds it. Raises `StorageError`."""
        got = False

        def change(value: bytes | None) -> bytes | None:
            nonlocal got
            got = not self._is_held_by_another(value)
            return self._value() if got else value

        with self._lock:
            self._notes.change_note(PREFIX + name, change)
            if got:
                self._held.add(name)
        return got

    def release(self, name: bytes) -> None:
        """Release a lease. Raises `StorageError`."""
        with self._lock:
            self._held.discard(name)
            self._notes.change_note(PREFIX + name, lambda value: None if self._is_mine(value) else value)

    def _renew(self) -> None:
        while not self._ending.wait(self._seconds / RENEWALS):
            for name in list(self._held):
                with self._lock:
                    if name in self._held:
                        # a store that cannot be reached now may be reachable at the next renewal
                        with contextlib.suppress(StorageError):
                            self._notes.change_note(
                                PREFIX + name, lambda value: self._value() if self._is_mine(value) else value
                            )

    def _value(self) -> bytes:
        return json.dumps({"owner": self.owner, "until": time.time() + self._seconds}).encode()

    def _is_mine(self, value: bytes | None) -> bool:
        return _parse(value)[0] == self.owner

    def _is_held_by_another(self, value: bytes | None) -> bool:
        owner, until = _parse(value)
        # an expiry further ahead than any lease lasts was written by a wrong clock
        return owner != self.owner and 0 < until - time.time() <= 2 * max(self._seconds, SECONDS)


def _parse(value: bytes | None) -> tuple[str, float]:
    """The owner and the expiry of a lease; one that has expired for no lease, or for one that cannot be read."""
    try:
        known = json.loads(value or b"null")
        return str(known["owner"]), float(known["until"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "", 0.0
