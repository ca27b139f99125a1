"""The bytes of a state that is stored whole: the facts of a ``LlamaState``, its state, and its scores.

::

    magic "pfxw" ‖ u16 version ‖ u16 0 ‖ u32 tokens ‖ u32 n_ctx ‖ u32 n_vocab ‖ u64 bytes of the state ‖ state ‖ scores

The scores are one f32 for each token and each word of the vocabulary; with `n_vocab` 0 there are none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixstore.errors import CorruptError, IncompatibleError

__all__ = ["HEADER", "MAGIC", "WholeState"]

HEADER = struct.Struct("<4sHHIIIQ")
MAGIC = b"pfxw"
VERSION = 1


@dataclass(frozen=True)
class WholeState:
    """A state, and what ``LlamaState`` says about it.

    Attributes
    ----------
    n_tokens
        Tokens that it covers.
    n_ctx
        Length of the context it was saved from.
    state
        As ``llama_state_get_data`` wrote it.
    scores
        The logits after each token, shape ``(n_tokens, n_vocab)``; None if they were not computed.
    """

    n_tokens: int
    n_ctx: int
    state: memoryview
    scores: npt.NDArray[np.single] | None

    @property
    def size(self) -> int:
        """The length of the stored form in bytes."""
        return HEADER.size + len(self.state) + (self.scores.nbytes if self.scores is not None else 0)

    def write(self, target: memoryview) -> None:
        """Write the stored form into a buffer of exactly its size."""
        n_vocab = self.scores.shape[1] if self.scores is not None else 0
        HEADER.pack_into(target, 0, MAGIC, VERSION, 0, self.n_tokens, self.n_ctx, n_vocab, len(self.state))
        end = HEADER.size + len(self.state)
        target[HEADER.size : end] = self.state
        if self.scores is not None:
            target[end:] = np.ascontiguousarray(self.scores, "<f4").reshape(-1).view(np.uint8).data

    @classmethod
    def read(cls, stored: memoryview) -> WholeState:
        """Read the stored form; the state and its scores are views of it.

        Raises
        ------
        CorruptError
            If these bytes are not a whole state, or its lengths do not add up.
        IncompatibleError
            If a newer version wrote it.
        """
        if len(stored) < HEADER.size:
            raise CorruptError(f"{len(stored)} bytes are too few for a whole state")
        magic, version, _, n_tokens, n_ctx, n_vocab, size = HEADER.unpack_from(stored)
        if magic != MAGIC:
            raise CorruptError("these bytes are not a whole state")
        if version > VERSION:
            raise IncompatibleError(
                f"a whole state has version {version}, and this prefixstore reads up to {VERSION}; upgrade it"
            )
        expected = HEADER.size + size + 4 * n_tokens * n_vocab
        if len(stored) != expected:
            raise CorruptError(f"a whole state has {len(stored)} bytes, and its header says {expected}")
        end = HEADER.size + size
        scores = np.frombuffer(stored[end:], "<f4").reshape(n_tokens, n_vocab) if n_vocab else None
        return cls(n_tokens, n_ctx, stored[HEADER.size : end], scores)
