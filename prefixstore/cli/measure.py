"""Commands that measure: ``bench``, ``demo``."""

from __future__ import annotations

import uuid
from typing import Annotated

import typer

from prefixstore.cli.arguments import AsJson, ConfigFile, Location, ModelFile, NCtx, configured, open_model
from prefixstore.cli.output import emit, fields, table, tell
from prefixstore.config import load_config
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.bench import BreakEven, Rates, measure_break_even, measure_rates
from prefixstore.units import format_bytes

__all__ = ["bench", "demo"]

# what a measurement may add to a store on top of its size, so that nothing is evicted for it
SPARE_BYTES = 4 << 30


def bench(
    location: Location,
    *,
    model: ModelFile = None,
    config: ConfigFile = None,
    n_ctx: NCtx = None,
    tokens: Annotated[
        int, typer.Option(metavar="N", min=32, help="Length of the longest prompt, with a model.")
    ] = 2048,
    as_json: AsJson = False,
) -> None:
    """Measure a store on this machine.

    With a model, the prompt length from which restoring beats computing is measured too. Writes up to 64 MiB
    (and, with a model, a few prompts' states), then deletes it.

    Example: prefixstore bench lmdb:///var/cache/kv --model m.gguf
    """
    with Archive(location) as archive:
        rates = measure_rates(archive)
        has_model = model is not None or (config is not None and load_config(config).path is not None)
        result = _with_model(archive, location, model, config, n_ctx, tokens) if has_model else None
        where = archive.location
    if as_json:
        emit({"location": where} | _as_json(rates, result))
        return
    fields({"location": where, "read and decoded": _rate(rates.read), "written durably": _rate(rates.written)})
    if result is not None:
        rows = [
            [f"{n:,}", f"{cold:.4f} s", f"{warm:.4f} s", f"{cold / warm:.1f}"]
            for n, cold, warm in zip(result.lengths, result.computed, result.restored, strict=True)
        ]
        table(["tokens>", "computed>", "restored>", "times faster>"], rows)
        found = result.n_tokens
        even = f"from {found:,} tokens on" if found is not None else "at none of these lengths"
        tell(f"restoring beats computing {even}")


def _with_model(
    archive: Archive, location: str, model: ModelFile, config: ConfigFile, n_ctx: NCtx, tokens: int
) -> BreakEven:
    settings = configured(location, config, model, n_ctx or tokens + 64, f"bench-{uuid.uuid4().hex}")
    llm = open_model(settings)
    with settings.open_store(llm, max_bytes=archive.used().bytes + SPARE_BYTES) as store:
        result = measure_break_even(llm, store, archive, min(tokens, llm.n_ctx() - 1))
    llm.close()
    return result


def _rate(rate: float | None) -> str:
    return f"{format_bytes(rate)}/s" if rate is not None else "not measured: no free space, or no pages to read"


def _as_json(rates: Rates, result: BreakEven | None) -> dict[str, object]:
    numbers: dict[str, object] = {"read_bytes_per_second": rates.read, "written_bytes_per_second": rates.written}
    if result is not None:
        rows = zip(result.lengths, result.computed, result.restored, strict=True)
        numbers["prompts"] = [{"tokens": n, "computed": cold, "restored": warm} for n, cold, warm in rows]
        numbers["break_even_tokens"] = result.n_tokens
    return numbers


def demo(*, model: ModelFile = None, as_json: AsJson = False) -> int:
    """Compute a prompt in one process and restore it in another.

    The result is a table of both. Without --model, a small model with random weights is generated.

    Example: prefixstore demo --model m.gguf
    """
    from prefixstore.demo import run  # noqa: PLC0415 - is needed by no other command

    return run(model, as_json=as_json)
