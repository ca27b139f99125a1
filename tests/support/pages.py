"""Raw pages, without a model and without an engine."""

from __future__ import annotations

from prefixstore.format.keys import KEY_BYTES, as_tokens, page_key
from prefixstore.format.record import Record, checksum

NAMESPACE = bytes(range(KEY_BYTES))


def make_page(
    payload: bytes, tokens: list[int], *, parent: bytes = NAMESPACE, start: int = 0, namespace: bytes = NAMESPACE
) -> tuple[bytes, Record]:
    """The key and the record of a raw page with these tokens after `parent`."""
    raw = as_tokens(tokens).tobytes()
    size = len(payload)
    record = Record(namespace, parent, start, raw, 0, size, size, checksum(payload), 1000, 1_700_000_000_000_000_000)
    return page_key(parent, raw), record
