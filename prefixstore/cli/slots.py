"""``prefixstore slots``: the slots of a running llama-server, and a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.named_files import STANDARD, chat_in, text_in
from prefixstore.cli.output import DONE, FAILED, say
from prefixstore.errors import InvalidParameterError, ServerError, StorageError
from prefixstore.maintenance.archive import Archive
from prefixstore.server.client import LlamaServer
from prefixstore.server.identity import ServerIdentity
from prefixstore.server.slot_store import SlotStore
from prefixstore.units import counted, format_bytes


def save(
    store: str,
    *,
    server: str,
    slots_dir: Path,
    slot: int | None = None,
    every: bool = False,
    salt: str | None = None,
    api_key: str | None = None,
    timeout: float = 60.0,
    max_bytes: str | None = None,
) -> Result:
    """Store the contents of slots that the store does not have yet.

    Exit code 1 if a slot could not be stored. As a hook before a model is unloaded: with --all.

    Example: prefixstore slots save --all --server URL --slots-dir DIR lmdb:///var/cache/kv
    """
    if every == (slot is not None):
        raise InvalidParameterError("pass either --slot N or --all")
    results: list[dict[str, Any]] = []
    limit = {} if max_bytes is None else {"max_bytes": max_bytes}
    with _opened(store, server, slots_dir, timeout, api_key, **limit) as opened:
        numbers = [one.id for one in opened.server.slots() if not one.is_processing] if slot is None else [slot]
        for number in numbers:
            try:
                saved = opened.save(number, salt=salt)
                facts = (len(saved.tokens), saved.n_new_pages, saved.n_bytes, saved.seconds, saved.reason)
            except (ServerError, StorageError) as error:
                if not every:
                    raise
                # the others can be saved all the same
                facts = (0, 0, 0, 0.0, str(error))
            names = ("tokens", "new_pages", "bytes", "seconds", "reason")
            results.append({"slot": number} | dict(zip(names, facts, strict=True)))
        opened.engine.flush()

    def show() -> None:
        for one in results:
            done = f"{counted(one['new_pages'], 'new page')}, {format_bytes(one['bytes'])}"
            say(f"slot {one['slot']}: {one['tokens']} tokens, {one['reason'] or done}")

    failed = any(one["reason"] not in (None, "empty", "short") for one in results)
    return Result(results, show, FAILED if failed else DONE)


def restore(
    store: str,
    *,
    server: str,
    slots_dir: Path,
    slot: int = 0,
    prompt_file: Path | None = None,
    messages: Path | None = None,
    salt: str | None = None,
    api_key: str | None = None,
    timeout: float = 60.0,
) -> Result:
    """Give a slot the longest stored prefix of a prompt.

    Exit code 1 if nothing is stored of it, 3 if there is no store.

    Example: prefixstore slots restore --messages system.json --server URL --slots-dir DIR lmdb:///var/cache/kv
    """
    if (prompt_file is None) == (messages is None):
        raise InvalidParameterError("pass either --prompt-file FILE or --messages FILE")
    # opening it for slots would create a store at a mistyped location
    Archive(store, read_only=True).close()
    with _opened(store, server, slots_dir, timeout, api_key) as opened:
        if opened.server.slot(slot).is_processing:
            raise InvalidParameterError(f"slot {slot} is processing; wait until it is idle")
        content = text_in(prompt_file) if prompt_file is not None else chat_in(messages or Path(STANDARD))
        restored = opened.restore(slot, opened.server.tokens_of_content(content), salt=salt)
    text = f"slot {slot}: {restored.n_tokens} tokens" + (f", {restored.reason}" if restored.reason else "")
    return Result({"slot": slot, **asdict(restored)}, partial(say, text), DONE if restored.n_tokens else FAILED)


@contextmanager
def _opened(
    store: str, url: str, slots_dir: Path, timeout: float, api_key: str | None, **limit: str
) -> Iterator[SlotStore]:
    """The store of a server's slots."""
    client = LlamaServer(url, timeout, options.server_key(api_key))
    identity = ServerIdentity.of_process(client.url, client.props())
    with SlotStore(store, client, slots_dir, identity, **limit) as opened:
        yield opened
