"""A `Llama` with a store and its sessions."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from prefixstore import PrefixStore

SMALL = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 64}
KINDS = {
    "attention": ("llama", {}),
    "window": ("gemma3", {"swa_full": False}),
    "recurrent": ("mamba", {}),
    "hybrid": ("lfm2", {}),
}
OPTIONS = {"page_tokens": 16, "min_tokens": 4, "snapshot_interval": 32}


class Turn(NamedTuple):
    """A completion in a session: where its tokens came from, and what the session holds then."""

    source: str
    n_live: int
    n_restored: int
    text: str
    tokens: list[int]


def turn(sessions, name, tokens, n=6) -> Turn:
    with sessions.admit(name) as session:
        text = session.create_completion(tokens, max_tokens=n, temperature=0)["choices"][0]["text"]
        return Turn(session.source, session.n_live, session.n_restored, text, session.tokens.tolist())


@pytest.fixture
def open_store(tmp_path):
    """Opens a store at the same location each time, closed at the end of the test."""
    stores = []

    def opened(llm, where=None, **options):
        stores.append(PrefixStore(where or tmp_path / "kv", llm, **OPTIONS | options))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture
def llm(llama):
    return llama(**SMALL)


@pytest.fixture
def store(llm, open_store):
    return open_store(llm)


@pytest.fixture
def sessions(store):
    return store.sessions(max_sessions=8)
