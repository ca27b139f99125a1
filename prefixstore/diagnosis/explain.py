"""Finds out why no more of a prompt is stored: the match, the fork, the other namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from prefixstore.config import explain_settings
from prefixstore.counters import Kind
from prefixstore.diagnosis.explanation import Explanation, Fork, OtherSettings
from prefixstore.engine.engine import Engine
from prefixstore.engine.page import Page, Path
from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import Tokens, common_prefix
from prefixstore.format.namespace import Namespace
from prefixstore.models.file import file_digest, model_parts
from prefixstore.models.vocabulary import Words
from prefixstore.parameters import Parameters
from prefixstore.warming.prompt_list import Problem, Prompt, PromptLike, tokens_of_prompt

if TYPE_CHECKING:
    from llama_cpp import Llama

    from prefixstore.llama.hook import Hook

# tokens before and after the fork, and characters of their texts that are shown
BEFORE, AFTER = 64, 64
SHOWN_BEFORE, SHOWN_AFTER = 60, 100
# other namespaces that are asked, the most similar ones
NAMESPACES = 32
# sequences beside the prompt, from which the nearest is chosen
SIBLINGS = 64
# children of a page from which the last used one is chosen to continue the stored sequence
CHILDREN = 16


@dataclass(frozen=True)
class LookupContext:
    """Where a prompt is looked up, and what is known of the context that asks."""

    namespace: Namespace
    page_tokens: int
    min_tokens: int
    kind: Kind = Kind.PAGES


def explain_prompt(engine: Engine, hook: Hook, prompt: PromptLike, *, generation_prompt: bool) -> Explanation:
    """Explain what is stored of a prompt for a context; see `PrefixStore.explain`."""
    context = hook.context
    tokens = tokens_to_explain(hook.llm, prompt, generation_prompt=generation_prompt)
    where, kind = hook.strategy.place_of(tokens)
    place = LookupContext(where.namespace, where.page_tokens, context.parameters.min_tokens, kind)
    note = ""
    if context.bypass_reason() == "multimodal":
        note = "The chat handler adds images to the context: only the text before the first one is stored."
    return explain_tokens(engine, partial(_text, hook.llm), tokens, place, note)


def explain_without_context(
    engine: Engine, path: str, words: Words, tokens: Tokens, *, salt: str | None, min_tokens: int
) -> Explanation:
    """As `PrefixStore.explain`, under any settings of the model in a file, by its vocabulary alone."""
    model = "+".join(file_digest(part) for part in model_parts(path))
    known = [one for one in engine.upkeep.namespaces() if one.settings.get("model") == model and one.salt == salt]
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
    place = LookupContext(best, _page_tokens(best), min_tokens, kind)
    return explain_tokens(engine, words, tokens, place, note)


def tokens_to_explain(llm: Llama, prompt: PromptLike, *, generation_prompt: bool) -> Tokens:
    """The tokens of a prompt. Raises `InvalidParameterError`."""
    if isinstance(prompt, Problem):
        raise InvalidParameterError(str(prompt))
    content = prompt.content if isinstance(prompt, Prompt) else prompt
    return tokens_of_prompt(llm, content, generation_prompt=generation_prompt)  # type: ignore[arg-type]


def _page_tokens(namespace: Namespace) -> int:
    found = namespace.settings.get("page_tokens")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else Parameters.PAGE_TOKENS


def explain_tokens(engine: Engine, words: Words, tokens: Tokens, place: LookupContext, note: str = "") -> Explanation:
    """Explain what is stored of a prompt, and why not more; `note` is said at the end. Changes nothing.

    Raises `StorageError`.
    """
    key = place.namespace.key
    shared = engine.match(key, tokens, place.page_tokens)
    matched = shared
    if place.kind.has_snapshots:
        matched = engine.match_snapshot(key, tokens, place.page_tokens, max(len(tokens) - 1, 0))
    # a snapshot may have more than the pages before it
    shared = max(shared, matched, key=lambda path: path.n_tokens)
    n_shared = shared.n_tokens
    nearest = _nearest(engine, place, tokens, shared)
    fork = _fork(words, tokens, *nearest) if nearest is not None else None
    others = _others(engine, place, tokens, n_shared)
    reason = _reason(place, tokens, shared, matched, fork, others)
    notes = [note] if note else []
    if place.kind.has_snapshots and matched.n_tokens < n_shared and reason != "snapshot":
        notes.insert(0, f"{n_shared:,} tokens are the same; this model resumes only at its snapshots.")
    if 0 < matched.n_tokens < place.min_tokens and reason not in ("short", "unsupported"):
        notes.insert(0, f"Matches of fewer than min_tokens={place.min_tokens} tokens are not restored.")
    return Explanation(
        engine.location,
        len(tokens),
        n_shared,
        matched.n_tokens,
        tuple(page.key.hex() for page in matched.pages),
        reason,
        fork,
        others,
        place.min_tokens,
        " ".join(notes),
    )


def _reason(
    place: LookupContext,
    tokens: Tokens,
    shared: Path,
    matched: Path,
    fork: Fork | None,
    others: Sequence[OtherSettings],
) -> str:
    reasons = {
        "unsupported": place.kind.reason is not None,
        "short": len(tokens) < place.min_tokens,
        "complete": matched.n_tokens >= len(tokens) - 1,
        "snapshot": shared.n_tokens >= len(tokens) - 1,
        "settings": bool(others),
        "fork": fork is not None,
        "end": shared.n_tokens > 0,
        "empty": True,
    }
    return next(reason for reason, is_it in reasons.items() if is_it)


def _nearest(engine: Engine, place: LookupContext, tokens: Tokens, shared: Path) -> tuple[int, list[int]] | None:
    """Where the stored sequence that has most in common with a prompt parts from it, and how that goes on.

    None if the prompt is stored completely, or continues where the stored sequence ends.
    """
    n, last = shared.n_tokens, shared.pages[-1] if shared.pages else None
    is_inside = last is not None and last.end > n
    parent = place.namespace.key if last is None else last.parent if is_inside else last.key
    beside = engine.lookups.children(parent, SIBLINGS) if n < len(tokens) else []
    common = {page: common_prefix(_array(page), tokens[page.start :]) for page in beside}
    if is_inside and last is not None and n < len(tokens):
        common[last] = n - last.start
    # one whose tokens are all in the prompt continues elsewhere
    parting = [page for page, m in common.items() if m < page.n_tokens and page.start + m < len(tokens)]
    if not parting:
        return None
    page = max(parting, key=lambda page: (common[page], page.last_used))
    return page.start + common[page], _followed(engine, page)[common[page] :]


def _followed(engine: Engine, page: Page) -> list[int]:
    """The tokens of a page, and of those that follow it, each time the one that was used last."""
    found: list[int] = _array(page).tolist()
    while len(found) < AFTER:
        children = engine.lookups.children(page.key, CHILDREN)
        if not children:
            break
        page = max(children, key=lambda child: child.last_used)
        found += _array(page).tolist()
    return found


def _array(page: Page) -> Tokens:
    return np.frombuffer(page.tokens, "<i4")


def _text(llm: Llama, tokens: Sequence[int]) -> str:
    """Tokens as text, special ones by name; what is not a token of the model is left out."""
    known = [token for token in tokens if 0 <= token < llm.n_vocab()]
    return llm.detokenize(known, special=True).decode("utf-8", "replace")


def _fork(words: Words, tokens: Tokens, n: int, after: Sequence[int]) -> Fork:
    """The texts of a prompt and of a stored sequence around the place where they part, after this many tokens."""
    both, mine = tokens[max(n - BEFORE, 0) : n].tolist(), tokens[n : n + AFTER].tolist()
    # a character that is cut in the middle is no text yet
    before = words(both).rstrip("\ufffd") if both else ""
    here, there = (words(both + some)[len(before) :] for some in (mine, list(after[:AFTER])))
    return Fork(n, before[-SHOWN_BEFORE:], here[:SHOWN_AFTER], there[:SHOWN_AFTER])


def _others(engine: Engine, place: LookupContext, tokens: Tokens, n_shared: int) -> tuple[OtherSettings, ...]:
    """Other namespaces that have more of the prompt. For a tenant, those of other tenants are not looked at."""
    mine, names = place.namespace, engine.history().models
    known = [
        one
        for one in engine.upkeep.namespaces()
        if one.key != mine.key and (one.salt is None or mine.salt is None or one.salt == mine.salt)
    ]
    known.sort(key=lambda one: len(mine.differences(one)))
    found = []
    for one in known[:NAMESPACES]:
        step = one.settings.get("page_tokens")
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            continue
        n = engine.match(one.key, tokens, step).n_tokens
        if n > n_shared and n >= place.min_tokens:
            found.append(OtherSettings(n, tuple(explain_settings(mine, [one], names))))
    return tuple(sorted(found, key=lambda other: (-other.n_tokens, len(other.differences)))[:4])
