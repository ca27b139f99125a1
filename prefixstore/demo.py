"""A demonstration: one process computes a long prompt and exits, the next one restores it."""

from __future__ import annotations

import json
import pydoc_data.topics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prefixstore.config import import_llama_cpp, model_file
from prefixstore.errors import ContextError
from prefixstore.store import PrefixStore

N_BATCH = 512
# One token more than a multiple of the batch: the cold process computes the last token alone, as the warm one does, so
# the two compute their answers from the same numbers, bit by bit.
PROMPT_TOKENS = 6 * N_BATCH + 1
ANSWER_TOKENS = 32


def run_demo(model: Path | None = None) -> dict[str, Any]:
    """Run the demo with a GGUF file, or one that is written, with random weights; what it found."""
    import_llama_cpp()  # before a model is written, and before the two processes need it
    with tempfile.TemporaryDirectory(prefix="prefixstore-demo-") as directory:
        folder = Path(directory)
        path = model_file(model) if model is not None else _write_model(folder / "demo.gguf")
        location = f"lmdb://{folder / 'kv'}"
        cold = _process("A", "computes the prompt and exits", path, location)
        warm = _process("B", "starts with the same prompt", path, location)
    return {"location": location, "cold": cold, "warm": warm, "same_answer": cold["answer"] == warm["answer"]}


def _say(text: str) -> None:
    """Print progress to stderr, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def _write_model(path: Path) -> str:
    from prefixstore.testing.models import DEMO, write_model  # noqa: PLC0415 - costs time where there is a model

    _say("Writing a model with random weights (16 layers, 32 KiB of state a token) ...")
    return str(write_model(path, DEMO))


def _process(name: str, does: str, model: str, location: str) -> dict[str, Any]:
    _say(f"Process {name} {does} ...")
    command = [sys.executable, "-m", "prefixstore.demo", model, location]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise ContextError(
            f"process {name} of the demo failed with exit code {done.returncode}; its error message is above"
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _work(model: str, location: str) -> dict[str, Any]:
    """One process of the demo."""
    from prefixstore.llama.binding import silence  # noqa: PLC0415 - the extra "llama"

    silence()
    llm = import_llama_cpp().Llama(model, n_ctx=PROMPT_TOKENS + 511, n_batch=N_BATCH, verbose=False)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = llm.tokenize(text[: 16 * PROMPT_TOKENS].encode())[:PROMPT_TOKENS]
    with PrefixStore(location, llm) as store:
        llm.set_cache(store)
        started = time.perf_counter()
        chunks: Any = llm.create_completion(tokens, max_tokens=ANSWER_TOKENS, temperature=0, stream=True)
        answer = next(chunks)["choices"][0]["text"]
        first = time.perf_counter() - started
        computed = store.stats().tokens_computed
        answer += "".join(chunk["choices"][0]["text"] for chunk in chunks)
        store.flush()
        stats = store.stats()
    return {
        "ttft": first,
        "answer": answer,
        "prompt": len(tokens),
        "computed": computed,
        "restored": stats.tokens_restored,
        "stored": stats.bytes_used,
        "pages": stats.entries,
    }


if __name__ == "__main__":
    print(json.dumps(_work(*sys.argv[1:])))
