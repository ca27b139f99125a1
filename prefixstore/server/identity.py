"""The namespace of a llama-server: everything that its states depend on.

It is the one that a ``Llama`` with the same model and settings has (`llama.fingerprint`), so both share their pages.
The settings are those of the server's arguments and environment, since the server does not report them. Its slot files
show whether V is transposed, and the types. Arguments that are not understood become part of the namespace as they were
given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prefixstore.counters import Kind
from prefixstore.errors import (
    ContextError,
    InvalidParameterError,
    ServerRefusedError,
)
from prefixstore.format.namespace import Namespace, parted
from prefixstore.llama.capture import Place
from prefixstore.llama.restore import Restore
from prefixstore.llama.state.form import HIDDEN_ROWS, SHORT_PAGE, Form, Window
from prefixstore.llama.state.shape import PAIR, U32, StateShape
from prefixstore.models.file import file_identity, model_name, read_metadata
from prefixstore.server.arguments import Arguments, config_files, parse_arguments
from prefixstore.server.client import LlamaServer, Props
from prefixstore.server.find_process import running_process, start_ticks
from prefixstore.server.model_settings import FLASH_AUTO, FLASH_OFF, FLASH_ON, Setting, commit_of, model_settings
from prefixstore.server.slot_file import SlotFile, SlotLayout

if TYPE_CHECKING:
    from prefixstore.engine.compute_rate import ComputeRate
    from prefixstore.engine.engine import Engine
    from prefixstore.server.slot_files import SlotDirectory

# where a GPU shows
GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dri/renderD*", "dxg", "accel*")


def kind_of_layout(layout: SlotLayout) -> Kind:
    """The kind of state that is stored of a server with this layout, as for a ``Llama``."""
    if layout.shape is not None and layout.shape.recurrent is None:
        return Kind.PAGES
    return Kind.PAGES_AND_SNAPSHOTS if layout.shape is not None and layout.shape.sections else Kind.SNAPSHOTS


@dataclass(frozen=True)
class Way:
    """One way in which the slots of a server are stored; `place` says where, for the place of a tenant."""

    form: Form
    restore: Restore
    place: Callable[[Place], Place] = lambda place: place


@dataclass(frozen=True)
class ServerIdentity:
    """Everything that determines the namespace of a server, except what its own slot files show.

    `reason` is why nothing may be stored of this server: ``"lora"``, ``"control_vector"``, ``"context_shift"``,
    ``"cache_reuse"``, ``"config_file"``, ``"preset"``, ``"embeddings"``, ``"router"``, ``"no_decoder"`` (the model
    generates no text), ``"arguments"`` (they are not understood); None if something may be.
    """

    # as in the namespace of a Llama, as far as they are known without a slot file
    settings: Mapping[str, Setting]
    props: Props
    # what tokens see in the layers that do not see all; None if the model has none
    window: Window | None = None
    # whether rows outside of the window are kept
    swa_full: bool = False
    reason: str | None = None
    # what the files of the model were
    files: Mapping[str, Sequence[int]] = field(default_factory=dict, kw_only=True, repr=False)
    # the process, and when it was started, in ticks
    process: tuple[int, int] | None = field(default=None, kw_only=True)

    # -- made of ------------------------------------------------------------------------------------------------------

    @classmethod
    def of_command(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str],
        props: Props,
        *,
        directory: str | os.PathLike[str] | None = None,
    ) -> ServerIdentity:
        """The identity of a server that was started with these arguments, its name first, in this environment.

        `directory` is its working directory; None for that of this process.

        Raises
        ------
        ContextError
            If a file of the model cannot be read.
        ServerTooOldError
            If the server does not say which llama.cpp it is.
        """
        arguments = parse_arguments(argv[1:], environ)
        reason = arguments.reason or _reason(arguments, environ)
        if reason is None:
            path = Path(directory or ".") / props.model_path
            try:
                found = model_settings(arguments, props, path)
            except (ValueError, KeyError, ZeroDivisionError):
                reason = "arguments"
            else:
                if found is not None:
                    settings, window, files = found
                    return cls(settings, props, window, arguments.is_on("swa_full"), files=files)
                reason = "no_decoder"
        return cls({"llama_cpp": commit_of(props)}, props, reason=reason)

    @classmethod
    def of_process(cls, url: str, props: Props) -> ServerIdentity:
        """The identity of a server on this machine, whose arguments and environment can be read.

        Raises
        ------
        InvalidParameterError
            If its process is not found, or may not be read; the message says what to pass.
        ContextError
            If a file of the model cannot be read.
        """
        found = running_process(LlamaServer(url).pid)
        if found is None:
            raise InvalidParameterError(
                f"the process of {url} is not found on this machine, or belongs to another user, so its settings are "
                "not known: start it by prefixstore serve STORE -- llama-server, or run this as its user"
            )
        if "serve" in found.argv[1:] and any(Path(argument).name == "prefixstore" for argument in found.argv):
            raise InvalidParameterError(
                f"prefixstore serve listens at {url}, and saves and restores slots itself: there is nothing to do"
            )
        # llama-swap, for example, has models of its own choice behind it
        if "llama-server" not in Path(found.argv[0]).name:
            raise InvalidParameterError(
                f"{Path(found.argv[0]).name} listens at {url}, not llama-server: pass the URL of that, or have it "
                "started by prefixstore shim"
            )
        identity = cls.of_command(found.argv, found.environ, props, directory=found.directory)
        for path in identity.files:
            if Path(path).stat().st_ctime > found.started_at:
                raise ContextError(f"{path} has changed since the server was started: restart the server")
        return replace(identity, process=(found.pid, found.ticks))

    # -- used for -----------------------------------------------------------------------------------------------------

    def page_tokens(self, layout: SlotLayout, wanted: int) -> int:
        """The length of pages, as a ``Llama`` has them."""
        if kind_of_layout(layout) is Kind.PAGES_AND_SNAPSHOTS:
            return min(wanted, SHORT_PAGE)
        window = self._window_of(layout)
        return min(wanted, window.size) if window is not None else wanted

    def _window_of(self, layout: SlotLayout) -> Window | None:
        """The window, if the last section before a recurrent part has one: models name one that they do not have."""
        return self.window if layout.shape is not None and layout.shape.n_before > 1 else None

    def namespace(self, layout: SlotLayout, *, page_tokens: int, salt: str | None) -> Namespace:
        """The namespace of the pages of a tenant, or of a part of one (`salt`). The layout is that of its slot files.

        Raises
        ------
        ServerRefusedError
            If the server's states have other types than its arguments say.
        """
        kind, shape = kind_of_layout(layout), layout.shape
        # parts are separate, and one tenant for quotas and purges
        tenant, part = (None, None) if salt is None else parted(salt)
        settings = {**self.settings, "kind": kind.value, "page_tokens": page_tokens, "salt": tenant}
        if part is not None:
            settings["label"] = part
        flash = settings["flash_attn_type"]
        streams: int | None = 1
        if shape is None:
            # as a Llama has it by default; and what the server has of each slot is written as it is
            flash, streams = FLASH_OFF if flash == FLASH_AUTO else flash, self.props.n_slots
        elif kind is Kind.SNAPSHOTS:
            # without attention they have no effect
            flash, streams = FLASH_OFF, None
        else:
            self._check_types(shape)
            flash = _resolved(shape) if flash == FLASH_AUTO else flash
        return Namespace({**settings, "flash_attn_type": flash, "streams": streams})

    def ways(self, file: SlotFile, engine: Engine, rate: ComputeRate, to: SlotDirectory) -> tuple[Way, ...]:
        """How slots of a server are found, by a file of one; they are written in the last way."""
        layout = file.layout
        assert layout is not None, "it is of a slot that holds something"
        shape = layout.shape
        if file.view is None or shape is None:
            return (Way(Form(), Restore(engine, Form(), rate, to)),)
        window = self._window_of(layout)
        if shape.recurrent is not None:
            form = Form.ends(file.view, window)
            return (Way(form, Restore(engine, form, rate, to, hides=True)),)
        rows = Form.rows(shape)
        if window is None or self.swa_full:
            # with --swa-full, the server would step back to where rows of the window are missing: all or none
            return (Way(rows, Restore(engine, rows, rate, to)),)
        # pages of a Llama have all rows of the window; what the server computes has only those that are still seen
        ends = Form.ends(file.view, window)
        seen = Restore(engine, rows, rate, to, seen=window.size + HIDDEN_ROWS)
        return (Way(rows, seen), Way(ends, Restore(engine, ends, rate, to, hides=True), Place.of_ends))

    def model_name(self) -> str | None:
        """The name of the model, for people; None if its file is not known, or cannot be read."""
        try:
            return model_name(read_metadata(next(iter(self.files)))) if self.files else None
        except ContextError:
            return None

    def check(self, server: LlamaServer) -> None:
        """Raise `ServerRefusedError` if another server answers there by now, or its model was replaced."""
        is_same = False
        with suppress(OSError):  # a file that is gone
            if self.process is not None:
                is_same = start_ticks(self.process[0]) == self.process[1]
            else:
                is_same = all(file_identity(Path(path).stat()) == found for path, found in self.files.items())
        if not is_same:
            raise ServerRefusedError(f"{server.url} was restarted, or its model replaced: open the store again")

    def _check_types(self, shape: StateShape) -> None:
        section = shape.sections[0]
        _, n_layers = PAIR.unpack(section.head)
        types = [U32.unpack_from(head)[0] for head, _, _ in section.tensors]
        for name, found in (("type_k", {*types[:n_layers]}), ("type_v", {*types[n_layers:]})):
            if found and found != {self.settings[name]}:
                raise ServerRefusedError(
                    f"the states of the server have the ggml types {sorted(found)} as {name}, and its arguments say "
                    f"{self.settings[name]}: nothing is stored"
                )


def _reason(arguments: Arguments, environ: Mapping[str, str]) -> str | None:
    """Why nothing may be stored with these arguments."""
    settings = arguments.settings
    if arguments.is_on("context_shift"):
        return "context_shift"
    if settings.get("cache_reuse", "0") != "0":
        return "cache_reuse"
    return "config_file" if config_files(environ) else None


def _resolved(shape: StateShape) -> int:
    """What flash attention ``auto`` has become, by the layout of V.

    llama.cpp lays out V before it finds out whether a device has flash attention: V that is not transposed says that
    it is on only where no other device than the processor is there.
    """
    if any(U32.unpack_from(section.head)[0] for section in shape.sections):
        return FLASH_OFF
    return FLASH_AUTO if _may_have_gpu() else FLASH_ON


def _may_have_gpu() -> bool:
    return sys.platform != "linux" or any(True for pattern in GPU_DEVICES for _ in Path("/dev").glob(pattern))
