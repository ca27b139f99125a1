"""``prefixstore warm``: a list of prompts into a store."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixstore.cli.output import DONE, FAILED, AsJson, emit, fields, guarded, say
from prefixstore.cli.progress import shown
from prefixstore.config import Config, explain, load_config
from prefixstore.errors import LocationError, MisuseError
from prefixstore.store import PrefixStore
from prefixstore.units import format_bytes
from prefixstore.warming.estimate import estimate
from prefixstore.warming.job import WarmReport
from prefixstore.warming.job import warm as run_job
from prefixstore.warming.prompts import Problem, read

if TYPE_CHECKING:
    from types import FrameType

    from llama_cpp import Llama

__all__ = ["warm"]

SIGNALLED = 128  # and the number of the signal
# Prompts for which there was no room are told one by one up to this many.
TOLD = 10


@guarded
def warm(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPTS...",
            help="JSONL files with prompt, messages or tokens in each line; text files; folders; patterns; - is stdin.",
        ),
    ] = None,
    *,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with [model], [store] and [warm], as servers use.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="GGUF file.")] = None,
    store: Annotated[str | None, typer.Option(help="Location: lmdb:///path, sqlite:////path, ...")] = None,
    n_ctx: Annotated[int | None, typer.Option("--n-ctx", help="Length of the context, in tokens.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads that compute.")] = None,
    batch: Annotated[int | None, typer.Option(help="Tokens evaluated at once.")] = None,
    type_k: Annotated[str | None, typer.Option("--type-k", help="Type of K in the cache: f16, q8_0, ...")] = None,
    type_v: Annotated[str | None, typer.Option("--type-v", help="Type of V in the cache.")] = None,
    flash_attn: Annotated[bool | None, typer.Option("--flash-attn/--no-flash-attn", help="Flash attention.")] = None,
    swa_full: Annotated[bool | None, typer.Option("--swa-full/--no-swa-full", help="Full-size window cache.")] = None,
    gpu_layers: Annotated[int | None, typer.Option("--gpu-layers", help="Layers on the GPU; -1 for all.")] = None,
    lora: Annotated[Path | None, typer.Option(help="LoRA adapter.")] = None,
    chat_format: Annotated[str | None, typer.Option("--chat-format", help="Instead of the model's template.")] = None,
    generation_prompt: Annotated[
        bool | None,
        typer.Option(
            "--generation-prompt/--next-turn",
            help="Messages end where the assistant answers, or (the default) where a next user turn begins.",
        ),
    ] = None,
    salt: Annotated[str | None, typer.Option(help="Tenant: separates pages from those of others.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Name that separates pages, like salt.")] = None,
    page_tokens: Annotated[int | None, typer.Option("--page-tokens", help="Tokens in a page.")] = None,
    max_bytes: Annotated[str | None, typer.Option("--max-bytes", help="What the location may hold: 20GiB.")] = None,
    ttl: Annotated[str | None, typer.Option(help="How long pages are kept after their last use: 30d.")] = None,
    priority: Annotated[int | None, typer.Option(help="For the policy priority: lower goes first.")] = None,
    pin: Annotated[bool | None, typer.Option("--pin/--no-pin", help="Keep the prompts from eviction.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what it would take, and store nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Tell whether the store has pages for these settings, and if not, why.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Compute prompts and store them, each shared prefix once.

    What is stored already is left out; a job that was stopped is just run again, and several on one list divide it.

    Exit codes: 0 done; 1 something could not be read or kept; 2 misused; 3 the store cannot be used; 130, 143
    interrupted, and what was computed is kept.

    Example: prefixstore warm --model m.gguf --store lmdb:///var/cache/kv prompts.jsonl docs/
    """
    models = {
        "n_ctx": n_ctx,
        "n_threads": threads,
        "n_threads_batch": threads,
        "n_batch": batch,
        "type_k": type_k,
        "type_v": type_v,
        "flash_attn": flash_attn,
        "swa_full": swa_full,
        "n_gpu_layers": gpu_layers,
        "lora_path": str(lora) if lora else None,
        "chat_format": chat_format,
    }
    stores = {
        "location": store,
        "salt": salt,
        "namespace": namespace,
        "page_tokens": page_tokens,
        "max_bytes": max_bytes,
        "ttl": ttl,
        "priority": priority,
    }
    settings = load_config(config) if config is not None else Config()
    settings = settings.override(str(model) if model else None, models, stores)
    if check:
        return _check(settings, as_json=as_json)
    sources = list(prompts or settings.warm.get("prompts", ()))
    if not sources:
        raise MisuseError("no prompts are given; name files or folders, or - for standard input")
    ends = _either(generation_prompt, settings.warm.get("generation_prompt"))
    if dry_run:
        return _dry_run(settings, sources, generation_prompt=ends, as_json=as_json)
    pins = _either(pin, settings.warm.get("pin"))
    return _warm(settings, sources, {"generation_prompt": ends, "pin": pins}, as_json=as_json)


def _either(option: bool | None, setting: object) -> bool:
    return option if option is not None else bool(setting)


# -- what it does -----------------------------------------------------------------------------------------------------


def _warm(settings: Config, sources: list[str], options: dict[str, bool], *, as_json: bool) -> int:
    with _signals() as caught:
        llm = settings.open_llama()
        with settings.open_store(llm) as store:
            for difference in _differences(store):
                say(f"note: nothing is stored for these settings yet: {difference}")
            with shown() as progress:
                report = run_job(llm, store, read(sources), progress=progress, stop=lambda: bool(caught), **options)
            dropped = store.stats().dropped
        llm.close()
    _tell_problems(report.problems)
    _tell_unstored(report.unstored, dropped)
    if as_json:
        emit(_plain(report))
    else:
        fields(_rows(report))
    if report.interrupted:
        return SIGNALLED + caught[0]
    return FAILED if report.problems or report.unstored else DONE


def _dry_run(settings: Config, sources: list[str], *, generation_prompt: bool, as_json: bool) -> int:
    llm = settings.open_llama()
    with _open_to_look(settings, llm) as store:
        for difference in _differences(store):
            say(f"note: nothing is stored for these settings yet: {difference}")
        expected = estimate(llm, store, read(sources), generation_prompt=generation_prompt)
    llm.close()
    _tell_problems(expected.problems)
    if as_json:
        emit({**asdict(expected), "dry_run": True})
    else:
        fields(
            {
                "prompts": f"{expected.prompts:,}",
                "tokens in them": f"{expected.prompt_tokens:,}",
                "unique tokens": f"{expected.unique_tokens:,}",
                "to evaluate": f"{expected.missing_tokens:,}",
                "bytes": format_bytes(expected.bytes),
                "seconds": f"{expected.seconds:,.1f}",
            }
        )
    return FAILED if expected.problems else DONE


def _check(settings: Config, *, as_json: bool) -> int:
    llm = settings.open_llama()
    with _open_to_look(settings, llm) as store:
        known = store.engine.namespaces()
        same = any(namespace.key == store.namespace.key for namespace in known)
        differences = explain(store.namespace, known)
        if as_json:
            emit({"namespace": store.namespace.key.hex(), "stored": same, "differences": differences})
        elif same:
            typer.echo("The store has pages for these settings.")
        elif differences:
            typer.echo("The store has no pages for these settings. What comes nearest differs:")
            for difference in differences:
                typer.echo(f"  {difference}")
        else:
            typer.echo("The store has no pages at all.")
    llm.close()
    return DONE if same else FAILED


def _open_to_look(settings: Config, llm: Llama) -> PrefixStore:
    """The store, for reading only; an empty one if there is none yet."""
    try:
        return settings.open_store(llm, read_only=True)
    except LocationError as error:
        say(f"note: taken as empty: {error}")
        return settings.open_store(llm, location="memory:", ram_bytes=None)


def _differences(store: PrefixStore) -> list[str]:
    return explain(store.namespace, store.engine.namespaces())


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted, to stop behind a batch; the second one ends the process as ever."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: FrameType | None) -> None:
        caught.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, stop)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- what it shows ----------------------------------------------------------------------------------------------------


def _tell_problems(problems: tuple[Problem, ...]) -> None:
    for problem in problems:
        say(str(problem))


def _tell_unstored(unstored: tuple[str, ...], dropped: dict[str, int]) -> None:
    for where in unstored[:TOLD]:
        say(f"{where}: not wholly in the store at the end")
    if unstored:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) or "evicted since"
        say(f"{len(unstored)} prompts are not wholly in the store (pages left out: {reasons}); raise --max-bytes?")


def _plain(report: WarmReport) -> dict[str, Any]:
    return {**asdict(report), "seconds": round(report.seconds, 3)}


def _rows(report: WarmReport) -> dict[str, object]:
    rows: dict[str, object] = {
        "prompts": f"{report.prompts:,}",
        "tokens in them": f"{report.prompt_tokens:,}",
        "unique tokens": f"{report.unique_tokens:,}",
        "not stored before": f"{report.missing_tokens:,}",
        "evaluated": f"{report.evaluated_tokens:,}",
        "stored": format_bytes(report.stored_bytes),
        "seconds": f"{report.seconds:,.1f}",
    }
    if report.short:
        rows["too short to keep"] = f"{report.short:,}"
    if report.problems:
        rows["problems"] = f"{len(report.problems):,}"
    if report.interrupted:
        rows["interrupted"] = "yes; run it again for the rest"
    return rows
