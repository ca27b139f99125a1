"""``prefixstore explain``: what is stored of a prompt, and why not more."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from prefixstore.cli.command import Result
from prefixstore.cli.files import STANDARD, chat_in, text_in
from prefixstore.cli.model import configured, open_model
from prefixstore.cli.output import DONE, FAILED, say, visible_lines, wrapped
from prefixstore.errors import InvalidParameterError
from prefixstore.maintenance.archive import Archive

__all__ = ["explain"]


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
) -> Result:
    """Explain how much of a prompt is stored, and why not more.

    Shows where the prompt diverges from the nearest stored one, with both texts, and names the usual causes: a
    timestamp or id, tools in a different order, thinking dropped from the history, text that tokenizes differently,
    BOS twice. Also shows whether the page was evicted, and which setting differs from those of stored pages.

    With --model, only the vocabulary is loaded, and the prompt is looked up under all stored settings of this model.
    With --config, the model is loaded as a server would, and its settings are compared. Nothing is written.

    Exit codes: 0 the whole prompt is stored; 1 not all of it.

    Example: prefixstore explain lmdb:///var/cache/kv --model m.gguf --messages request.json
    """
    content = _content(prompt, prompt_file, messages)
    if prompt is not None and os.path.isfile(prompt):  # noqa: PTH113 - a prompt may be longer than a path
        say(f"note: {prompt} is looked up as the text of a prompt; for the file of this name, pass --prompt-file")
    settings = configured(location, config, model, n_ctx, salt)
    llm = open_model(settings, tokenizer_only=config is None)
    from prefixstore.diagnosis.of_store import explain_without_context  # noqa: PLC0415 - the extra "llama"

    try:
        if config is None:
            with Archive(location, read_only=True) as archive:
                found = explain_without_context(
                    archive.engine, llm, content, salt=salt, generation_prompt=not next_turn
                )
        else:
            with settings.open_store(llm, read_only=True) as store:
                found = store.explain(content, generation_prompt=not next_turn)
    finally:
        llm.close()

    def show() -> None:
        for label, text in found.lines():
            typer.echo(wrapped(visible_lines(text), label=label))

    return Result(asdict(found), show, DONE if found.reason == "complete" else FAILED)


def _content(prompt: str | None, prompt_file: Path | None, messages: Path | None) -> str | dict[str, Any]:
    if [prompt, prompt_file, messages].count(None) != 2:
        raise InvalidParameterError("pass one prompt: PROMPT as text, --prompt-file FILE, or --messages FILE")
    if prompt is not None:
        return prompt
    return text_in(prompt_file) if prompt_file is not None else chat_in(messages or Path(STANDARD))
