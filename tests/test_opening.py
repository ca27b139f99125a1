"""What a store is before a Llama is attached; memory that several stores name; an empty store."""

import pytest

from prefixstore import ClosedError, MisuseError, NotAttachedError, PrefixStore
from prefixstore.maintenance.archive import Archive
from tests.support.models import answer, attached, evaluated, prompt
from tests.support.places import fill, space

# -- without arguments -------------------------------------------------------------------------------------------------


def test_a_store_without_arguments_serves_the_llama_that_is_attached_later(llama):
    tokens = prompt(300)
    for n_computed in (300, 1):
        with PrefixStore() as store:
            assert store.location.startswith("lmdb://")
            llm = attached(store, llama())
            assert evaluated(store, lambda: answer(llm, tokens, 1)) == n_computed  # noqa: B023 - called at once
            assert store.match(tokens).n_tokens == 300


def test_what_needs_a_llama_says_so_before_one_is_attached(llama, tmp_path):
    llm = llama()
    with PrefixStore(tmp_path, namespace="n") as store:
        llm.set_cache(store)
        uses = [store.match, store.pin, store.restore, store.__getitem__, store.__contains__]
        uses += [lambda _: store.clear(), lambda _: store.namespace, lambda _: store.capture()]
        uses += [lambda _: store.sessions(), lambda tokens: store.__setitem__(tokens, llm.save_state())]
        for use in uses:
            with pytest.raises(NotAttachedError, match="attach"):
                use(prompt(300))
        assert store.stats().entries == len(store) == 0
        assert store.kind == "unbound"
        assert store.clear(everything=True) == 0
        assert store.match(prompt(300), llm).n_tokens == 0


def test_the_length_of_a_store_is_its_pages_and_an_empty_one_is_true(llama):
    with PrefixStore("memory:") as store:
        llm = attached(store, llama())
        assert len(store) == 0
        assert store
        # llama-cpp-python asks whether there is a cache
        answer(llm, prompt(300), 1)
        store.drain()
        assert len(store) == 2 == store.stats().entries
    assert store
    with pytest.raises(ClosedError):
        len(store)


def test_a_close_that_does_not_get_through_is_made_up_for(tmp_path):
    with Archive(tmp_path / "kv", create=True) as archive:
        fill(archive.backend, space(), [[1, 2, 3, 4]])
    store = PrefixStore(tmp_path / "kv")
    pages = store.engine.lookups.pages()
    with store.engine.fetching(pages), pytest.raises(MisuseError, match="leave it first"):
        store.close()
    store.flush()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store.engine), "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.flush()


def interrupted(engine):
    raise KeyboardInterrupt
