"""A process that holds the write lock of a location: ``python -m tests.attacks.holder URL``.

It commits a page when it is told to go on, and ends.
"""

from __future__ import annotations

import sys
from contextlib import closing

from prefixstore.engine.pages import open_pages
from tests.support.places import MIB, fill, space

if __name__ == "__main__":
    with closing(open_pages(sys.argv[1], max_bytes=64 * MIB)) as backend:
        with backend.update() as transaction:
            transaction.put_note(b"holder", b"was here")
            print("held", flush=True)
            sys.stdin.readline()
        fill(backend, space(), [[9] * 8])
    print("done", flush=True)
