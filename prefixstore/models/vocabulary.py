"""Tokens as text, with the vocabulary in a GGUF file. Does not need llama.cpp."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from prefixstore.errors import ContextError
from prefixstore.models.file import read_gguf

# the text of some tokens
Words: TypeAlias = "Callable[[Sequence[int]], str]"

MODEL, TOKENS, TYPES = (f"tokenizer.ggml.{name}" for name in ("model", "tokens", "token_type"))
NORMAL, CONTROL, BYTE = 1, 3, 6
# how a byte is written in the vocabularies of SentencePiece, and in those of RWKV
HEXADECIMAL = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\([tnr\\'\"])")
CONTROLS = {"t": b"\t", "n": b"\n", "r": b"\r"}
# byte-level vocabularies write a byte as the character of this number if that can be seen, and as one above otherwise
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTES = {chr(byte): byte for byte in VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(HIDDEN)}


class Vocabulary:
    """The vocabulary in a GGUF file. Raises `ContextError` if that cannot be read, or has none.

    Attributes
    ----------
    ends
        The tokens that end a text, a turn or a message.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        metadata, _ = read_gguf(path, (TOKENS, TYPES))
        self._tokens: list[str] = metadata.get(TOKENS, [])
        self._types: list[int] = metadata.get(TYPES, [])
        self._bytes_of = WRITTEN.get(metadata.get(MODEL, ""), _of_sentencepiece)
        self.ends = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
        if not self._tokens:
            raise ContextError(f"{path} has no vocabulary")

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones by name; bytes that are not valid UTF-8, and unknown tokens, are replaced."""
        return b"".join(map(self._piece, tokens)).decode("utf-8", "replace")

    def written(self, token: int) -> str:
        """A token as the file has it; empty for one that it does not have."""
        return self._tokens[token] if 0 <= token < len(self._tokens) else ""

    def is_control(self, token: int) -> bool:
        """Whether a token is not text."""
        return self._kind(token) == CONTROL

    def _kind(self, token: int) -> int:
        return self._types[token] if 0 <= token < len(self._types) else NORMAL

    def _piece(self, token: int) -> bytes:
        if not 0 <= token < len(self._tokens):
            return "�".encode()
        written = self.written(token)
        return self._bytes_of(written) if self._kind(token) in (NORMAL, BYTE) else written.encode()


def _of_sentencepiece(written: str) -> bytes:
    byte = HEXADECIMAL.fullmatch(written)
    return bytes.fromhex(byte.group(1)) if byte else written.replace("▁", " ").encode()


def _of_bytes(written: str) -> bytes:
    return bytes(BYTES[character] for character in written if character in BYTES)


def _of_rwkv(written: str) -> bytes:
    found, at = b"", 0
    for match in ESCAPED.finditer(written):
        byte, name = match.groups()
        found += written[at : match.start()].encode()
        found += bytes.fromhex(byte) if byte else CONTROLS.get(name, name.encode())
        at = match.end()
    return found + written[at:].encode()


WRITTEN: dict[str, Callable[[str], bytes]] = {"gpt2": _of_bytes, "rwkv": _of_rwkv}
