"""Backends that fail or are slow on purpose: wrappers of any other, to test what is built on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixstore.backends.base import Backend, Entry, Transaction, Used, View
from prefixstore.backends.contract import View as RowView
from prefixstore.engine.keyspace import Count
from prefixstore.errors import StorageError, UnavailableError
from prefixstore.format.record import Buffer, Record, Usage

__all__ = ["FaultyBackend", "Operation", "SlowBackend"]

Operation: TypeAlias = Literal["view", "record", "payload", "update", "put", "delete", "commit", "sync"]


class _WrappedView(View):
    def __init__(self, inner: View, before: Callable[[Operation], None]) -> None:
        self._view = inner
        self._before = before

    @property
    def generation(self) -> int:
        return self._view.generation

    def changes(self, since: int) -> list[bytes] | None:
        return self._view.changes(since)

    def scan(self) -> Iterator[tuple[bytes, Record | StorageError, Usage]]:
        return self._view.scan()

    def record(self, key: bytes) -> Record | None:
        self._before("record")
        return self._view.record(key)

    def usage(self, key: bytes) -> Usage | None:
        return self._view.usage(key)

    def payload(self, key: bytes) -> Buffer | None:
        self._before("payload")
        return self._view.payload(key)

    def neighbors(self, parent: bytes, tokens: bytes) -> list[Entry]:
        self._before("record")
        return self._view.neighbors(parent, tokens)

    def beside(self, parent: bytes, tokens: bytes, parents: Sequence[bytes]) -> tuple[list[Entry], list[Entry]]:
        self._before("record")
        return self._view.beside(parent, tokens, parents)

    def children(self, parents: Sequence[bytes], form: int, at_most: int | None = None) -> list[Entry]:
        self._before("record")
        return self._view.children(parents, form, at_most)

    def followed(self, keys: Sequence[bytes]) -> set[bytes]:
        self._before("record")
        return self._view.followed(keys)

    def facts(self, after: bytes, at_most: int) -> npt.NDArray[np.void]:
        return self._view.facts(after, at_most)

    def flaws(self) -> Iterator[tuple[str, bytes, str]]:
        return self._view.flaws()

    def stored(self) -> Iterator[tuple[bytes, Record | StorageError, Buffer | StorageError | None]]:
        for page in self._view.stored():
            self._before("payload")
            yield page

    def fetch(self, keys: Sequence[bytes]) -> Iterator[tuple[Record, Buffer]]:
        for key in keys:
            self._before("record")
            self._before("payload")
            found = list(self._view.fetch([key]))
            if not found:
                return
            yield from found

    def namespaces(self) -> Mapping[bytes, bytes]:
        return self._view.namespaces()

    def namespace(self, key: bytes) -> bytes | None:
        return self._view.namespace(key)

    def note(self, name: bytes) -> bytes | None:
        return self._view.note(name)

    @property
    def rows(self) -> RowView:
        return self._view.rows

    def count(self, namespace: bytes | None = None) -> Count:
        return self._view.count(namespace)

    def namespaces_of(self, salt: str) -> set[bytes]:
        return self._view.namespaces_of(salt)

    @property
    def sizes(self) -> tuple[int, int]:
        return self._view.sizes

    @property
    def used(self) -> Used:
        return self._view.used


class _WrappedTransaction(_WrappedView, Transaction):
    def __init__(self, inner: Transaction, before: Callable[[Operation], None]) -> None:
        super().__init__(inner, before)
        self._transaction = inner

    def cost(self, record: Record, n_bytes: int) -> int:
        return self._transaction.cost(record, n_bytes)

    def put(self, key: bytes, record: Record, usage: Usage, payload: Buffer) -> None:
        self._before("put")
        self._transaction.put(key, record, usage, payload)

    def delete(self, key: bytes) -> bool:
        self._before("delete")
        return self._transaction.delete(key)

    def touch(self, key: bytes, usage: Usage, *, announce: bool = False) -> None:
        self._transaction.touch(key, usage, announce=announce)

    def read_ahead(self, keys: Sequence[bytes]) -> None:
        self._transaction.read_ahead(keys)

    def drop_leaf(self, namespace: bytes, key: bytes) -> None:
        self._transaction.drop_leaf(namespace, key)

    def put_namespace(self, key: bytes, settings: bytes) -> None:
        self._transaction.put_namespace(key, settings)

    def drop_namespace(self, key: bytes) -> None:
        self._transaction.drop_namespace(key)

    def put_note(self, name: bytes, value: bytes | None) -> None:
        self._transaction.put_note(name, value)


class _WrappedBackend(Backend):
    """Another backend, with something that happens before each operation."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def _before(self, operation: Operation) -> None:
        """Called before each operation."""
        raise NotImplementedError

    @property
    def location(self) -> str:
        return self._backend.location

    @contextmanager
    def view(self) -> Iterator[View]:
        self._before("view")
        with self._backend.view() as view:
            yield _WrappedView(view, self._before)

    @contextmanager
    def update(self) -> Iterator[Transaction]:
        self._before("update")
        with self._backend.update() as transaction:
            yield _WrappedTransaction(transaction, self._before)
            # an error here rolls the transaction back
            self._before("commit")

    def sync(self) -> None:
        self._before("sync")
        self._backend.sync()

    def reclaim(self) -> None:
        self._backend.reclaim()

    def scrub(self) -> None:
        self._backend.scrub()

    def compact(self) -> int:
        return self._backend.compact()

    def reindex(self) -> None:
        self._backend.reindex()

    def after_fork(self) -> None:
        self._backend.after_fork()

    def close(self) -> None:
        self._backend.close()


class FaultyBackend(_WrappedBackend):
    """A backend whose operations fail on purpose.

    Parameters
    ----------
    backend
        Does the work; closed with this one.
    operation
        What fails: ``"view"``, ``"record"``, ``"payload"``, ``"update"``, ``"put"``, ``"delete"``,
        ``"commit"`` (nothing of the transaction stays) or ``"sync"``.
    error
        What is raised; `UnavailableError` by default.
    at
        The first call that fails, counted from 1.
    times
        How many calls fail; None for all that follow.

    Attributes
    ----------
    calls
        How often each operation was called.
    failures
        How many calls have failed.
    """

    def __init__(
        self,
        backend: Backend,
        operation: Operation,
        error: StorageError | None = None,
        *,
        at: int = 1,
        times: int | None = 1,
    ) -> None:
        super().__init__(backend)
        self._operation = operation
        self._error = error if error is not None else UnavailableError(f"{operation} fails on purpose")
        self._failing = range(at, at + times) if times is not None else range(at, 2**62)
        self._lock = threading.Lock()
        self.calls: dict[Operation, int] = {}
        self.failures = 0

    def _before(self, operation: Operation) -> None:
        with self._lock:
            self.calls[operation] = self.calls.get(operation, 0) + 1
            fails = operation == self._operation and self.calls[operation] in self._failing
            self.failures += fails
        if fails:
            raise self._error


class SlowBackend(_WrappedBackend):
    """A backend that takes its time.

    Parameters
    ----------
    backend
        Does the work; closed with this one.
    seconds
        How much longer each operation takes.
    operations
        Which operations; all by default.
    """

    def __init__(self, backend: Backend, seconds: float, operations: tuple[Operation, ...] | None = None) -> None:
        super().__init__(backend)
        self._seconds = seconds
        self._operations = operations

    def _before(self, operation: Operation) -> None:
        if self._operations is None or operation in self._operations:
            time.sleep(self._seconds)
