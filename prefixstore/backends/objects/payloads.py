"""Writes payloads to the server: several requests at a time, in bounded memory."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

from prefixstore.backends.objects.client import Client
from prefixstore.backends.objects.read_ahead import AT_ONCE, HELD_BYTES
from prefixstore.backends.threads import Job, Threads
from prefixstore.errors import StorageError
from prefixstore.format.record import Buffer

__all__ = ["Uploads"]


class Uploads:
    """The payloads that an update uploads before its commit makes them part of rows.

    Parameters
    ----------
    client
        Of the location.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._threads: Threads | None = None
        self._running: deque[tuple[int, Job[Any]]] = deque()
        self._held = 0
        # all that were begun
        self.names: list[str] = []

    def begin(self, name: str, payload: Buffer) -> None:
        """Begin to upload a payload, whose bytes do not change any more. Waits while too many bytes are in transit."""
        while self._running and self._held + len(payload) > HELD_BYTES:
            self._finish_one()
        if self._threads is None:
            self._threads = Threads(AT_ONCE, "prefixstore-objects")
        job = Job(self._client.create, name, payload)
        self._held += len(payload)
        self.names.append(name)
        # known before it begins: `close` waits for it
        self._running.append((len(payload), job))
        self._threads.submit_or_run(job)

    def _finish_one(self) -> None:
        self._running[0][1].wait()
        size, job = self._running.popleft()
        self._held -= size
        job.result()

    def finish(self) -> None:
        """Return when all are written. Raises `StorageError` if one is not."""
        while self._running:
            self._finish_one()

    def close(self) -> None:
        """Wait for uploads in transit, and end the threads."""
        while self._running:
            self._running[0][1].end()
            self._running.popleft()
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def discard(self) -> None:
        """Wait for uploads in transit, and delete all; what cannot be deleted now is garbage."""
        self.close()
        with suppress(StorageError):
            self._client.delete(self.names)
