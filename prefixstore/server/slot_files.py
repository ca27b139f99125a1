"""Moves slots out of a server, and into it, through files in its slot directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prefixstore.errors import (
    CorruptError,
    ServerBusyError,
    ServerRefusedError,
    ServerTooOldError,
    ServerUnreachableError,
)
from prefixstore.server.client import LlamaServer
from prefixstore.server.records import SlotAction
from prefixstore.server.slot_directory import SlotDirectory
from prefixstore.server.slot_file import SlotFile, SlotLayout, parse_slot_file

__all__ = ["SlotFiles"]

log = logging.getLogger("prefixstore")


class SlotFiles:
    """Files of slots, each deleted once it was read.

    Parameters
    ----------
    path
        The directory that the server was started with as ``--slot-save-path``.

    Attributes
    ----------
    directory
        The directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = SlotDirectory(path)

    def any_layout(self, server: LlamaServer) -> SlotLayout | None:
        """The layout of any slot; None if it is unknown. If no slot holds anything, a free one evaluates two tokens."""
        n_slots = server.props().n_slots
        try:
            slots = [slot for slot in server.slots() if not slot.is_processing]
            # those that hold little first, then those of which it is not known
            order = [slot.id for slot in sorted(slots, key=lambda slot: slot.n_tokens or 1 << 30)]
        except ServerRefusedError:
            order = list(range(n_slots))
        for slot in order:
            with suppress(CorruptError), self.saved(server, slot) as (_, file):
                if file.layout is not None:
                    return file.layout
        for slot in order[-1:]:
            # two: a recurrent state of one token cannot be told from empty attention
            server.evaluate(slot, (0, 0))
            try:
                with self.saved(server, slot) as (_, file):
                    layout = file.layout
            except CorruptError as error:
                log.warning("nothing is stored of %s, whose states have an unknown layout: %s", server.url, error)
                return None
            finally:
                server.erase(slot)
            if layout is not None:
                return layout
        raise ServerBusyError(f"no slot of {server.url} is idle")

    def load(self, server: LlamaServer, slot: int, n: int, data: memoryview) -> None:
        """Have the server load a slot's file, which is complete."""
        with self.directory.name() as name:
            written = self.directory.write(name, data)
            action = server.restore(slot, name)
            is_same = self.directory.mark(name) == written
        if not is_same:
            server.erase(slot)
            raise CorruptError("another process has changed a slot file before the server read it: the slot was erased")
        if (action.n_tokens, action.n_bytes) != (n, len(data)):
            server.erase(slot)
            raise ServerTooOldError(
                f"{server.url} has restored {action.n_tokens} tokens of a slot's file of {n}: the slot was erased"
            )

    @contextmanager
    def saved(self, server: LlamaServer, slot: int) -> Iterator[tuple[SlotAction, SlotFile]]:
        """A slot's file, parsed; it is deleted whatever happens."""
        self.directory.remove_late()
        with self.directory.name() as name:
            try:
                action = server.save(slot, name)
            except (ServerBusyError, ServerUnreachableError):
                # it may write the file when the slot becomes idle
                self.directory.expect_late(name)
                raise
            data = self.directory.read(name, action.n_bytes)
            file = parse_slot_file(data, slot)
            if len(file.tokens) != action.n_tokens and not file.has_media:
                raise CorruptError(f"a slot's file has {len(file.tokens)} tokens, the server says {action.n_tokens}")
            yield action, file
