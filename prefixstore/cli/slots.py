"""``prefixstore slots``: the slots of a running llama-server, and a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixstore.cli.arguments import OTHERWISE, SERVER_KEY, AsJson, MaxBytes, Salt, server_key
from prefixstore.cli.output import DONE, FAILED, emit, fields, say, table
from prefixstore.cli.place import ready, summary
from prefixstore.cli.prompt_files import chat_in, text_in
from prefixstore.errors import InvalidParameterError, ServerError, StorageError
from prefixstore.maintenance.archive import Archive
from prefixstore.units import counted, format_bytes, format_share

if TYPE_CHECKING:
    from prefixstore.server.client import LlamaServer
    from prefixstore.server.namespace import ServerIdentity
    from prefixstore.server.slots import SlotStore

__all__ = ["slots"]


Server = Annotated[str, typer.Option("--server", metavar="URL", help="URL of the server: http://127.0.0.1:8080.")]
Store = Annotated[
    str, typer.Argument(metavar="STORE", help=f"lmdb:///path (or a path), sqlite:////path, …; {OTHERWISE}")
]
SlotsDir = Annotated[Path, typer.Option("--slots-dir", metavar="DIR", help="The server's --slot-save-path.")]
Number = Annotated[int, typer.Option("--slot", metavar="N", help="Number of the slot.")]
Name = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="NAME",
        help="A name for the model and settings of a server whose process cannot be read.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", help=f"Key of the server; by default {SERVER_KEY} in the environment."),
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Timeout of a request in seconds.")]
PromptFile = Annotated[Path | None, typer.Option("--prompt-file", metavar="FILE", help="The prompt; - is stdin.")]
MessagesFile = Annotated[
    Path | None, typer.Option("--messages", metavar="FILE", help="The messages of a chat, as JSON; - is stdin.")
]

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
        Path | None,
        typer.Option("--slots-dir", metavar="DIR", help="Its --slot-save-path: also shows bytes, which saves a slot."),
    ] = None,
    namespace: Name = None,
    api_key: ApiKey = None,
    timeout: Timeout = 10.0,
    as_json: AsJson = False,
) -> None:
    """Show what the slots of a server hold, and the memory of its process.

    The bytes per token are measured from a slot's file: with --slots-dir, an idle slot is saved, and the file is
    deleted. All slots wait meanwhile, so do not run this every few seconds.

    Example: prefixstore slots status --server http://127.0.0.1:8080
    """
    with _client(server, api_key, timeout) as client:
        if slots_dir is not None and any(slot.n_tokens for slot in client.slots()):
            _learn_sizes(client, slots_dir, namespace)
        props, found, process = client.props(), client.slots(), client.process()
    if as_json:
        emit(
            {
                "build": props.build,
                "model": props.model_path,
                "is_sleeping": props.is_sleeping,
                "slots": [asdict(slot) | {"capacity": slot.capacity} for slot in found],
                "process": asdict(process) if process is not None else None,
            }
        )
        return
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


def save(
    store: Store,
    *,
    server: Server,
    slots_dir: SlotsDir,
    slot: Annotated[int | None, typer.Option("--slot", metavar="N", help="Number of the slot.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All slots that are idle.")] = False,
    salt: Salt = None,
    namespace: Name = None,
    api_key: ApiKey = None,
    timeout: Timeout = 60.0,
    max_bytes: MaxBytes = None,
    as_json: AsJson = False,
) -> int:
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
            try:
                saved = opened.save(number, salt=salt)
            except (ServerError, StorageError) as error:
                if not every:
                    raise
                # the others can be saved all the same
                results.append(
                    {"slot": number, "tokens": 0, "new_pages": 0, "bytes": 0, "seconds": 0.0, "reason": str(error)}
                )
                continue
            results.append(
                {
                    "slot": number,
                    "tokens": len(saved.tokens),
                    "new_pages": saved.n_new_pages,
                    "bytes": saved.n_bytes,
                    "seconds": saved.seconds,
                    "reason": saved.reason,
                }
            )
        opened.engine.flush()
    if as_json:
        emit(results)
    else:
        for one in results:
            done = f"{counted(one['new_pages'], 'new page')}, {format_bytes(one['bytes'])}"
            say(f"slot {one['slot']}: {one['tokens']} tokens, {one['reason'] or done}")
    return FAILED if any(one["reason"] not in (None, "empty", "short") for one in results) else DONE


def restore(
    store: Store,
    *,
    server: Server,
    slots_dir: SlotsDir,
    slot: Number = 0,
    prompt_file: PromptFile = None,
    messages: MessagesFile = None,
    deepest: Annotated[
        bool, typer.Option("--deepest", help="The longest stored prompt that fits the slot, to its end.")
    ] = False,
    salt: Salt = None,
    namespace: Name = None,
    api_key: ApiKey = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> int:
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
    if as_json:
        emit({"slot": slot, **asdict(restored)})
    else:
        say(f"slot {slot}: {restored.n_tokens} tokens" + (f", {restored.reason}" if restored.reason else ""))
    return DONE if restored.n_tokens else FAILED


def erase(
    server: Server, *, slot: Number, api_key: ApiKey = None, timeout: Timeout = 10.0, as_json: AsJson = False
) -> None:
    """Empty a slot of the server. The store keeps what it has.

    Example: prefixstore slots erase --server http://127.0.0.1:8080 --slot 0
    """
    with _client(server, api_key, timeout) as client:
        client.slot(slot)
        n_tokens = client.erase(slot).n_tokens
    if as_json:
        emit({"slot": slot, "tokens": n_tokens})
    else:
        say(f"slot {slot}: {n_tokens} tokens erased")


for command in (status, save, restore, erase):
    slots.command(command.__name__, short_help=summary(command))(ready(command))


def _client(url: str, api_key: str | None, timeout: float) -> LlamaServer:
    from prefixstore.server.client import LlamaServer  # noqa: PLC0415 - not needed for --help

    return LlamaServer(url, timeout, server_key(api_key))


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
