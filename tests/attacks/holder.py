"""A process that holds the write lock of a location: ``python -m tests.attacks.holder URL``.

It commits a note when it is told to go on, stores pages, and ends.
"""

from __future__ import annotations

import sys
from contextlib import closing

from prefixstore.engine.pages import Pages, open_pages, retried
from tests.support.places import MIB, fill, space


@retried
def hold(backend: Pages, told: list[str]) -> None:
    """Commit when told to; once more if others have committed meanwhile, as they can where there is no lock."""
    with backend.update() as transaction:
        transaction.put_note(b"holder", b"was here")
        if not told:
            print("held", flush=True)
            told.append(sys.stdin.readline())


if __name__ == "__main__":
    with closing(open_pages(sys.argv[1], max_bytes=64 * MIB)) as backend:
        hold(backend, [])
        fill(backend, space(), [[9] * 8])
    print("done", flush=True)
