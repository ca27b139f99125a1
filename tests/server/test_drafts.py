"""Servers that draft tokens: the rows of the model are stored and restored, and those of its draft begin empty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.test_slots import N, opened
from tests.support.llama_server import Running
from tests.support.models import prompt


def drafting(model: Path) -> list[str]:
    """Options with which a model drafts for itself: it takes what it has proposed."""
    return ["-md", str(model), "--spec-type", "draft-simple"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_slot_is_restored_whatever_its_draft_held_and_the_pages_are_those_of_a_server_without(
    arch: str, models: Callable[..., Path], llama_server: Callable[..., Running], tmp_path: Path
):
    model, tokens = models(arch, n_head=2), prompt(N)
    running, store = llama_server(model, *drafting(model), "-fa", "on"), str(tmp_path / "store")
    right = running.complete(tokens)
    assert right["timings"]["draft_n_accepted"] == right["timings"]["draft_n"] > 0
    with opened(running, store) as slots:
        assert slots.server.is_drafting
        assert slots.save(0).reason is None
        tokens = [*tokens, *right["tokens"], *prompt(40, seed=1)]
        right = running.complete(tokens, cache_prompt=False)
        # where it ends before the restored prompt, and where it goes on after that, with other tokens
        for n_before in (N // 2, N + 100):
            running.complete(prompt(n_before, seed=2), slot=1)
            restored = slots.restore(1, tokens).n_tokens
            assert restored >= N
            again = running.complete(tokens, slot=1)
            assert (again["timings"]["cache_n"], again["content"]) == (restored, right["content"])
            assert again["timings"]["draft_n"] > 0
        namespace = slots.namespace()
    plain = llama_server(model, "-fa", "on")
    with opened(plain, store) as slots:
        assert not slots.server.is_drafting
        assert slots.namespace() == namespace
        assert slots.restore(0, tokens).n_tokens == restored
        assert plain.complete(tokens)["content"] == right["content"]
