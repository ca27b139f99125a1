"""Text and messages to the tokens that a completion of llama-cpp-python would evaluate for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp

from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import Tokens, as_tokens, common_prefix
from prefixstore.llama.binding import is_multimodal, prompt_start

# Two possible next messages, whose first tokens differ. What the template puts before them is the same.
NEXT = ("A", "1")


def text_tokens(llm: llama_cpp.Llama, text: str) -> Tokens:
    """The tokens of a prompt, as ``create_completion(text)`` evaluates them, such that it can be continued.

    If the model wants an end-of-sequence token after a prompt, it is left out: a longer prompt has it elsewhere. Raises
    `InvalidParameterError` if the text cannot be encoded as UTF-8.
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameterError(f"the text cannot be encoded as UTF-8: {error}") from None
    return as_tokens(prompt_start(llm) + (llm.tokenize(encoded, add_bos=False, special=True) if text else []))


def chat_tokens(
    llm: llama_cpp.Llama,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    generation_prompt: bool,
) -> Tokens:
    """The tokens of a conversation, as ``create_chat_completion`` evaluates them with these options, such as tools.

    They end where the assistant would answer with a `generation_prompt`, and without where the next turn of the user
    would begin, with everything that the template puts before the user's words. Raises `InvalidParameterError` if the
    template refuses the messages, or the handler brings images into the context.
    """
    if is_multimodal(llm):
        raise InvalidParameterError("messages cannot be warmed through a multimodal chat handler")
    if generation_prompt:
        return _rendered(llm, messages, options)
    try:
        return _before_next(llm, messages, options, "user")
    except InvalidParameterError:
        # some templates require the turns to alternate
        if not messages or messages[-1].get("role") == "assistant":
            raise
        return _before_next(llm, messages, options, "assistant")


def _before_next(
    llm: llama_cpp.Llama, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], role: str
) -> Tokens:
    """What two conversations have in common that continue in different words."""
    one, other = (_rendered(llm, [*messages, {"role": role, "content": text}], options) for text in NEXT)
    return one[: common_prefix(one, other)]


def _rendered(llm: llama_cpp.Llama, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Tokens:
    """What the chat handler would have completed.

    Handlers differ inside (templates, registered formats, function calling), so the handler itself is called, through
    ``create_chat_completion``, with a stand-in for the Llama that keeps the prompt.
    """
    stand_in: Any = _StandIn(llm)
    copies: Any = [dict(message) for message in messages]
    try:
        llama_cpp.Llama.create_chat_completion(stand_in, messages=copies, **options)
    except _PromptTaken as taken:
        return text_tokens(llm, taken.prompt) if isinstance(taken.prompt, str) else as_tokens(taken.prompt)
    except Exception as error:
        # templates and handlers raise exceptions of any type
        raise InvalidParameterError(f"the chat format does not accept these messages: {error}") from error
    raise InvalidParameterError("the chat handler answered without running a completion of this model")


class _PromptTaken(BaseException):
    """Carries the prompt out of a chat handler, past its ``except`` clauses."""

    def __init__(self, prompt: str | list[int]) -> None:
        super().__init__()
        self.prompt = prompt


class _StandIn:
    """Behaves like a ``Llama``, except that a completion raises its prompt."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def create_completion(self, prompt: str | list[int], *args: Any, **kwargs: Any) -> Any:
        raise _PromptTaken(prompt)
