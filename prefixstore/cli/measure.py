"""Commands that measure: ``bench``, ``demo``."""

from __future__ import annotations

import uuid
from pathlib import Path

from prefixstore.cli.command import Result
from prefixstore.cli.model import configured, has_model, open_model
from prefixstore.cli.output import DONE, FAILED, fields, say, table, tell
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.bench import Timed, break_even, measure_break_even, measure_rates
from prefixstore.report.labels import visible
from prefixstore.units import format_bytes

__all__ = ["bench", "demo"]

# what a measurement may add to a store on top of its size, so that nothing is evicted for it
SPARE_BYTES = 4 << 30


def bench(
    location: str,
    *,
    model: Path | None = None,
    config: Path | None = None,
    n_ctx: int | None = None,
    tokens: int = 2048,
) -> Result:
    """Measure a store on this machine.

    With a model, the prompt length from which restoring beats computing is measured too. Writes up to 64 MiB
    (and, with a model, a few prompts' states), then deletes it.

    Example: prefixstore bench lmdb:///var/cache/kv --model m.gguf
    """
    prompts: list[Timed] | None = None
    with Archive(location) as archive:
        where, (read, written) = archive.location, measure_rates(archive)
        if has_model(config, model):
            settings = configured(location, config, model, n_ctx or tokens + 64, f"bench-{uuid.uuid4().hex}")
            llm = open_model(settings)
            with settings.open_store(llm, max_bytes=archive.used().bytes + SPARE_BYTES, policy=archive.policy) as store:
                prompts = measure_break_even(llm, store, archive, min(tokens, llm.n_ctx() - 1))
            llm.close()
    data: dict[str, object] = {"location": where, "read_bytes_per_second": read, "written_bytes_per_second": written}
    if prompts is not None:
        data |= {"prompts": [one._asdict() for one in prompts], "break_even_tokens": break_even(prompts)}

    def show() -> None:
        fields({"location": where, "read and decoded": _rate(read), "written durably": _rate(written)})
        if prompts is not None:
            rows = ([f"{n:,}", f"{cold:.4f} s", f"{warm:.4f} s", f"{cold / warm:.1f}"] for n, cold, warm in prompts)
            table(["tokens>", "computed>", "restored>", "times faster>"], rows)
            found = break_even(prompts)
            even = f"from {found:,} tokens on" if found is not None else "at none of these lengths"
            tell(f"restoring beats computing {even}")

    return Result(data, show)


def _rate(rate: float | None) -> str:
    return f"{format_bytes(rate)}/s" if rate is not None else "not measured: no free space, or no pages to read"


def demo(*, model: Path | None = None) -> Result:
    """Compute a prompt in one process and restore it in another.

    The result is a table of both. Without --model, a small model with random weights is generated. Exit code 1: the
    answers differ, or nothing was restored.

    Example: prefixstore demo --model m.gguf
    """
    from prefixstore.demo import run  # noqa: PLC0415 - is needed by no other command

    found = run(model)
    cold, warm = found["cold"], found["warm"]
    failed = not found["same_answer"] or not warm["restored"]

    def show() -> None:
        faster = cold["ttft"] / warm["ttft"]
        size = f"{format_bytes(warm['stored'])} in {warm['pages']} pages"
        rows = [
            ["time to first token", f"{cold['ttft']:.3f} s", f"{warm['ttft']:.3f} s ({faster:.0f} times faster)"],
            *([f"tokens {what}", f"{cold[what]:,}", f"{warm[what]:,}"] for what in ("computed", "restored")),
            ["bytes stored", format_bytes(cold["stored"]), size],
            ["same answer", "", "yes" if found["same_answer"] else "no"],
        ]
        table(["", "A, cold>", "B, warm"], rows)
        tell(f"Store: {found['location']}, deleted afterwards")
        tell(f"The answer, from {cold['prompt']:,} tokens of prompt: {visible(cold['answer'].strip())}")
        if failed:
            say("The demo failed: the answers differ, or nothing was restored.")

    return Result(found, show, FAILED if failed else DONE)
