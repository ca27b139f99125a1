"""Commands that say what is wrong: ``doctor`` around a store, ``explain`` with a prompt."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefixstore.cli.command import Result
from prefixstore.cli.model import configured, open_model, silence_llama
from prefixstore.cli.named_files import STANDARD, chat_in, text_in
from prefixstore.cli.options import server_key
from prefixstore.cli.output import DONE, FAILED, say, table, tell
from prefixstore.config import load_config, model_file
from prefixstore.diagnosis.doctor import Level, examine
from prefixstore.diagnosis.explain import explain_without_context, tokens_to_explain
from prefixstore.diagnosis.explanation import Explanation
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import as_tokens
from prefixstore.maintenance.archive import Archive
from prefixstore.models.vocabulary import Vocabulary
from prefixstore.parameters import Parameters
from prefixstore.server.client import LlamaServer
from prefixstore.units import counted

MARKS = {Level.GOOD: "ok", Level.NOTE: "note", Level.PROBLEM: "FIX"}


def doctor(
    location: str | None = None,
    *,
    config: Path | None = None,
    max_bytes: str | None = None,
) -> Result:
    """Examine the installation and a store, and say what to change.

    Checks versions, the file system, permissions, free space, the budget, and whether restoring beats computing.
    With --config, the model is loaded, and its settings are compared with those of the stored pages. It writes nothing.

    Exit codes: 0 no problems found; 1 something should be changed.

    Example: prefixstore doctor lmdb:///var/cache/kv --config warm.toml
    """
    settings = load_config(config) if config is not None else None
    if settings is not None and not settings.model.get("verbose"):
        silence_llama()
    found = examine(location, settings, max_bytes)
    where = next(finding.value for finding in found if finding.name == "location")
    n_problems = sum(finding.level is Level.PROBLEM for finding in found)

    def show() -> None:
        rows = [([MARKS[one.level], one.name, one.value], ["", "", one.advice]) for one in found]
        table(["", "", ""], (row for pair in rows for row in pair if row[2]))
        tell(f"{counted(n_problems, 'problem')} to fix" if n_problems else "no problems found")

    data = {"location": where, "problems": n_problems, "findings": [asdict(finding) for finding in found]}
    return Result(data, show, FAILED if n_problems else DONE)


def explain(
    location: str,
    prompt: str | None = None,
    *,
    model: Path | None = None,
    config: Path | None = None,
    messages: Path | None = None,
    prompt_file: Path | None = None,
    n_ctx: int | None = None,
    salt: str | None = None,
    next_turn: bool = False,
    server: str | None = None,
) -> Result:
    """Explain how much of a prompt is stored, and why not more.

    Shows where the prompt diverges from the nearest stored one, with both texts, and which setting differs from those
    of stored pages.

    With --model, only the vocabulary is loaded, and the prompt is looked up under all stored settings of this model.
    With --config, the model is loaded as a server would, and its settings are compared. With --model and
    --server, a running llama-server makes tokens of the prompt: then llama-cpp-python is not needed. Nothing is
    written.

    Exit codes: 0 the whole prompt is stored; 1 not all of it, or it is too short to be restored.

    Example: prefixstore explain lmdb:///var/cache/kv --model m.gguf --messages request.json
    """
    content = _content(prompt, prompt_file, messages)
    if prompt is not None and os.path.isfile(prompt):  # noqa: PTH113 - a prompt may be longer than a path
        say(f"note: {prompt} is looked up as the text of a prompt; for the file of this name, pass --prompt-file")
    settings, min_tokens = configured(location, config, model, n_ctx, salt), Parameters.MIN_TOKENS
    if server is not None:
        if next_turn:
            raise InvalidParameterError("--server cannot be used with --next-turn: the server ends messages by itself")
        from prefixstore.server.slot_manager import WORTH_A_LOOKUP  # noqa: PLC0415 - loads asyncio

        tokens = as_tokens(LlamaServer(server, api_key=server_key(None)).tokens_of_content(content))
        if len(tokens) < WORTH_A_LOOKUP:
            min_tokens = WORTH_A_LOOKUP
    elif config is None:
        with closing(open_model(settings, tokenizer_only=True)) as llm:
            tokens = tokens_to_explain(llm, content, generation_prompt=not next_turn)
    else:
        with closing(open_model(settings)) as llm, settings.open_store(llm, read_only=True) as store:
            return _explained(store.explain(content, generation_prompt=not next_turn))
    path = model_file(str(settings.path))
    with Archive(location, read_only=True) as archive:
        words = Vocabulary(path).text
        found = explain_without_context(archive.engine, path, words, tokens, salt=salt, min_tokens=min_tokens)
        return _explained(found)


def _explained(found: Explanation) -> Result:
    return Result(asdict(found), str(found), DONE if found.reason == "complete" else FAILED)


def _content(prompt: str | None, prompt_file: Path | None, messages: Path | None) -> str | dict[str, Any]:
    if [prompt, prompt_file, messages].count(None) != 2:
        raise InvalidParameterError(
            "pass one prompt: PROMPT as text, after STORE, which comes first; --prompt-file FILE; or --messages FILE"
        )
    if prompt is not None:
        return prompt
    return text_in(prompt_file) if prompt_file is not None else chat_in(messages or Path(STANDARD))
