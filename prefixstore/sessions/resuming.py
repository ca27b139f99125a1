"""What of a session the context of the ``Llama`` holds, and how it comes to hold more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prefixstore.errors import ContextError
from prefixstore.format.keys import Tokens, common_prefix
from prefixstore.last_prompt import PromptMeter

if TYPE_CHECKING:
    from prefixstore.llama.hook import Hook

__all__ = ["known_tokens", "resume", "rewind"]


def resume(hook: Hook, tokens: Tokens, *, uses_live: bool, uses_store: bool) -> tuple[int, int]:
    """Prepare the context to continue a sequence after its last token.

    Parameters
    ----------
    hook
        Of the store.
    tokens
        The sequence.
    uses_live
        Whether what the context holds may be used; if not, it is emptied.
    uses_store
        Whether what is stored may be.

    Returns
    -------
    int
        How many of the tokens the context had, and could continue from.
    int
        How many more were restored.
    """
    started, context = time.perf_counter(), hook.context
    context.settle()
    # what is restored is counted, but no lookup: a prompt follows
    context.prompt = PromptMeter(is_prompt=False)
    if not uses_live:
        hook.before_leaving()
        context.empty()
    n_live = _continued(hook, tokens)
    if uses_store and n_live < len(tokens):
        hook.restore_up_to(tokens, len(tokens))
    n = _continued(hook, tokens)
    context.prompt.looked_up(len(tokens), n, time.perf_counter() - started)
    return n_live, max(n - n_live, 0)


def rewind(hook: Hook, tokens: Tokens) -> int:
    """Cut the context to the prefix of a sequence that it can continue from; returns its length."""
    context = hook.context
    context.settle()
    if context.bypass_reason() is not None:
        raise ContextError("the contents of the context are unknown; evaluate a whole prompt instead")
    n = _continued(hook, tokens)
    if n < context.llm.n_tokens or context.lineage.unknown is not None:
        hook.before_leaving()
        hook.cut(n)
    return n


def known_tokens(hook: Hook) -> Tokens | None:
    """A copy of what the context holds; None if that is not known, or not stored (`Context.bypass_reason`)."""
    hook.context.settle()
    return hook.context.lineage.tokens.copy() if _is_known(hook) else None


def _continued(hook: Hook, tokens: Tokens) -> int:
    """How many tokens of a sequence the context is known to hold, and can continue from."""
    context = hook.context
    if not _is_known(hook):
        return 0
    n = common_prefix(context.lineage.tokens, tokens)
    return n if n == context.llm.n_tokens or context.memory.holds(n) else 0


def _is_known(hook: Hook) -> bool:
    return hook.context.bypass_reason() is None and hook.context.catch_up()
