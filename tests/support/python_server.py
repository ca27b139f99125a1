"""``llama_cpp.server`` in a process of its own: with a store, or as it is."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.support import ROOT
from tests.support.ports import free_port
from tests.support.untimed import untimed

STOCK = "llama_cpp.server"
OURS = "prefixstore"
# as tests.support.models.load
MODEL_OPTIONS = ["--n_ctx", "2048", "--n_threads", "1", "--n_threads_batch", "1", "--verbose", "false"]
START_SECONDS = 180


class Served:
    """A server that answers."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        import openai  # it takes longer than all else that is imported here

        self.process = process
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=120)

    def chat(self, messages, model="default", **options):
        return self.client.chat.completions.create(
            model=model, messages=messages, temperature=0, **{"max_tokens": 8, **options}
        )

    def complete(self, prompt, model="default", **options):
        return self.client.completions.create(model=model, prompt=prompt, temperature=0, **{"max_tokens": 8, **options})

    def stop(self) -> int:
        """End it as systemd does."""
        self.process.terminate()
        return self.process.wait(120)


@contextmanager
def serving(*arguments: str, module: str = OURS) -> Iterator[Served]:
    """With a store: ``prefixstore serve`` with these arguments; those of ``llama_cpp.server`` follow ``--``."""
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port)]
    command = untimed(OURS, "serve", *where, *arguments) if module == OURS else untimed(module, *arguments, *where)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    served = Served(process, f"http://127.0.0.1:{port}")
    try:
        wait_until_it_answers(served)
        yield served
    finally:
        served.client.close()
        process.kill()
        process.wait(120)


def wait_until_it_answers(served: Served) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert served.process.poll() is None, "the server has ended"
        try:
            httpx.get(f"{served.url}/openapi.json", timeout=30)
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)
        else:
            return
