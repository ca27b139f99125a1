"""Commands that measure: ``bench``, ``demo``."""

from __future__ import annotations

from pathlib import Path

from prefixstore.cli.command import Result
from prefixstore.cli.output import DONE, FAILED, say, table, tell
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.bench import measure_rates
from prefixstore.report.labels import visible
from prefixstore.units import format_bytes


def bench(location: str) -> Result:
    """Measure a store on this machine.

    Writes up to 64 MiB, then deletes it. Whether restoring beats computing here is said by doctor, from pages that were
    computed here.

    Example: prefixstore bench lmdb:///var/cache/kv
    """
    with Archive(location) as archive:
        where, (read, written) = archive.location, measure_rates(archive)
    return Result(
        {"location": where, "read_bytes_per_second": read, "written_bytes_per_second": written},
        {"location": where, "read and decoded": _rate(read), "written durably": _rate(written)},
    )


def _rate(rate: float | None) -> str:
    return f"{format_bytes(rate)}/s" if rate is not None else "not measured: no free space, or no pages to read"


def demo(*, model: Path | None = None) -> Result:
    """Compute a prompt in one process and restore it in another.

    The result is a table of both. Without --model, a small model with random weights is generated. Exit code 1: the
    answers differ, or nothing was restored.

    Example: prefixstore demo --model m.gguf
    """
    from prefixstore.demo import run_demo  # noqa: PLC0415 - is needed by no other command

    found = run_demo(model)
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
