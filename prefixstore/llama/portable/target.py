"""Where a store that is not attached keeps the states of a ``Llama``, and which states the ``Llama`` accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import llama_cpp

from prefixstore.format.namespace import Namespace
from prefixstore.llama.fingerprint import llama_cpp_build, namespace_of
from prefixstore.llama.kv_memory import ContextMemory, kind_of, page_tokens_for
from prefixstore.llama.paged_memory import PagedMemory
from prefixstore.llama.snapshot_memory import SnapshotMemory
from prefixstore.parameters import Parameters
from prefixstore.stats import Kind

__all__ = ["PortableTarget", "nameless_target", "target_for"]


@dataclass(frozen=True)
class PortableTarget:
    """Where states are stored, and which states the caller accepts.

    Attributes
    ----------
    pages
        Namespace of pages, the same as that of a store attached to the ``Llama``; None if no pages are used.
    whole
        Namespace of whole states.
    page_tokens
        Length of a page.
    is_attention
        Whether a state may be cut; if not, a prompt has to begin with all of it.
    architecture
        What a state begins with; None if it is not known.
    n_ctx
        How many tokens a context has places for; None if it is not known.
    n_vocab
        Words of the vocabulary if the logits of all tokens are kept (``logits_all``), else 0.
    memory
        The memory of the context; None if it is not known.
    """

    pages: Namespace | None
    whole: Namespace
    page_tokens: int
    is_attention: bool = True
    architecture: bytes | None = None
    n_ctx: int | None = None
    n_vocab: int = 0
    memory: ContextMemory | None = None

    @property
    def namespace(self) -> Namespace:
        """The first place where a prompt is looked up."""
        return self.pages or self.whole

    @cached_property
    def key(self) -> bytes:
        """Of `namespace`, for which lookups are counted."""
        return self.namespace.key

    @property
    def overwrites_window(self) -> bool:
        """Whether the context has space only for the rows in its sliding window (``swa_full=False``)."""
        return self.memory is not None and self.memory.overwrites_window

    def window_from(self, n: int) -> int:
        """The first position whose rows in a sliding window are needed to continue from position `n`."""
        window = self.memory.window if self.memory is not None else 0
        return max(n - window, 0) if window else 0


def target_for(llm: llama_cpp.Llama, parameters: Parameters) -> PortableTarget:
    """The target for a ``Llama``.

    Raises
    ------
    ContextError
        If a file of the model cannot be read, or is not the one that was loaded.
    """
    kind = kind_of(llm)
    page_tokens = page_tokens_for(llm, parameters.page_tokens)
    pages = namespace_of(llm, page_tokens=page_tokens, salt=parameters.salt, label=parameters.label)
    memory = SnapshotMemory(llm) if kind.has_snapshots else PagedMemory(llm)
    n_vocab = llm.n_vocab() if llm._logits_all else 0
    is_attention = kind is Kind.PAGES
    return PortableTarget(
        # pages have no scores, and a window whose rows are overwritten no longer holds all of its pages
        pages if is_attention and not memory.overwrites_window and not n_vocab else None,
        _whole({**pages.settings, "scores": bool(n_vocab)}),
        page_tokens,
        is_attention,
        llm.metadata.get("general.architecture", "").encode(),
        # a Llama has this many places; its context has more, where that is not a multiple of 256
        len(llm.input_ids),
        n_vocab,
        memory,
    )


def nameless_target(parameters: Parameters) -> PortableTarget:
    """The target of a caller whose ``Llama`` is not known: the label identifies the model and its settings."""
    settings = {
        "label": parameters.label,
        "salt": parameters.salt,
        # llama.cpp promises nothing about states across its versions
        "llama_cpp": llama_cpp_build(),
        "state_version": llama_cpp.LLAMA_STATE_SEQ_VERSION,
    }
    return PortableTarget(None, _whole(settings), parameters.page_tokens)


def _whole(settings: Mapping[str, str | int | float | bool | None]) -> Namespace:
    return Namespace({**settings, "form": "whole"})
