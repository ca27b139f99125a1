"""Tokens as text and text as tokens, and the logits of a token: what looking into a store needs of a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from prefixstore.errors import ContextError

__all__ = ["Vocabulary", "logits_after"]


class Vocabulary:
    """The tokens of a model; its tensors are not loaded.

    Parameters
    ----------
    path
        A GGUF file.

    Raises
    ------
    ContextError
        If it cannot be loaded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._llm = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        except (ValueError, RuntimeError) as error:
            raise ContextError(f"llama.cpp does not load {path}: {error}") from error

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones by name; bytes that are no UTF-8 are replaced."""
        return self._llm.detokenize(list(tokens), special=True).decode("utf-8", "replace")

    def tokens(self, text: str) -> list[int]:
        """The tokens of a prompt, as a completion would make them of it."""
        return self._llm.tokenize(text.encode(), add_bos=True, special=True)


def logits_after(llm: llama_cpp.Llama, tokens: Sequence[int]) -> npt.NDArray[np.single]:
    """Evaluate tokens behind what is live; the logits after the last one, shape ``(n_vocab,)``."""
    llm.eval(tokens)
    found: Any = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),))
    copied: npt.NDArray[np.single] = found.copy()
    return copied
