"""Prompts from files and lines to tokens, and their trie; an unusable prompt becomes a `Problem` with its origin."""

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
from prefixstore.format.keys import TOKEN_BYTES, Tokens, TokenSequence, as_tokens, common_prefix

if TYPE_CHECKING:
    from llama_cpp import Llama

LINES = (".jsonl", ".ndjson")
KINDS = ("prompt", "messages", "tokens")
CHAT_OPTIONS = ("tools", "tool_choice", "functions", "function_call")
# a line may set this itself, which overrides the option of the job
GENERATION_PROMPT = "generation_prompt"


@dataclass(frozen=True)
class Prompt:
    """A prompt, and where it comes from: ``"prompts.jsonl:17"``.

    It is text, token ids, or a mapping with one of ``"prompt"``, ``"messages"`` and ``"tokens"``.
    """

    where: str
    content: str | TokenSequence | Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """A prompt or file that cannot be used: its origin, and the reason; if it is too long, also its length."""

    where: str
    reason: str
    tokens: int | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


PromptLike: TypeAlias = str | TokenSequence | Mapping[str, Any] | Path | Prompt | Problem
"""Text, token ids, a mapping as in a line of JSONL, the path of a file or folder, or a result of `read_prompts`."""


# -- files ------------------------------------------------------------------------------------------------------------


def read_prompts(sources: Iterable[str | Path]) -> Iterator[Prompt | Problem]:
    """Read the prompts in files, lazily, one line or file at a time.

    Files are JSONL if they are named ``.jsonl`` or ``.ndjson``; any other file is one prompt of text. Sources may also
    be folders (all files in them that are not hidden), patterns such as ``"docs/**/*.md"``, and ``"-"``: JSONL from
    standard input.
    """
    for source in sources:
        if source == "-":
            yield from _lines(sys.stdin.buffer, "<stdin>")
            continue
        try:
            files, is_folder = list(_files(str(source))), Path(source).is_dir()
        except OSError as error:
            yield Problem(str(source), f"cannot be read: {error.strerror or error}")
            continue
        if not files:
            reason = "the folder has no files" if is_folder else "file not found, and no file matches this pattern"
            yield Problem(str(source), reason)
        for file in files:
            yield from _file(file)


def _files(source: str) -> Iterator[Path]:
    path = Path(source)
    if path.is_dir():
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
        yield from (file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts))
    elif path.exists():
        yield path
    else:
        matching = map(Path, sorted(glob.glob(source, recursive=True)))  # noqa: PTH207 - the pattern may be absolute
        yield from (file for file in matching if not file.is_dir())


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
        yield Problem(f"{path}:{line}", "not valid UTF-8")


def _lines(file: BinaryIO, name: str) -> Iterator[Prompt | Problem]:
    for number, line in enumerate(file, 1):
        if line.strip():
            where = f"{name}:{number}"
            try:
                content = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                yield Problem(where, f"not valid JSON: {error}")
                continue
            if isinstance(content, dict):
                yield Prompt(where, content)
            else:
                yield Problem(where, 'not a JSON object; write {"prompt": …}, {"messages": …} or {"tokens": …}')


# -- tokens -----------------------------------------------------------------------------------------------------------


def tokenized(
    llm: Llama,
    prompts: Iterable[PromptLike],
    problems: list[Problem],
    *,
    generation_prompt: bool = False,
    trained: int | None = None,
) -> Iterator[tuple[Tokens, str]]:
    """The tokens and the origin of each prompt; prompts that cannot be used are added to `problems`.

    The most that a prompt may need is the context of `llm`, or, where another one will be created, `trained`: the
    length that the model was trained with. Raises `InvalidParameterError` if `prompts` is a single prompt.
    """
    if isinstance(prompts, (str, Mapping)):
        raise InvalidParameterError("prompts must be a list or another iterable of prompts, not a single prompt")
    for prompt in _flat(prompts):
        if isinstance(prompt, Problem):
            problems.append(prompt)
            continue
        try:
            tokens = tokens_of_prompt(llm, prompt.content, generation_prompt=generation_prompt)
        except InvalidParameterError as error:
            problems.append(Problem(prompt.where, str(error)))
            continue
        reason = _too_long(llm, len(tokens), trained)
        if reason is None:
            yield tokens, prompt.where
        else:
            problems.append(Problem(prompt.where, reason, len(tokens)))


def _too_long(llm: Llama, n_tokens: int, trained: int | None) -> str | None:
    """Why a prompt does not fit; None if it does. One position is needed for the answer."""
    if trained is not None:
        if n_tokens < trained:
            return None
        return (
            f"{n_tokens:,} tokens do not fit the context of {trained:,} tokens that the model was trained with; "
            "shorten the prompt, or set n_ctx to use a longer context"
        )
    from prefixstore.llama.binding import n_places  # noqa: PLC0415 - the extra "llama"

    n_ctx = n_places(llm)
    if n_tokens < n_ctx:
        return None
    return (
        f"{n_tokens:,} tokens do not fit the context (n_ctx={n_ctx}), which must hold the prompt and one token more; "
        "set a larger n_ctx"
    )


def _flat(prompts: Iterable[PromptLike]) -> Iterator[Prompt | Problem]:
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, Path):
            yield from read_prompts([prompt])
        elif isinstance(prompt, (Prompt, Problem)):
            yield prompt
        else:
            yield Prompt(f"prompt {number}", prompt)


def tokens_of_prompt(
    llm: Llama,
    content: str | TokenSequence | Mapping[str, Any],
    *,
    generation_prompt: bool = False,
) -> Tokens:
    """The tokens that a completion of this prompt evaluates.

    For `generation_prompt` see `prefixstore.warming.tokens.chat_tokens`. Raises `InvalidParameterError` if the content
    is not a prompt, or has no tokens.
    """
    kind, value, options = _parsed(content)
    if kind == "tokens":
        tokens = _checked(llm, value)
    else:
        from prefixstore.warming.tokens import chat_tokens, text_tokens  # noqa: PLC0415 - the extra "llama"

        if kind == "prompt":
            tokens = text_tokens(llm, value) if value else as_tokens([])
        else:
            wanted = bool(options.pop(GENERATION_PROMPT, generation_prompt))
            tokens = chat_tokens(llm, value, options, generation_prompt=wanted)
    if not len(tokens):
        raise InvalidParameterError("the prompt has no tokens")
    return tokens


def _parsed(content: str | TokenSequence | Mapping[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    if isinstance(content, str):
        return "prompt", content, {}
    if not isinstance(content, Mapping):
        return "tokens", content, {}
    found = [kind for kind in KINDS if content.get(kind) is not None]
    if len(found) != 1:
        has = " and ".join(found) or "none of them"
        raise InvalidParameterError(f'a prompt has one of "prompt", "messages" and "tokens"; this one has {has}')
    value = content[found[0]]
    if found[0] == "prompt" and not isinstance(value, str):
        raise InvalidParameterError('"prompt" is not a string')
    if found[0] == "messages" and not _is_conversation(value):
        raise InvalidParameterError('"messages" is not a list of objects with a "role"')
    wanted = (*CHAT_OPTIONS, GENERATION_PROMPT)
    return found[0], value, {name: content[name] for name in wanted if content.get(name) is not None}


def _is_conversation(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value)


def _checked(llm: Llama, value: TokenSequence) -> Tokens:
    tokens = as_tokens(value)
    if len(tokens) and not 0 <= int(np.min(tokens)) <= int(np.max(tokens)) < llm.n_vocab():
        raise InvalidParameterError(
            f"a token is outside the vocabulary of the model, which has {llm.n_vocab():,} tokens"
        )
    return tokens


# -- the trie ---------------------------------------------------------------------------------------------------------


class PromptTrie:
    """The trie of prompts: token arrays and their origins. Each is kept once, four bytes a token.

    They are sorted by their tokens. A walk through them is then a depth-first walk through the trie: all that a prompt
    shares with any earlier prompt, it shares with the one just before it.

    `prompts` and `prompt_tokens` count duplicates too, and `short` those of fewer than `min_tokens`, which cannot be
    stored. `shared` says of each prompt how many tokens it shares with the one before it.
    """

    def __init__(self, prompts: Iterable[tuple[Tokens, str]], min_tokens: int) -> None:
        self.prompts = self.prompt_tokens = self.short = 0
        kept: dict[bytes, str] = {}
        for tokens, where in prompts:
            self.prompts += 1
            self.prompt_tokens += len(tokens)
            if len(tokens) < min_tokens:
                self.short += 1
            else:
                # big-endian bytes sort in the order of the tokens
                kept.setdefault(tokens.astype(">i4").tobytes(), where)
        self._keys = sorted(kept)
        self._where = [kept[key] for key in self._keys]
        self.shared = [0] * len(self._keys)
        for i in range(1, len(self._keys)):
            self.shared[i] = common_prefix(self._raw(i - 1), self._raw(i))

    def __len__(self) -> int:
        return len(self._keys)

    def _raw(self, i: int) -> Tokens:
        return np.frombuffer(self._keys[i], ">i4")

    def tokens(self, i: int) -> Tokens:
        """The tokens of prompt `i`."""
        return self._raw(i).astype("<i4")

    def length(self, i: int) -> int:
        """The number of tokens of prompt `i`."""
        return len(self._keys[i]) // TOKEN_BYTES

    def where(self, i: int) -> str:
        """Where prompt `i` comes from."""
        return self._where[i]

    @property
    def unique_tokens(self) -> int:
        """The number of nodes of the trie: what a job evaluates if nothing is stored yet."""
        return sum(self.length(i) - self.shared[i] for i in range(len(self)))

    def stops(self, i: int, start: int) -> tuple[int, ...]:
        """Positions of prompt `i` after `start`, ascending, at which other prompts branch off.

        A job that cannot cut its context must take a snapshot at each of them.
        """
        found: set[int] = set()
        # a prefix shared with a prompt is shared with all prompts between
        for others in (range(i + 1, len(self)), range(i, 0, -1)):
            common = self.length(i)
            for j in others:
                common = min(common, self.shared[j])
                if common <= start:
                    break
                found.add(common)
        return tuple(sorted(found - {self.length(i)}))
