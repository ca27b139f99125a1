"""Two engines on one location, as two processes have them."""

from __future__ import annotations

from tests.support.engines import A, B, two_stores


def test_a_page_whose_parent_was_evicted_meanwhile_is_an_orphan(tmp_path):
    with two_stores(tmp_path, max_entries=3) as (one, two):
        one.put(A[:4])
        assert one.match(A) == 4
        batch = one.announce(A)
        assert len(batch) == 2
        two.put(B)
        assert one.engine.commit(batch) == 0
        assert one.counters.group("dropped") == {"orphan": 2}
        assert one.match(A) == 0
