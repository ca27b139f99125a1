"""A page on its way into the backend."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prefixstore.buffers import Lease
from prefixstore.engine.index import Page
from prefixstore.format.keys import boundary_hash
from prefixstore.format.record import PAGE

__all__ = ["NewPage"]


@dataclass(slots=True, eq=False)
class NewPage:
    """A page that is not committed yet: a node of the index, and the buffer with its state."""

    page: Page
    settings: bytes
    lease: Lease

    @classmethod
    def of(
        cls,
        namespace: bytes,
        settings: bytes,
        parent: bytes,
        start: int,
        tokens: bytes,
        lease: Lease,
        compute_us: int = 0,
        form: int = PAGE,
    ) -> NewPage:
        """The page with these token bytes behind `parent`, in a namespace with these canonical settings."""
        now = time.time_ns()
        key = boundary_hash(parent, tokens, form)
        page = Page(key, parent, namespace, start, tokens, len(lease.view), 0, compute_us, now, now, form=form)
        return cls(page, settings, lease)
