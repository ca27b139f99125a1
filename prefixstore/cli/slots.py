"""``prefixstore slots``: the slots of a running llama-server, and a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixstore.cli.command import Result, ready, summary
from prefixstore.cli.output import DONE, FAILED, fields, say, table
from prefixstore.errors import InvalidParameterError, ServerError, StorageError
from prefixstore.maintenance.archive import Archive
from prefixstore.units import counted, format_bytes, format_share

if TYPE_CHECKING:
    from prefixstore.server.client import LlamaServer
    from prefixstore.server.namespace import ServerIdentity
    from prefixstore.server.slots import SlotStore
from prefixstore.cli import options
from prefixstore.cli.files import chat_in, text_in
from prefixstore.cli.options import flag, option

__all__ = ["slots"]


Server = Annotated[str, option("URL", "URL of the server: http://127.0.0.1:8080.", "--server")]
Store = Annotated[
    str, typer.Argument(metavar="STORE", help=f"lmdb:///path (or a path), sqlite:////path, …; {options.OTHERWISE}")
]
SlotsDir = Annotated[Path, option("DIR", "The server's --slot-save-path.")]
Name = Annotated[
    str | None, option("NAME", "A name for the model and settings of a server whose process cannot be read.")
]
ApiKey = Annotated[str | None, option("KEY", f"Key of the server; by default {options.SERVER_KEY} in the environment.")]
Timeout = Annotated[float, option("SECONDS", "Timeout of a request in seconds.")]

slots = typer.Typer(
    help="Save the slots of a running llama-server as pages of a store, and restore them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def status(
    server: Server,
    *,
    slots_dir: Annotated[
        Path | None, option("DIR", "Its --slot-save-path: also shows bytes, which saves a slot.")
    ] = None,
    namespace: Name = None,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
) -> Result:
    """Show what the slots of a server hold, and the memory of its process.

    The bytes per token are measured from a slot's file: with --slots-dir, an idle slot is saved, and the file is
    deleted. All slots wait meanwhile, so do not run this every few seconds.

    Example: prefixstore slots status --server http://127.0.0.1:8080
    """
    with _client(server, api_key, timeout) as client:
        if slots_dir is not None and any(slot.n_tokens for slot in client.slots()):
            _learn_sizes(client, slots_dir, namespace)
        props, found, process = client.props(), client.slots(), client.process()
    data = {
        "build": props.build,
        "model": props.model_path,
        "is_sleeping": props.is_sleeping,
        "slots": [asdict(slot) | {"capacity": slot.capacity} for slot in found],
        "process": asdict(process) if process is not None else None,
    }

    def show() -> None:
        memory = format_bytes(process.resident) if process is not None else "not known"
        fields({"model": props.model_path, "llama.cpp": props.build, "memory": memory})
        rows = (
            [
                str(slot.id),
                slot.state,
                "-" if slot.n_tokens is None else str(slot.n_tokens),
                str(slot.n_ctx),
                format_share(slot.capacity),
                "-" if slot.n_bytes is None else format_bytes(slot.n_bytes),
            ]
            for slot in found
        )
        table(["slot>", "state", "tokens>", "context>", "used>", "bytes>"], rows)

    return Result(data, show)


def save(
    store: Store,
    *,
    server: Server,
    slots_dir: SlotsDir,
    slot: Annotated[int | None, option("N", "Number of the slot.")] = None,
    every: Annotated[bool, flag("--all", "All slots that are idle.")] = False,
    salt: options.Salt = None,
    namespace: Name = None,
    api_key: ApiKey = None,
    timeout: Timeout = 60.0,
    max_bytes: options.MaxBytes = None,
) -> Result:
    """Store the contents of slots that the store does not have yet.

    Exit code 1 if a slot could not be stored. As a hook before a model is unloaded: with --all.

    Example: prefixstore slots save --all --server URL --slots-dir DIR lmdb:///var/cache/kv
    """
    if every == (slot is not None):
        raise InvalidParameterError("pass either --slot N or --all")
    results: list[dict[str, Any]] = []
    with _opened(store, server, slots_dir, namespace, api_key, timeout, max_bytes) as opened:
        numbers = [one.id for one in opened.server.slots() if not one.is_processing] if slot is None else [slot]
        for number in numbers:
            one: dict[str, Any] = {
                "slot": number,
                "tokens": 0,
                "new_pages": 0,
                "bytes": 0,
                "seconds": 0.0,
                "reason": None,
            }
            results.append(one)
            try:
                saved = opened.save(number, salt=salt)
            except (ServerError, StorageError) as error:
                if not every:
                    raise
                # the others can be saved all the same
                one["reason"] = str(error)
                continue
            one |= {"tokens": len(saved.tokens), "new_pages": saved.n_new_pages, "bytes": saved.n_bytes}
            one |= {"seconds": saved.seconds, "reason": saved.reason}
        opened.engine.flush()

    def show() -> None:
        for one in results:
            done = f"{counted(one['new_pages'], 'new page')}, {format_bytes(one['bytes'])}"
            say(f"slot {one['slot']}: {one['tokens']} tokens, {one['reason'] or done}")

    failed = any(one["reason"] not in (None, "empty", "short") for one in results)
    return Result(results, show, FAILED if failed else DONE)


def restore(
    store: Store,
    *,
    server: Server,
    slots_dir: SlotsDir,
    slot: Annotated[int, option("N", "Number of the slot.")] = 0,
    prompt_file: options.PromptFile = None,
    messages: options.MessagesFile = None,
    deepest: Annotated[bool, flag("--deepest", "The longest stored prompt that fits the slot, to its end.")] = False,
    salt: options.Salt = None,
    namespace: Name = None,
    api_key: ApiKey = None,
    timeout: Timeout = 60.0,
) -> Result:
    """Give a slot the longest stored prefix of a prompt.

    Exit code 1 if nothing is stored of it, 3 if there is no store. As a hook after a model is loaded: with --deepest.

    Example: prefixstore slots restore --deepest --server URL --slots-dir DIR lmdb:///var/cache/kv
    """
    if [prompt_file is not None, messages is not None, deepest].count(True) != 1:
        raise InvalidParameterError("pass one of --prompt-file FILE, --messages FILE and --deepest")
    # opening it for slots would create a store at a mistyped location
    Archive(store, read_only=True).close()
    with _opened(store, server, slots_dir, namespace, api_key, timeout, None) as opened:
        if opened.server.slot(slot).is_processing:
            raise InvalidParameterError(f"slot {slot} is processing; wait until it is idle")
        if deepest:
            restored = opened.restore_deepest(slot, salt=salt)
        else:
            text = text_in(prompt_file) if prompt_file is not None else None
            if text is None and messages is not None:
                text = opened.server.apply_template(chat_in(messages)["messages"])
            restored = opened.restore(slot, opened.server.tokenize(text or ""), salt=salt)
    text = f"slot {slot}: {restored.n_tokens} tokens" + (f", {restored.reason}" if restored.reason else "")
    return Result({"slot": slot, **asdict(restored)}, partial(say, text), DONE if restored.n_tokens else FAILED)


def erase(
    server: Server,
    *,
    slot: Annotated[int, option("N", "Number of the slot.")],
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
) -> Result:
    """Empty a slot of the server. The store keeps what it has.

    Example: prefixstore slots erase --server http://127.0.0.1:8080 --slot 0
    """
    with _client(server, api_key, timeout) as client:
        client.slot(slot)
        n_tokens = client.erase(slot).n_tokens
    return Result({"slot": slot, "tokens": n_tokens}, partial(say, f"slot {slot}: {n_tokens} tokens erased"))


for command in (status, save, restore, erase):
    slots.command(command.__name__, short_help=summary(command))(ready(command))


def _client(url: str, api_key: str | None, timeout: float) -> LlamaServer:
    from prefixstore.server.client import LlamaServer  # noqa: PLC0415 - the extra "server"

    return LlamaServer(url, timeout, options.server_key(api_key))


def _learn_sizes(client: LlamaServer, slots_dir: Path, namespace: str | None) -> None:
    """Learn the bytes of a token. Nothing is stored."""
    from prefixstore.server.slots import SlotStore  # noqa: PLC0415 - the extra "server"

    with SlotStore("memory:", client, slots_dir, _identity(client, namespace)) as opened:
        opened.connect()


@contextmanager
def _opened(
    store: str,
    url: str,
    slots_dir: Path,
    namespace: str | None,
    api_key: str | None,
    timeout: float,
    max_bytes: str | None,
) -> Iterator[SlotStore]:
    """The store of a server's slots."""
    with _client(url, api_key, timeout) as client:
        from prefixstore.server.slots import SlotStore  # noqa: PLC0415 - the extra "server"

        identity = _identity(client, namespace)
        options = {} if max_bytes is None else {"max_bytes": max_bytes}
        with SlotStore(store, client, slots_dir, identity, **options) as opened:
            opened.connect()
            yield opened


def _identity(client: LlamaServer, namespace: str | None) -> ServerIdentity:
    """What is known of a server."""
    from prefixstore.server.namespace import ServerIdentity, slots_dir_of  # noqa: PLC0415 - the extra "server"

    props = client.props()
    if namespace is None:
        return ServerIdentity.of_process(client.url, props)
    return ServerIdentity.named(props, namespace, slots_dir=slots_dir_of(client.url))
