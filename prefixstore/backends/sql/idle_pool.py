"""A pool of database connections that an interrupt cannot leave locked."""

from __future__ import annotations

from collections import deque

from sqlalchemy.pool import ConnectionPoolEntry, Pool

__all__ = ["IdlePool"]

# so many connections are kept open while they are not used
IDLE = 5


class IdlePool(Pool):
    """Opens a connection whenever none is idle, and keeps some of those that are returned.

    The pools of SQLAlchemy wait for connections, with a condition of Python: an interrupt between its lock and its
    ``try`` locks it for ever. This one never waits, and adds and takes in single operations.
    """

    _idle: deque[ConnectionPoolEntry]

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type] # passed on as they are
        self._idle = deque()

    def _do_get(self) -> ConnectionPoolEntry:
        try:
            # the one that was used last, whose caches are warm
            return self._idle.pop()
        except IndexError:
            return self._create_connection()

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        if len(self._idle) < IDLE:
            self._idle.append(record)
        else:
            record.close()

    def dispose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            try:
                record = self._idle.pop()
            except IndexError:
                return
            record.close()

    def recreate(self) -> IdlePool:
        """A new pool like this one."""
        return type(self)(
            self._creator,
            recycle=self._recycle,
            echo=self.echo,
            logging_name=self._orig_logging_name,
            reset_on_return=self._reset_on_return,
            pre_ping=self._pre_ping,
            _dispatch=self.dispatch,
            dialect=self._dialect,
        )

    def status(self) -> str:
        """How many connections are idle."""
        return f"{len(self._idle)} idle connections"
