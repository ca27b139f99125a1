"""Images in a chat of a ``Llama``: what comes before the first one is a prefix like any other."""

from __future__ import annotations

from typing import Any

import pytest
from llama_cpp.llama_chat_format import Llava15ChatHandler

from tests.support.models import caching, forget, load
from tests.support.vision import picture, write_projector

SYSTEM = "The quick brown fox jumps over the lazy dog. " * 30


def ask(llm: Any, image: int | None, system: str = SYSTEM) -> str:
    content = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "What is it?"}]
    if image is not None:
        content.insert(1, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(image)}"}})
    messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    answer = llm.create_chat_completion(messages, max_tokens=6, temperature=0)
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "lfm2"])
def test_the_text_before_an_image_is_restored_for_this_image_and_another_and_nothing_after_it_is_stored(
    models, tmp_path, arch
):
    llm = load(models(arch), n_ctx=2048)
    projector = write_projector(tmp_path / "mmproj.gguf", llm.n_embd())
    llm.chat_handler = Llava15ChatHandler(clip_model_path=str(projector), verbose=False)
    cases: list[tuple[int | None, str]] = [(1, SYSTEM), (2, SYSTEM), (1, SYSTEM + "And so on. " * 9), (None, SYSTEM)]
    cold = {}
    for case in cases:
        forget(llm)
        cold[case] = ask(llm, *case)
    assert len(set(cold.values())) > 1
    n_text = len(llm.tokenize(SYSTEM.encode()))
    with caching(tmp_path / "store", llm) as store:
        for case in cases * 2:
            assert ask(llm, *case) == cold[case]
        store.flush()
        deepest = max(page.end for page in store.engine.lookups.pages())
        assert store.stats().misses.keys() <= {"not_found", "multimodal"}
        assert store.stats().dropped == {}
    # the longest text and what the template adds to it
    assert deepest < len(llm.tokenize((SYSTEM + "And so on. " * 9).encode())) + 40
    with caching(tmp_path / "store", llm) as store:
        for i, case in enumerate(cases[:2], 1):
            forget(llm)
            assert ask(llm, *case) == cold[case]
            assert store.stats().tokens_restored >= i * (n_text - 64 if arch != "mamba" else 1)
