"""Images through llama-server: what comes before the first one is stored and restored as any other prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixstore.models.file import read_metadata
from tests.support.llama_server import Running, start
from tests.support.served import TEXT, Serve, Served
from tests.support.vision import picture, write_projector

CHAT = "/v1/chat/completions"
SYSTEM = TEXT[:1200]


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory, docs_model: Path) -> Path:
    n_embd = read_metadata(str(docs_model))["llama.embedding_length"]
    return write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf", int(n_embd))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, docs_model: Path, projector: Path) -> Iterator[Running]:
    """The server without the proxy."""
    slots = tmp_path_factory.mktemp("alone") / "slots"
    running = start(docs_model, slots, "-c", "4096", "--cache-ram", "0", "--mmproj", str(projector))
    yield running
    running.stop()


def chat(image: int, *turns: str, system: str = SYSTEM) -> dict[str, Any]:
    """A conversation about an image: the first question, then an answer and a question for each other turn."""
    seen = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(image)}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, seen, {"type": "text", "text": turns[0]}]},
    ]
    for i, turn in enumerate(turns[1:]):
        messages.append({"role": ("assistant", "user")[i % 2], "content": turn})
    return {"messages": messages, "max_tokens": 10, "temperature": 0}


def ask(served: Served, body: dict[str, Any], path: str = CHAT) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were not computed."""
    answer = served.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    text = found["content"] if "content" in found else found["choices"][0]["message"]["content"]
    return text, found["timings"]["cache_n"]


def right(alone: Running, body: dict[str, Any], path: str = CHAT) -> set[str]:
    """What the server itself answers: cold, and from its own slot."""
    found = set()
    for before in (None, {**body, "n_predict": 1, "max_tokens": 1}, body):
        if before is None:
            alone.client.erase(0)
        for one in (before, body):
            if one is not None:
                answer = httpx.post(alone.url + path, json={**one, "id_slot": 0}, timeout=60, trust_env=False).json()
        found.add(answer["content"] if "content" in answer else answer["choices"][0]["message"]["content"])
    return found


@pytest.mark.slow
def test_the_text_before_an_image_is_restored_after_a_restart_for_this_image_and_another(
    serve: Serve, alone: Running, projector: Path
):
    options = ("--mmproj", str(projector), "-np", "1")
    served = serve(*options)
    cold, n_cold = ask(served, chat(1, "What is it?"))
    assert (cold in right(alone, chat(1, "What is it?")), n_cold) == (True, 0)
    assert served.saved()["failures"] == {}
    assert served.stop() == 0

    served = serve(*options)
    for image in (1, 2):
        text, n = ask(served, chat(image, "What is it?"))
        assert text in right(alone, chat(image, "What is it?"))
        assert n > 200
    assert served.counts(1, "prefixstore_requests_total", endpoint=CHAT, source="store")
    # the same text, and no image: of a chat about other things nothing is there
    _, n = ask(served, chat(3, "What is it?", system=TEXT[5000:6200]))
    assert n < 50
    text, n = ask(served, chat(1, "What is it?"))
    assert text in right(alone, chat(1, "What is it?"))
    assert n > 200
    assert served.counts(2, "prefixstore_requests_total", endpoint=CHAT, source="store")
    assert served.status()["failures"] == {}


@pytest.mark.slow
def test_a_conversation_about_an_image_keeps_its_slot(serve: Serve, alone: Running, projector: Path):
    served = serve("--mmproj", str(projector), "-np", "2")
    turns = ["What is it?"]
    answer, _ = ask(served, chat(1, *turns))
    served.saved()
    for question in ("And then?", "Why?"):
        ask(served, chat(2, "What is it?", system=TEXT[5000:6200]))
        turns += [answer, question]
        answer, n = ask(served, chat(1, *turns))
        assert answer in right(alone, chat(1, *turns))
        # the image, too
        assert n > 250
        served.saved()
    assert served.status()["failures"] == {}
