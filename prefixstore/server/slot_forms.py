"""How the slots of a server are stored, and what was done with one: what goes into pages, what into snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prefixstore.engine.compute_rate import ComputeRate
from prefixstore.engine.engine import Engine
from prefixstore.format.keys import Tokens
from prefixstore.llama.capture import Place
from prefixstore.llama.restore import Restore
from prefixstore.llama.state.form import HIDDEN_ROWS, Form
from prefixstore.server.namespace import ServerIdentity, has_window
from prefixstore.server.slot_file import SlotFile, SlotLayout
from prefixstore.server.slot_files import SlotDirectory

__all__ = ["Restored", "SlotCopy", "Stored", "Way", "ways_of"]


@dataclass(frozen=True)
class Way:
    """One way in which the slots of a server are stored; `place` says where, for the place of a tenant."""

    form: Form
    restore: Restore
    place: Callable[[Place], Place] = lambda place: place


def ways_of(
    file: SlotFile, layout: SlotLayout, identity: ServerIdentity, engine: Engine, rate: ComputeRate, to: SlotDirectory
) -> tuple[Way, ...]:
    """How slots of a server are found, by a file of one; they are written in the last way.

    None at all, if the length of the sliding window is not known.
    """
    shape = layout.shape
    if file.view is None or shape is None:
        return (Way(Form(), Restore(engine, Form(), rate, to)),)
    window = identity.window if has_window(layout, identity.window) else None
    if shape.recurrent is not None:
        form = Form.ends(file.view, window)
        return (Way(form, Restore(engine, form, rate, to, hides=True)),)
    rows = Form.rows(shape)
    if window is None or identity.swa_full:
        # with --swa-full, the server would step back to where rows of the window are missing: all or none
        is_unknown = identity.is_named and len(shape.sections) > 1
        return () if is_unknown else (Way(rows, Restore(engine, rows, rate, to)),)
    # pages of a Llama have all rows of the window; what the server computes has only those that are still seen
    ends = Form.ends(file.view, window)
    seen = Restore(engine, rows, rate, to, seen=window.size + HIDDEN_ROWS)
    return (Way(rows, seen), Way(ends, Restore(engine, ends, rate, to, hides=True), Place.of_ends))


@dataclass(frozen=True)
class Restored:
    """What was restored into a slot.

    Attributes
    ----------
    n_tokens
        What it holds now; 0 if nothing could be used, and it was left alone.
    n_bytes
        Bytes of its file.
    seconds
        How long it took, everything included.
    saved_seconds
        By how much that was faster than computing the tokens, by the rate at which they were computed; below zero if
        it was slower, or if the rate is not known.
    reason
        Why nothing could be used: see `miss_reason`; ``"unreadable"``, or why nothing is ever stored.
    """

    n_tokens: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    saved_seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class Stored:
    """What was stored of a slot.

    Attributes
    ----------
    tokens
        What the slot holds.
    n_new_pages
        Pages that were not stored before.
    n_bytes
        Bytes of their states.
    seconds
        How long it took, everything included. The pages are written after that.
    reason
        Why nothing was stored, or not all, if so: ``"empty"``, ``"short"``, ``"other_tokens"`` (than expected),
        ``"media"`` (images or sound), ``"incomplete"`` (the server has not written all rows, as with ``--swa-full``),
        ``"queue_full"`` (the location takes nothing), ``"read_only"`` (the store), or why nothing is ever stored.
    """

    tokens: Tokens
    n_new_pages: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class SlotCopy:
    """What a slot held when it was copied: its tokens, up to the first image, and the bytes of its file.

    `store` stores what the store lacks of it, as `SlotStore.save`.
    """

    tokens: Tokens
    n_bytes: int
    has_media: bool
    store: Callable[[], Stored]
