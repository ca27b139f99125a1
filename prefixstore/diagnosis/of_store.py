"""`explain` for a context, and for a model of which only the vocabulary is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefixstore.diagnosis.explain import Place, explain
from prefixstore.diagnosis.explanation import Explanation
from prefixstore.engine.engine import Engine
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import Tokens
from prefixstore.format.namespace import Namespace
from prefixstore.llama.hook import Hook
from prefixstore.models.file import file_digest, model_parts
from prefixstore.parameters import Parameters
from prefixstore.stats import Kind
from prefixstore.warming.prompts import Problem, Prompt, PromptLike, encode

if TYPE_CHECKING:
    from llama_cpp import Llama

__all__ = ["LlamaWords", "explain_prompt", "explain_without_context", "tokens_of"]


class LlamaWords:
    """The vocabulary of a ``Llama``."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm

    @property
    def bos(self) -> int:
        """The token that begins sequences; -1 for none."""
        return self._llm.token_bos()

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones by name; what is not a token of the model is left out."""
        n_vocab = self._llm.n_vocab()
        known = [token for token in tokens if 0 <= token < n_vocab]
        return self._llm.detokenize(known, special=True).decode("utf-8", "replace")


def explain_prompt(engine: Engine, hook: Hook, prompt: PromptLike, *, generation_prompt: bool) -> Explanation:
    """Explain what is stored of a prompt for a context; see `PrefixStore.explain`."""
    context = hook.context
    tokens = tokens_of(hook.llm, prompt, generation_prompt=generation_prompt)
    where, kind = hook.strategy.place_of(tokens)
    place = Place(
        where.namespace,
        where.page_tokens,
        context.parameters.min_tokens,
        kind,
        context.rate.token_seconds,
        context.rate.page_seconds,
    )
    note = ""
    if context.bypass_reason() == "multimodal":
        note = "The chat handler adds images to the context: only the text before the first one is stored."
    return explain(engine, LlamaWords(hook.llm), tokens, place, note)


def explain_without_context(
    engine: Engine, tokenizer: Llama, prompt: PromptLike, *, salt: str | None, generation_prompt: bool
) -> Explanation:
    """Explain what is stored of a prompt under any settings of a model, of which only the vocabulary is loaded.

    Parameters
    ----------
    engine
        Of the location.
    tokenizer
        The model, with ``vocab_only=True``.
    prompt, generation_prompt
        As for `PrefixStore.explain`.
    salt
        The tenant.
    """
    tokens = tokens_of(tokenizer, prompt, generation_prompt=generation_prompt)
    model = "+".join(file_digest(part) for part in model_parts(tokenizer.model_path))
    known = [one for one in engine.namespaces() if one.settings.get("model") == model and one.salt == salt]
    best, note = Namespace({"model": model, "salt": salt}), ""
    if known:
        best = max(known, key=lambda one: engine.match(one.key, tokens, _page_tokens(one)).n_tokens)
        note = (
            f"Looked up under the stored settings of this model that have most of it ({best.key.hex()[:12]}"
            f"{f', of {len(known)}' if len(known) > 1 else ''}); pass --config for those of your server."
        )
    kind = next((kind for kind in Kind if kind.value == best.settings.get("kind")), Kind.PAGES)
    if best.settings.get("window") is not None:
        # of a llama-server, of whose window only the last rows are there
        kind = Kind.PAGES_AND_SNAPSHOTS
    place = Place(best, _page_tokens(best), Parameters.MIN_TOKENS, kind)
    return explain(engine, LlamaWords(tokenizer), tokens, place, note)


def tokens_of(llm: Llama, prompt: PromptLike, *, generation_prompt: bool) -> Tokens:
    """The tokens of a prompt. Raises `InvalidParameterError`."""
    if isinstance(prompt, Problem):
        raise InvalidParameterError(str(prompt))
    content = prompt.content if isinstance(prompt, Prompt) else prompt
    return encode(llm, content, generation_prompt=generation_prompt)  # type: ignore[arg-type]


def _page_tokens(namespace: Namespace) -> int:
    found = namespace.settings.get("page_tokens")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else Parameters.PAGE_TOKENS
