"""Which snapshots are thinned, as a function of positions; then the same in an engine."""

from hypothesis import given
from hypothesis import strategies as st

from prefixstore.engine.snapshot_policy import thin
from prefixstore.format.keys import SNAPSHOT, as_tokens
from tests.support.engines import NS, P, put_snapshots, snapshot_of, store_of


@given(
    st.lists(st.integers(1, 100_000), unique=True, min_size=1).map(sorted),
    st.integers(1, 20),
    st.integers(1, 2000),
    st.data(),
)
def test_thinning_keeps_the_newest_and_as_many_as_allowed(taken, keep, interval, data):
    shared = data.draw(st.sets(st.sampled_from(taken)))
    gone = thin(taken, keep, interval, shared)
    assert gone <= set(taken)
    assert len(taken) - len(gone) == min(keep, len(taken))
    assert taken[-1] not in gone
    # those from which others branch off are deleted only if there are no others
    if keep > len(shared | {taken[-1]}):
        assert not gone & shared


# -- in an engine ------------------------------------------------------------------------------------------------------


def test_snapshots_are_thinned_with_the_next_batch_except_pinned_ones():
    tokens = list(range(60))
    with store_of() as store:
        put_snapshots(store, tokens, [8, 17, 29, 40, 50, 58])
        assert store.pin(tokens[:17]) == 17
        assert store.engine.write_queue.thin(NS, as_tokens(tokens), P, 2, 8) == 3
        assert store.engine.write_queue.has_deferred
        store.engine.commit([])
        assert not store.engine.write_queue.has_deferred
        with store.backend.view() as view:
            left = [record.start + len(record.tokens) // 4 for _, record, _ in view.scan() if record.form == SNAPSHOT]
        assert 17 in left
        assert 58 in left
        assert len(left) <= 3
        # a thinned snapshot can be captured again, before and after it was deleted
        assert put_snapshots(store, tokens, [8]) == 1
        store.engine.write_queue.thin(NS, as_tokens(tokens), P, 1, 8)
        assert put_snapshots(store, tokens, [8]) == 1
        assert store.match_snapshot(tokens[:9]) == 8
        store.engine.commit([])
        assert store.match_snapshot(tokens[:9]) == 8


def test_pending_snapshots_that_are_thinned_are_never_written():
    tokens = list(range(60))
    with store_of() as store:
        store.put(tokens, 0)
        news = [snapshot_of(store, tokens[:n]) for n in (8, 17, 29)]
        for new in news:
            assert store.engine.write_queue.announce(new)
        store.engine.write_queue.thin(NS, as_tokens(tokens), P, 1, 8)
        assert store.engine.commit(news) == 1
        assert store.match_snapshot(tokens) == 29


def test_the_snapshot_before_a_branch_and_a_valued_one_are_thinned_last():
    tokens = list(range(60))
    with store_of() as store:
        put_snapshots(store, tokens, [8, 17, 29, 40, 50, 58])
        store.put([*tokens[:19], *range(100, 130)], 0)
        for keep, valued, found in ((3, [29], 29), (2, [], 17)):
            store.engine.write_queue.thin(NS, as_tokens(tokens), P, keep, 8, valued)
            store.engine.commit([])
            assert store.match_snapshot(tokens[:40]) == found
