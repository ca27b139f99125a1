"""Moves slots out of a server, and into it, through files in its slot directory."""

from __future__ import annotations

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
from prefixstore.server.slot_file import SlotFile, parse_slot_file

__all__ = ["SlotFiles"]


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
    is_drafting
        Whether the slots have the rows of a draft, too: then a slot is emptied before it is loaded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = SlotDirectory(path)
        self.is_drafting = True  # until the server says otherwise

    def any(self, server: LlamaServer) -> SlotFile:
        """The file of any slot that holds something. If none does, a free one evaluates two tokens, and is erased.

        Raises
        ------
        UnknownVersionError
            If its version is not known.
        ServerError
            If the server cannot be asked.
        """
        n_slots = server.props().n_slots
        try:
            found = server.slots()
            self.is_drafting = any(slot.is_drafting for slot in found)
            slots = [slot for slot in found if not slot.is_processing]
            # those that hold little first, then those of which it is not known
            order = [slot.id for slot in sorted(slots, key=lambda slot: slot.n_tokens or 1 << 30)]
        except ServerRefusedError:
            order = list(range(n_slots))
        for slot in order:
            with suppress(CorruptError), self.saved(server, slot) as (_, file):
                if file.layout is not None:
                    return file
        for slot in order[-1:]:
            # two: a recurrent state of one token cannot be told from empty attention
            server.evaluate(slot, (0, 0))
            try:
                # what is not understood even then is stored whole
                for whole in (False, True):
                    with suppress(CorruptError), self.saved(server, slot, whole=whole) as (_, file):
                        if file.layout is not None:
                            return file
            finally:
                server.erase(slot)
        raise ServerBusyError(f"no slot of {server.url} is idle")

    def load(self, server: LlamaServer, slot: int, n: int, data: memoryview) -> None:
        """Have the server load a slot's file, which is complete."""
        with self.directory.name() as name:
            written = self.directory.write(name, data)
            if self.is_drafting:
                # it restores the rows of the model only: those of the draft would be of another prompt, and end at
                # another position, at which no batch of the draft continues
                server.erase(slot)
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
    def saved(self, server: LlamaServer, slot: int, *, whole: bool = False) -> Iterator[tuple[SlotAction, SlotFile]]:
        """A slot's file, parsed; it is deleted whatever happens. With `whole`, its state is left as it is."""
        self.directory.remove_late()
        with self.directory.name() as name:
            try:
                action = server.save(slot, name)
            except (ServerBusyError, ServerUnreachableError):
                # it may write the file when the slot becomes idle
                self.directory.expect_late(name)
                raise
            data = self.directory.read(name, action.n_bytes)
            file = parse_slot_file(data, slot, whole=whole)
            if len(file.tokens) != action.n_tokens and not file.has_media:
                raise CorruptError(f"a slot's file has {len(file.tokens)} tokens, the server says {action.n_tokens}")
            yield action, file
