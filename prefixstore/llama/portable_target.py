"""Where the states of a ``Llama`` are stored when the store is not attached to it, and what the ``Llama`` accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import llama_cpp

from prefixstore.format.namespace import Namespace
from prefixstore.llama.fingerprint import namespace_of
from prefixstore.llama.memory import Memory, kind_of, page_tokens_for

__all__ = ["Place", "nameless_place", "place_of"]


@dataclass(frozen=True)
class Place:
    """Where states are stored, and what the one who asks for them accepts.

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
        Length of the context; None if it is not known.
    n_vocab
        Words of the vocabulary if the logits of all tokens are kept (``logits_all``), else 0.
    window
        Length of a sliding window; 0 if there is none.
    forgets
        Whether the context has room for the rows in its window only (``swa_full=False``).
    memory
        The context; None if it is not known.
    """

    pages: Namespace | None
    whole: Namespace
    page_tokens: int
    is_attention: bool = True
    architecture: bytes | None = None
    n_ctx: int | None = None
    n_vocab: int = 0
    window: int = 0
    forgets: bool = False
    memory: Memory | None = None

    def window_from(self, n: int) -> int:
        """The first position whose rows in a window are needed to go on from position `n`."""
        return max(n - self.window, 0) if self.window else 0


def place_of(llm: llama_cpp.Llama, *, page_tokens: int, salt: str | None, label: str | None) -> Place:
    """The place of a ``Llama``.

    Raises
    ------
    ContextError
        If a file of the model cannot be read.
    """
    page_tokens = page_tokens_for(llm, page_tokens)
    pages = namespace_of(llm, page_tokens=page_tokens, salt=salt, label=label)
    memory = Memory(llm)
    n_vocab = llm.n_vocab() if llm._logits_all else 0
    is_attention = kind_of(llm) == "pages"
    return Place(
        # pages have no scores, and a window whose rows are overwritten does not hold all of its pages any more
        pages if is_attention and not memory.forgets and not n_vocab else None,
        _whole({**pages.settings, "scores": bool(n_vocab)}),
        page_tokens,
        is_attention,
        llm.metadata.get("general.architecture", "").encode(),
        llm.n_ctx(),
        n_vocab,
        memory.window,
        memory.forgets,
        memory,
    )


def nameless_place(*, page_tokens: int, salt: str | None, label: str | None) -> Place:
    """The place for a caller whose ``Llama`` is not known: the label stands for the model and its settings."""
    settings = {
        "label": label,
        "salt": salt,
        # llama.cpp promises nothing about states across its versions
        "llama_cpp_python": llama_cpp.__version__,
        "state_version": llama_cpp.LLAMA_STATE_SEQ_VERSION,
    }
    return Place(None, _whole(settings), page_tokens)


def _whole(settings: Mapping[str, str | int | float | bool | None]) -> Namespace:
    return Namespace({**settings, "form": "whole"})
