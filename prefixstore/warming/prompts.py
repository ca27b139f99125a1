"""What is to be warmed, from files and lines to tokens; what cannot be used is a problem, with its place."""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np

from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import Tokens, TokenSequence, as_tokens

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["Problem", "Prompt", "PromptLike", "encode", "read", "tokenized"]

LINES = (".jsonl", ".ndjson")
KINDS = ("prompt", "messages", "tokens")
CHAT_OPTIONS = ("tools", "tool_choice", "functions", "function_call")
# what a line may say for itself, in the place of the option of the whole job
GENERATION_PROMPT = "generation_prompt"


@dataclass(frozen=True)
class Prompt:
    """Something to be warmed, and where it comes from.

    Attributes
    ----------
    where
        For people: ``"prompts.jsonl:17"``.
    content
        Text, token ids, or a mapping with one of ``"prompt"``, ``"messages"`` and ``"tokens"``.
    """

    where: str
    content: str | TokenSequence | Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """Something that cannot be warmed: where it stands, and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


PromptLike: TypeAlias = str | TokenSequence | Mapping[str, Any] | Path | Prompt | Problem
"""Text, token ids, a mapping as in a line of JSONL, the path of a file or folder, or what `read` returns."""


# -- files ------------------------------------------------------------------------------------------------------------


def read(sources: Iterable[str | Path], stdin: BinaryIO | None = None) -> Iterator[Prompt | Problem]:
    """The prompts in files, one after the other; nothing is read before its turn.

    Parameters
    ----------
    sources
        Files: JSONL if they are called so (``.jsonl``, ``.ndjson``), otherwise text, each one prompt. Folders: all
        files below that are not hidden. Patterns such as ``"docs/**/*.md"``. ``"-"``: JSONL from `stdin`.
    stdin
        Standard input, by default.
    """
    for source in sources:
        if source == "-":
            yield from _lines(stdin or sys.stdin.buffer, "<stdin>")
            continue
        files = list(_files(str(source)))
        if not files:
            yield Problem(str(source), "there is no such file, and nothing that matches")
        for file in files:
            yield from _file(file)


def _files(source: str) -> Iterator[Path]:
    path = Path(source)
    found = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(source, recursive=True))]  # noqa: PTH207 - the pattern may be absolute
    for entry in found:
        if not entry.is_dir():
            yield entry
        elif entry == path or not _is_pattern(source):
            inside = (file for file in sorted(entry.rglob("*")) if file.is_file())
            yield from (file for file in inside if not _is_hidden(file.relative_to(entry)))


def _is_pattern(source: str) -> bool:
    return any(sign in source for sign in "*?[")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file(path: Path) -> Iterator[Prompt | Problem]:
    try:
        if path.suffix.lower() in LINES:
            with path.open("rb") as file:
                yield from _lines(file, str(path))
        else:
            yield Prompt(str(path), path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        yield Problem(str(path), f"cannot be read: {error.strerror or error}")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        yield Problem(f"{path}:{line}", "is no UTF-8 text")


def _lines(file: BinaryIO, name: str) -> Iterator[Prompt | Problem]:
    for number, line in enumerate(file, 1):
        if line.strip():
            where = f"{name}:{number}"
            try:
                content = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                yield Problem(where, f"is no JSON: {error}")
                continue
            if isinstance(content, dict):
                yield Prompt(where, content)
            else:
                yield Problem(where, 'is no object; write {"prompt": …}, {"messages": …} or {"tokens": …}')


# -- tokens -----------------------------------------------------------------------------------------------------------


def tokenized(
    llm: Llama, prompts: Iterable[PromptLike], problems: list[Problem], *, generation_prompt: bool = False
) -> Iterator[tuple[Tokens, str]]:
    """The tokens of each prompt and where it comes from; what cannot be used is added to `problems`.

    Raises
    ------
    InvalidParameterError
        If `prompts` is one prompt and not several.
    """
    if isinstance(prompts, (str, Mapping)):
        raise InvalidParameterError("prompts must be a list or another iterable of prompts, not one prompt")
    for prompt in _flat(prompts):
        if isinstance(prompt, Problem):
            problems.append(prompt)
            continue
        try:
            yield encode(llm, prompt.content, generation_prompt=generation_prompt), prompt.where
        except InvalidParameterError as error:
            problems.append(Problem(prompt.where, str(error)))


def _flat(prompts: Iterable[PromptLike]) -> Iterator[Prompt | Problem]:
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, Path):
            yield from read([prompt])
        elif isinstance(prompt, (Prompt, Problem)):
            yield prompt
        else:
            yield Prompt(f"prompt {number}", prompt)


def encode(llm: Llama, content: str | TokenSequence | Mapping[str, Any], *, generation_prompt: bool = False) -> Tokens:
    """The tokens that a completion of this prompt evaluates.

    Parameters
    ----------
    llm
        The model, with its tokenizer and chat format.
    content
        As in `Prompt`.
    generation_prompt
        Of messages: see `prefixstore.llama.prompt.chat_tokens`.

    Raises
    ------
    InvalidParameterError
        If it is no prompt, there are no tokens in it, or too many for the context.
    """
    kind, value, options = _parsed(content)
    if kind == "tokens":
        tokens = _checked(llm, value)
    else:
        from prefixstore.llama.prompt import chat_tokens, text_tokens  # noqa: PLC0415 - the extra "llama"

        if kind == "prompt":
            tokens = text_tokens(llm, value) if value else as_tokens([])
        else:
            wanted = bool(options.pop(GENERATION_PROMPT, generation_prompt))
            tokens = chat_tokens(llm, value, options, generation_prompt=wanted)
    if not len(tokens):
        raise InvalidParameterError("there are no tokens in it")
    if len(tokens) >= llm.n_ctx():
        raise InvalidParameterError(
            f"{len(tokens):,} tokens do not fit the context: n_ctx={llm.n_ctx()}, and one is left to answer"
        )
    return tokens


def _parsed(content: str | TokenSequence | Mapping[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    if isinstance(content, str):
        return "prompt", content, {}
    if not isinstance(content, Mapping):
        return "tokens", content, {}
    found = [kind for kind in KINDS if content.get(kind) is not None]
    if len(found) != 1:
        has = " and ".join(found) or "neither"
        raise InvalidParameterError(f'a prompt has one of "prompt", "messages" and "tokens"; this has {has}')
    value = content[found[0]]
    if found[0] == "prompt" and not isinstance(value, str):
        raise InvalidParameterError('"prompt" is no text')
    if found[0] == "messages" and not _is_conversation(value):
        raise InvalidParameterError('"messages" is no list of objects with a "role"')
    wanted = (*CHAT_OPTIONS, GENERATION_PROMPT)
    return found[0], value, {name: content[name] for name in wanted if content.get(name) is not None}


def _is_conversation(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value)


def _checked(llm: Llama, value: TokenSequence) -> Tokens:
    tokens = as_tokens(value)
    if len(tokens) and not 0 <= int(np.min(tokens)) <= int(np.max(tokens)) < llm.n_vocab():
        raise InvalidParameterError(f"a token is not one of the {llm.n_vocab():,} that the model has")
    return tokens
