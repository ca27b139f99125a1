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

from prefixstore.errors import ContextError
from prefixstore.models.file import is_gguf
from prefixstore.report.labels import visible
from prefixstore.store import PrefixStore
from prefixstore.units import format_bytes

__all__ = ["run"]

N_BATCH = 512
# One token more than a multiple of the batch: the cold process computes the last token alone, as the warm one does, so
# the two compute their answers from the same numbers, bit by bit.
PROMPT_TOKENS = 6 * N_BATCH + 1
ANSWER_TOKENS = 32


def run(model: Path | None = None, *, as_json: bool = False) -> int:
    """Run the demo, print its result and return the exit code.

    Parameters
    ----------
    model
        A GGUF file; by default a model with random weights is written, whose state takes 32 KiB a token.
    as_json
        Whether to print one JSON document instead of a table.

    Raises
    ------
    MissingExtraError
        If a package that the demo needs is not installed.
    ContextError
        If the model cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="prefixstore-demo-") as directory:
        folder = Path(directory)
        if model is None:
            model = _write_model(folder / "demo.gguf")
        elif not model.is_file():
            raise ContextError(f"model file not found: {model}; leave it out for a generated model")
        elif not is_gguf(model):
            raise ContextError(f"{model} is not a GGUF file; leave it out for a generated model")
        location = f"lmdb://{folder / 'kv'}"
        cold = _process("A", "computes the prompt and exits", model, location)
        warm = _process("B", "starts with the same prompt", model, location)
    same = cold["answer"] == warm["answer"]
    if as_json:
        print(json.dumps({"location": location, "cold": cold, "warm": warm, "same_answer": same}))
    else:
        _print_table(location, cold, warm, same=same)
    if not same or not warm["restored"]:
        print("The demo failed: the answers differ, or nothing was restored.", file=sys.stderr)
        return 1
    return 0


def _say(text: str) -> None:
    """Print progress to stderr, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def _write_model(path: Path) -> Path:
    from prefixstore.testing.models import DEMO, write_model  # noqa: PLC0415 - costs time where there is a model

    _say("Writing a model with random weights (16 layers, 32 KiB of state a token) ...")
    return write_model(path, DEMO)


def _process(name: str, does: str, model: Path, location: str) -> dict[str, Any]:
    _say(f"Process {name} {does} ...")
    command = [sys.executable, "-m", "prefixstore.demo", str(model), location]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise ContextError(
            f"process {name} of the demo failed with exit code {done.returncode}; its error message is above"
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _print_table(location: str, cold: dict[str, Any], warm: dict[str, Any], *, same: bool) -> None:
    faster = cold["ttft"] / warm["ttft"]
    rows = [
        ("", "A, cold", "B, warm"),
        ("time to first token", f"{cold['ttft']:.3f} s", f"{warm['ttft']:.3f} s ({faster:.0f} times faster)"),
        ("tokens computed", f"{cold['computed']:,}", f"{warm['computed']:,}"),
        ("tokens restored", f"{cold['restored']:,}", f"{warm['restored']:,}"),
        ("bytes stored", format_bytes(cold["stored"]), f"{format_bytes(warm['stored'])} in {warm['pages']} pages"),
        ("same answer", "", "yes" if same else "no"),
    ]
    print()
    for label, a, b in rows:
        print(f"  {label:<20} {a:>12}   {b}".rstrip())
    print(f"\n  Store: {location}, deleted afterwards")
    print(f"  The answer, from {cold['prompt']:,} tokens of prompt: {visible(cold['answer'].strip())}")


def _work(model: str, location: str) -> dict[str, Any]:
    """One process of the demo."""
    from llama_cpp import Llama  # noqa: PLC0415 - the extra "llama"

    from prefixstore.llama.binding import silence  # noqa: PLC0415 - the extra "llama"

    silence()
    llm = Llama(model, n_ctx=PROMPT_TOKENS + 511, n_batch=N_BATCH, verbose=False)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = llm.tokenize(text[: 16 * PROMPT_TOKENS].encode())[:PROMPT_TOKENS]
    with PrefixStore(location, llm) as store:
        llm.set_cache(store)  # type: ignore[arg-type]  # registered as a BaseLlamaCache
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
