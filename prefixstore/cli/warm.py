"""``prefixstore warm``: a list of prompts into a store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from prefixstore.backends import is_persistent
from prefixstore.backends.location import is_url, without_password
from prefixstore.cli.command import Result
from prefixstore.cli.model import open_model
from prefixstore.cli.output import DONE, FAILED, has_terminal, say
from prefixstore.config import Config, explain_settings, load_config
from prefixstore.errors import LocationError, MisuseError
from prefixstore.store import PrefixStore
from prefixstore.units import counted, format_bytes, format_seconds, format_share
from prefixstore.warming.job import Progress, WarmReport, estimate
from prefixstore.warming.job import warm as run_job
from prefixstore.warming.prompt_list import Problem, Prompt, PromptLike, read_prompts, tokenized

if TYPE_CHECKING:
    from types import FrameType

    from llama_cpp import Llama

SIGNALLED = 128  # plus the number of the signal
# what llama-server has by default, and a Llama has not
OF_SERVER = {"flash_attn": True}

# The default of llama-cpp-python; no context is made shorter.
SMALLEST = 512
# llama.cpp rounds the length of a context up to a multiple of this.
STEP = 256
# The limit of a model whose file does not say what it was trained with: more than any prompt has.
UNLIMITED = 1 << 31

# How many problems, and prompts that did not fit, are listed one by one.
LISTED = 10
# What a summary has only if there is any, and how it is called there.
UNUSUAL = {
    "short": "too short to store",
    "unstored": "not completely stored",
    "problems": "problems",
    "interrupted": "interrupted",
    "full": "stopped",
}
# what a summary says of them if they are true
TRUE = {"interrupted": "yes; run it again for the rest", "full": "the store is full"}
# How often a line is printed where there is no terminal.
LINE_SECONDS = 10.0


def warm(
    prompts: list[str] | None = None,
    *,
    config: Path | None = None,
    model: Path | None = None,
    store: list[str] | None = None,
    far: str | None = None,
    far_max_bytes: str | None = None,
    for_server: bool = False,
    n_ctx: int | None = None,
    threads: int | None = None,
    batch: int | None = None,
    type_k: str | None = None,
    type_v: str | None = None,
    flash_attn: bool | None = None,
    swa_full: bool | None = None,
    gpu_layers: int | None = None,
    lora: Path | None = None,
    chat_format: str | None = None,
    generation_prompt: bool | None = None,
    salt: str | None = None,
    namespace: str | None = None,
    page_tokens: int | None = None,
    max_bytes: str | None = None,
    ttl: str | None = None,
    priority: int | None = None,
    pin: bool | None = None,
    dry_run: bool = False,
) -> Result:
    """Compute prompts and store them, each shared prefix once.

    Prompts that are stored already are skipped. Run an interrupted job again to finish it; several jobs with the same
    list share the work. Without --n-ctx, the context is as long as the longest prompt needs, up to the length that the
    model was trained with. Options override the file given by --config.

    Exit codes: 0 done; 1 some prompts could not be read or stored; 2 wrong usage; 3 the store cannot be used; 130, 143
    interrupted; everything computed so far is kept.

    Pages are for one way of computing. For llama-server behind prefixstore serve, pass --for-server: its defaults are
    not those of a Llama. What else it is started with (-ctk, -ctv, ...) is passed here as well.

    Example: prefixstore warm --for-server --model m.gguf --store lmdb:///var/cache/kv prompts.jsonl docs/
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
        "location": store[0] if store and len(store) == 1 else store,
        "far_max_bytes": far_max_bytes,
        "salt": salt,
        "namespace": namespace,
        "page_tokens": page_tokens,
        "max_bytes": max_bytes,
        "ttl": ttl,
        "priority": priority,
    }
    settings = load_config(config) if config is not None else Config()
    if far is not None:
        stores["location"] = [*(store or settings.locations[:1]), far]
    settings = settings.override(str(model) if model else None, models, stores)
    if for_server:
        settings = replace(settings, model=OF_SERVER | dict(settings.model))
    sources = list(prompts or settings.warm.get("prompts", ()))
    ends = bool(settings.warm.get("generation_prompt")) if generation_prompt is None else generation_prompt
    if not sources:
        raise MisuseError("no prompts are given; pass files, folders, or - for standard input")
    if not any(map(is_persistent, settings.locations)):
        raise MisuseError("memory: ends with this command, and what was computed with it; pass another --store")
    for source in sources:
        if Path(source).suffix.lower() == ".json":
            say(f"note: {source} is read as the text of one prompt; name it .jsonl if each line is a prompt")
    if dry_run:
        return _dry_run(settings, sources, generation_prompt=ends)
    pins = bool(settings.warm.get("pin")) if pin is None else pin
    return _warm(settings, sources, generation_prompt=ends, pin=pins)


# -- the commands -----------------------------------------------------------------------------------------------------


def _warm(settings: Config, sources: list[str], *, generation_prompt: bool, pin: bool) -> Result:
    with _signals() as caught, progress_shown() as progress:
        progress(Progress())
        how: dict[str, Any] = {"generation_prompt": generation_prompt, "stop": lambda: bool(caught)}
        ready = prepare(settings, sources, **how)
        # what was not read is not known
        is_cut = bool(caught)
        n_ctx = ready.llm.n_ctx()
        # what another job has stored is worth waiting for
        with ready.settings.open_store(ready.llm, max_delay=None) as store:
            _print_notes(ready, store)
            report = run_job(ready.llm, store, ready.prompts, progress=progress, pin=pin, **how)
            dropped, location = store.stats().dropped, store.location
        ready.llm.close()
        report = replace(report, interrupted=report.interrupted or is_cut)
    if not report.prompts and not report.problems and not is_cut:
        say(f"note: there are no prompts in {', '.join(sources)}")
    found = _told(location, f"{n_ctx:,} ({ready.reason})", vars(report))
    _print_unstored(report, dropped)
    code = FAILED if report.problems or report.unstored else DONE
    return Result(
        {"location": location, "n_ctx": n_ctx, **asdict(report), "seconds": round(report.seconds, 3)},
        found,
        SIGNALLED + caught[0] if report.interrupted else code,
    )


def _dry_run(settings: Config, sources: list[str], *, generation_prompt: bool) -> Result:
    ready = prepare(settings, sources, generation_prompt=generation_prompt)
    n_ctx = ready.llm.n_ctx()
    with _open_read_only(ready.settings, ready.llm) as (store, location):
        _print_notes(ready, store)
        expected = estimate(ready.llm, store, ready.prompts)
    ready.llm.close()
    return Result(
        {"location": location, "n_ctx": n_ctx, **expected, "problems": [*map(asdict, expected["problems"])]}
        | {"dry_run": True},
        _told(location, f"{n_ctx:,} ({ready.reason})", expected),
        FAILED if expected["problems"] else DONE,
    )


def _print_notes(ready: Ready, store: PrefixStore) -> None:
    differences = explain_settings(store.namespace, store.engine.upkeep.namespaces(), store.history().models)
    for note in (*ready.notes, *(f"the store has no pages for these settings yet: {one}" for one in differences)):
        say(f"note: {note}")


@contextmanager
def _open_read_only(settings: Config, llm: Llama) -> Iterator[tuple[PrefixStore, str]]:
    """The store and its location, to read from.

    Of two locations, one may be missing, such as the near one on a new machine. Without any it is an empty store.
    """
    texts, there = settings.locations, []
    for text in texts:
        try:
            settings.open_store(None, location=text, read_only=True, far_max_bytes=None).close()
            there.append(text)
        except LocationError as error:
            say(f"note: {error}; for now it counts as empty")
    options = {"location": there, "read_only": True} if there else {"location": "memory:"}
    with settings.open_store(llm, far_max_bytes=None, **options) as store:
        yield (
            store,
            ", ".join(without_password(text) if is_url(text) else f"lmdb://{Path(text).absolute()}" for text in texts),
        )


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
        if has_terminal():
            # a batch may take a minute. What is printed otherwise is not safe in a handler
            os.write(2, b"\nstopping after this batch; Ctrl-C again stops at once\n")

    for number in before:
        signal.signal(number, stop)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the model --------------------------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """A model with a context, and the prompts for it: the problems, and the prompts as tokens.

    `reason` says why the context is as long as it is, and `notes` what the user should know about that.
    """

    settings: Config
    llm: Llama
    prompts: Sequence[PromptLike]
    reason: str
    notes: tuple[str, ...] = ()


def prepare(
    settings: Config, sources: list[str], *, generation_prompt: bool, stop: Callable[[], bool] = lambda: False
) -> Ready:
    """Open the model with the given context, or else with one that holds the longest prompt; 512 tokens without any.

    That is never longer than the one that the model was trained with: a prompt that needs more is a problem. `stop` is
    called after each prompt; if it returns True, no more are read.
    """
    is_given = "n_ctx" in settings.model
    llm = open_model(settings, tokenizer_only=not is_given)
    trained = None if is_given else _number(llm, "context_length") or UNLIMITED
    problems: list[Problem] = []
    found: list[Prompt] = []
    longest = 0
    for tokens, where in tokenized(
        llm, read_prompts(sources), problems, generation_prompt=generation_prompt, trained=trained
    ):
        longest = max(longest, len(tokens))
        found.append(Prompt(where, tokens))
        if stop():
            break
    prompts: list[PromptLike] = [*problems, *found]
    if trained is None:
        return Ready(settings, llm, prompts, f"as given, in steps of {STEP}")
    n_ctx = min(max(SMALLEST, -(-(longest + 1) // STEP) * STEP), trained)
    original = _number(llm, "rope.scaling.original_context_length")
    llm.close()
    reason = f"for the longest prompt, {longest:,} tokens; servers need as much" if longest else "no prompt can be used"
    # contexts longer than that may use other RoPE factors, so they have namespaces of their own
    notes = () if original is None else (_long_context_note(n_ctx, original),)
    settings = settings.override(model={"n_ctx": n_ctx})
    return Ready(settings, open_model(settings), prompts, reason, notes)


def _number(llm: Llama, name: str) -> int | None:
    """A number in the metadata of a model."""
    value = llm.metadata.get(f"{llm.metadata.get('general.architecture', '')}.{name}", "")
    return int(value) if value.isdigit() and int(value) else None


def _long_context_note(n_ctx: int, original: int) -> str:
    same = f"above {original:,}" if n_ctx > original else f"of at most {original:,}"
    return (
        f"states of this model may differ in contexts longer than {original:,} tokens: pages for n_ctx={n_ctx:,} are "
        f"found only by servers with an n_ctx {same}; pass the --n-ctx of your servers"
    )


# -- what is said -----------------------------------------------------------------------------------------------------


def _print_listed(texts: Sequence[str], *, more: str) -> None:
    """Print what is wrong to stderr; of much, the first ones."""
    for text in texts[:LISTED]:
        say(text)
    if len(texts) > LISTED:
        say(f"and {counted(len(texts) - LISTED, more)}; --json has all")


def _print_unstored(report: WarmReport, dropped: dict[str, int]) -> None:
    """Print which prompts are not completely stored, and why."""
    unstored = report.unstored
    _print_listed([f"{where}: not completely stored" for where in unstored if not report.full], more="more prompt")
    if unstored:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) or "evicted since"
        are = "is" if len(unstored) == 1 else "are"
        say(
            f"{'the store is full, so this has stopped: ' if report.full else ''}"
            f"{counted(len(unstored), 'prompt')} {are} not completely stored (pages left out: {reasons}); "
            "pass a larger --max-bytes, or fewer prompts"
        )


def _told(location: str, n_ctx: str, found: Mapping[str, Any]) -> dict[str, object]:
    """The summary of a job, or of what a dry run found, without what did not happen. Problems are printed."""
    _print_listed([*map(str, found["problems"])], more="more problem")
    rows: dict[str, object] = {"location": location, "n_ctx": n_ctx}
    for name, value in found.items():
        n = len(value) if isinstance(value, tuple) else value
        if n or name not in UNUSUAL:
            text = format_bytes(n) if name.endswith("bytes") else f"{n:,.1f}" if isinstance(n, float) else f"{n:,}"
            rows[UNUSUAL.get(name, name.replace("_", " "))] = TRUE[name] if n is True else text
    return rows


# -- progress ---------------------------------------------------------------------------------------------------------


@contextmanager
def progress_shown() -> Iterator[Callable[[Progress], None]]:
    """A function that shows progress on stderr: in one line on a terminal, otherwise as a line from time to time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    with console.status("") as status:
        yield lambda progress: status.update(Text(_text(progress), no_wrap=True, overflow="ellipsis"))


class _Lines:
    """A line on stderr at the beginning of each phase, and every `LINE_SECONDS`."""

    def __init__(self) -> None:
        self._last = (0.0, "")

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        at, phase = self._last
        if now - at >= LINE_SECONDS or progress.phase != phase:
            self._last = now, progress.phase
            typer.echo(_text(progress), err=True)


def _text(progress: Progress) -> str:
    """The progress as text."""
    if progress.phase == "reading":
        return "reading prompts"
    left = progress.seconds_left
    parts = [
        f"{format_seconds(left)} left" if left is not None else "",
        f"{progress.done_tokens:,} of {progress.missing_tokens:,} tokens",
        f"{progress.rate:,.0f} tokens/s",
        f"{format_bytes(progress.stored_bytes)} stored",
        f"{format_share(progress.hit_share)} hits",
    ]
    return f"{progress.phase}: {', '.join(filter(None, parts))}"
