"""``prefixstore warm``: a list of prompts into a store."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixstore.backends.location import is_url, text_of, without_password
from prefixstore.cli.arguments import (
    AsJson,
    ConfigFile,
    HighWater,
    LowWater,
    MaxBytes,
    ModelFile,
    NCtx,
    Salt,
    open_model,
)
from prefixstore.cli.output import DONE, FAILED, emit, fields, say
from prefixstore.cli.progress import shown
from prefixstore.config import Config, explain, load_config
from prefixstore.errors import LocationError, MisuseError
from prefixstore.store import PrefixStore
from prefixstore.units import format_bytes
from prefixstore.warming.context_size import fit, original_context
from prefixstore.warming.estimate import Estimate, estimate
from prefixstore.warming.job import warm as run_job
from prefixstore.warming.prompts import Problem, PromptLike, read
from prefixstore.warming.report import Progress, WarmReport

if TYPE_CHECKING:
    from types import FrameType

    from llama_cpp import Llama

__all__ = ["warm"]

SIGNALLED = 128  # plus the number of the signal
# How many prompts that did not fit are listed one by one.
LISTED = 10
STANDARD = "-"


def warm(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPTS...",
            help="JSONL files with prompt, messages or tokens in each line; text files; folders; patterns; - is stdin.",
        ),
    ] = None,
    *,
    config: ConfigFile = None,
    model: ModelFile = None,
    store: Annotated[str | None, typer.Option(help="Location: lmdb:///path, sqlite:////path, ...")] = None,
    n_ctx: NCtx = None,
    threads: Annotated[int | None, typer.Option(help="Number of threads.")] = None,
    batch: Annotated[int | None, typer.Option(help="Tokens evaluated at once.")] = None,
    type_k: Annotated[str | None, typer.Option("--type-k", help="Type of K in the cache: f16, q8_0, ...")] = None,
    type_v: Annotated[str | None, typer.Option("--type-v", help="Type of V in the cache.")] = None,
    flash_attn: Annotated[bool | None, typer.Option("--flash-attn/--no-flash-attn", help="Flash attention.")] = None,
    swa_full: Annotated[
        bool | None, typer.Option("--swa-full/--no-swa-full", help="Keep all rows of sliding-window layers.")
    ] = None,
    gpu_layers: Annotated[int | None, typer.Option("--gpu-layers", help="Layers on the GPU; -1 for all.")] = None,
    lora: Annotated[Path | None, typer.Option(help="LoRA adapter.")] = None,
    chat_format: Annotated[
        str | None, typer.Option("--chat-format", help="Chat format to use instead of the model's template.")
    ] = None,
    generation_prompt: Annotated[
        bool | None,
        typer.Option(
            "--generation-prompt/--next-turn",
            help="End messages where the assistant answers, or (the default) where the next user turn begins.",
        ),
    ] = None,
    salt: Salt = None,
    namespace: Annotated[
        str | None, typer.Option(help="Label of the namespace; separates pages, as --salt does.")
    ] = None,
    page_tokens: Annotated[int | None, typer.Option("--page-tokens", help="Tokens in a page.")] = None,
    max_bytes: MaxBytes = None,
    high_water: HighWater = None,
    low_water: LowWater = None,
    ttl: Annotated[str | None, typer.Option(help="Time to live after the last use: 30d.")] = None,
    priority: Annotated[
        int | None, typer.Option(help="Priority under the eviction policy priority; lower is evicted first.")
    ] = None,
    pin: Annotated[bool | None, typer.Option("--pin/--no-pin", help="Keep the prompts from eviction.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the estimated cost without storing anything.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Show whether the store has pages for these settings, and if not, why.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Compute prompts and store them, each shared prefix once.

    Prompts that are stored already are skipped. Run an interrupted job again to finish it; several jobs on one list
    divide it. Without --n-ctx, the context is as long as the longest prompt needs, up to the length that the model was
    trained with. Options override the file given by --config.

    Exit codes: 0 done; 1 some prompts could not be read or stored; 2 wrong usage; 3 the store cannot be used; 130, 143
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
        "high_water": high_water,
        "low_water": low_water,
        "ttl": ttl,
        "priority": priority,
    }
    settings = load_config(config) if config is not None else Config()
    settings = settings.override(str(model) if model else None, models, stores)
    sources = list(prompts or settings.warm.get("prompts", ()))
    ends = _either(generation_prompt, settings.warm.get("generation_prompt"))
    if check:
        return _check(settings, sources, generation_prompt=ends, as_json=as_json)
    if not sources:
        raise MisuseError("no prompts are given; pass files, folders, or - for standard input")
    if dry_run:
        return _dry_run(settings, sources, generation_prompt=ends, as_json=as_json)
    pins = _either(pin, settings.warm.get("pin"))
    return _warm(settings, sources, generation_prompt=ends, pin=pins, as_json=as_json)


def _either(option: bool | None, setting: object) -> bool:
    return option if option is not None else bool(setting)


# -- the commands -----------------------------------------------------------------------------------------------------


def _warm(settings: Config, sources: list[str], *, generation_prompt: bool, pin: bool, as_json: bool) -> int:
    with _signals() as caught, shown() as progress:
        progress(Progress())
        ready = _prepare(settings, sources, generation_prompt=generation_prompt, stop=lambda: bool(caught))
        with ready.settings.open_store(ready.llm) as store:
            _print_notes(ready, store)
            report = run_job(
                ready.llm,
                store,
                ready.prompts,
                progress=progress,
                stop=lambda: bool(caught),
                generation_prompt=generation_prompt,
                pin=pin,
            )
            dropped = store.stats().dropped
            location = store.location
        ready.llm.close()
    _print_problems(report.problems)
    _print_unstored(report.unstored, dropped)
    if as_json:
        emit({"location": location, "n_ctx": ready.n_ctx, **asdict(report), "seconds": round(report.seconds, 3)})
    else:
        fields({"location": location, "n_ctx": ready.n_ctx_in_words, **_rows(report)})
    if report.interrupted:
        return SIGNALLED + caught[0]
    return FAILED if report.problems or report.unstored else DONE


def _dry_run(settings: Config, sources: list[str], *, generation_prompt: bool, as_json: bool) -> int:
    ready = _prepare(settings, sources, generation_prompt=generation_prompt)
    with _open_read_only(ready.settings, ready.llm) as (store, location):
        _print_notes(ready, store)
        expected = estimate(ready.llm, store, ready.prompts, generation_prompt=generation_prompt)
    ready.llm.close()
    _print_problems(expected.problems)
    if as_json:
        emit({"location": location, "n_ctx": ready.n_ctx, **asdict(expected), "dry_run": True})
    else:
        fields({"location": location, "n_ctx": ready.n_ctx_in_words, **_expected_rows(expected)})
    return FAILED if expected.problems else DONE


def _check(settings: Config, sources: list[str], *, generation_prompt: bool, as_json: bool) -> int:
    ready = _prepare_check(settings, sources, generation_prompt=generation_prompt)
    with _open_read_only(ready.settings, ready.llm) as (store, location):
        for note in ready.notes:
            say(f"note: {note}")
        known = store.engine.namespaces()
        same = any(namespace.key == store.namespace.key for namespace in known)
        differences = explain(store.namespace, known)
        if as_json:
            result = {"namespace": store.namespace.key.hex(), "stored": same, "differences": differences}
            emit({"location": location} | result)
        elif same:
            typer.echo(f"{location} has pages for these settings.")
        elif differences:
            typer.echo(f"{location} has no pages for these settings. The most similar ones differ:")
            for difference in differences:
                typer.echo(f"  {difference}")
        else:
            typer.echo(f"{location} has no pages at all.")
    ready.llm.close()
    return DONE if same else FAILED


# -- the model and its context ----------------------------------------------------------------------------------------


@dataclass
class _Ready:
    """A model with a context, and the prompts for it.

    Attributes
    ----------
    settings
        The settings of the model and the store.
    llm
        The model.
    n_ctx
        Length of its context.
    prompts
        The prompts: tokens if the context was sized by them, otherwise read as they are needed.
    reason
        Why the context is as long as it is.
    notes
        What the user should know about its length.
    """

    settings: Config
    llm: Llama
    n_ctx: int = field(init=False)
    prompts: Iterable[PromptLike]
    reason: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # the report is printed when the model is closed
        self.n_ctx = self.llm.n_ctx()

    @property
    def n_ctx_in_words(self) -> str:
        """Length of the context, and the reason for it."""
        return f"{self.n_ctx:,} ({self.reason})"


def _prepare(
    settings: Config, sources: list[str], *, generation_prompt: bool, stop: Callable[[], bool] = lambda: False
) -> _Ready:
    """Open the model with the given context, or else with one that holds the longest prompt."""
    if "n_ctx" in settings.model:
        return _Ready(settings, open_model(settings), read(sources), "as given")
    tokenizer = open_model(settings, tokenizer_only=True)
    fitted = fit(tokenizer, read(sources), generation_prompt=generation_prompt, stop=stop)
    original = original_context(tokenizer)
    tokenizer.close()
    reason = "no prompt can be used"
    if fitted.longest:
        reason = f"for the longest prompt, {fitted.longest:,} tokens; servers need as much"
    notes = () if original is None else (_long_context_note(fitted.n_ctx, original),)
    settings = settings.override(model={"n_ctx": fitted.n_ctx})
    return _Ready(settings, open_model(settings), fitted.prompts(), reason, notes)


def _prepare_check(settings: Config, sources: list[str], *, generation_prompt: bool) -> _Ready:
    """Open the model for ``--check``: prompts are read only if the namespace depends on the length of the context."""
    if "n_ctx" in settings.model:
        return _Ready(settings, open_model(settings), (), "as given")
    tokenizer = open_model(settings, tokenizer_only=True)
    original = original_context(tokenizer)
    tokenizer.close()
    if original is not None and sources and STANDARD not in sources:
        return _prepare(settings, sources, generation_prompt=generation_prompt)
    llm = open_model(settings)
    notes = () if original is None else (_long_context_note(llm.n_ctx(), original),)
    return _Ready(settings, llm, (), "by default", notes)


def _long_context_note(n_ctx: int, original: int) -> str:
    same = f"above {original:,}" if n_ctx > original else f"of at most {original:,}"
    return (
        f"states of this model may differ in contexts longer than {original:,} tokens: pages for n_ctx={n_ctx:,} are "
        f"found only by servers with an n_ctx {same}; pass the --n-ctx of your servers"
    )


def _print_notes(ready: _Ready, store: PrefixStore) -> None:
    differences = explain(store.namespace, store.engine.namespaces())
    for note in (*ready.notes, *(f"the store has no pages for these settings yet: {one}" for one in differences)):
        say(f"note: {note}")


@contextmanager
def _open_read_only(settings: Config, llm: Llama) -> Iterator[tuple[PrefixStore, str]]:
    """The store and its location, to read from; an empty store if the location has none yet."""
    try:
        store = settings.open_store(llm, read_only=True)
        location = store.location
    except LocationError as error:
        say(f"note: the store is treated as empty, since it cannot be opened: {error}")
        store = settings.open_store(llm, location="memory:", ram_bytes=None)
        text = text_of(settings.store.get("location"))
        location = without_password(text) if is_url(text) else f"lmdb://{Path(text).absolute()}"
    with store:
        yield store, location


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM, to stop after the current batch; a second one ends the process as usual."""
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


# -- output -----------------------------------------------------------------------------------------------------------


def _print_problems(problems: tuple[Problem, ...]) -> None:
    for problem in problems:
        say(str(problem))


def _print_unstored(unstored: tuple[str, ...], dropped: dict[str, int]) -> None:
    for where in unstored[:LISTED]:
        say(f"{where}: not completely stored")
    if unstored:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) or "evicted since"
        say(
            f"{len(unstored)} prompts are not completely stored (pages left out: {reasons}); "
            "consider a larger --max-bytes"
        )


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
        rows["too short to store"] = f"{report.short:,}"
    if report.problems:
        rows["problems"] = f"{len(report.problems):,}"
    if report.interrupted:
        rows["interrupted"] = "yes; run it again for the rest"
    return rows


def _expected_rows(expected: Estimate) -> dict[str, object]:
    return {
        "prompts": f"{expected.prompts:,}",
        "tokens in them": f"{expected.prompt_tokens:,}",
        "unique tokens": f"{expected.unique_tokens:,}",
        "to evaluate": f"{expected.missing_tokens:,}",
        "bytes": format_bytes(expected.bytes),
        "seconds": f"{expected.seconds:,.1f}",
    }
