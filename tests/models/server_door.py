"""llama-server behind ``prefixstore serve``, and alone. Each restart is one of the proxy and of llama-server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.models.python_door import N_PREDICT
from tests.models.records import Answer, Settings
from tests.support.llama_server import binary, start
from tests.support.served import launch

N_CTX = 8192


def _options(settings: Settings) -> list[str]:
    kinds = ["-ctk", settings.kv, "-ctv", settings.kv if settings.fa == "on" else "f16"]
    return ["-c", str(N_CTX), "-np", "2", "-fa", settings.fa, *([] if settings.kv == "f16" else kinds)]


class Server:
    """Something that answers ``/completion``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, prompt: str, **options: Any) -> Answer:
        """A greedy completion."""
        body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "n_probs": 2, "ignore_eos": True}
        given = httpx.post(
            f"{self.url}/completion", json={**body, "return_tokens": True, **options}, timeout=120, trust_env=False
        )
        if given.status_code != 200:
            raise RuntimeError(f"status {given.status_code}: {given.text[:300]}")
        found = given.json()
        gaps = []
        for token in found.get("completion_probabilities", []):
            first, second = sorted((top["logprob"] for top in token["top_logprobs"]), reverse=True)[:2]
            gaps.append(round(first - second, 4))
        return Answer([], found["tokens"], found["content"], gaps, found["timings"]["prompt_n"])

    def tokens_of(self, text: str) -> list[int]:
        given = httpx.post(f"{self.url}/tokenize", json={"content": text, "parse_special": True}, trust_env=False)
        return list(given.json()["tokens"])


@contextmanager
def alone(model: Path, settings: Settings, directory: Path) -> Iterator[Server]:
    """A llama-server without a store."""
    running = start(model, directory / "slots", *_options(settings))
    try:
        yield Server(running.url)
    finally:
        running.stop()


@contextmanager
def proxied(model: Path, settings: Settings, store: Path) -> Iterator[Server]:
    """``prefixstore serve`` on a store; at the end it is stopped, and has stored what is in the slots."""
    command = [str(binary()), "-m", str(model), "--no-warmup", "-t", "1", "--threads-http", "4", *_options(settings)]
    # the address of an earlier one is in it
    store.with_name(f"{store.name}.log").unlink(missing_ok=True)
    served = launch(store.parent, store.name, [str(store), "--port", "0", "--", *command])
    try:
        served.wait_ready()
        yield Server(served.url)
        served.stop()
    finally:
        served.end()
