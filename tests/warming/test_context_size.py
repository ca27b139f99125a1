"""How long a context a list of prompts needs."""

from __future__ import annotations

import pytest

from prefixstore.config import Config
from prefixstore.warming.context_size import fit
from prefixstore.warming.prompts import Problem, Prompt
from tests.support.models import prompt


@pytest.fixture
def tokenizer(models):
    return Config(str(models("llama", n_ctx_train=2048))).open_tokenizer()


@pytest.mark.parametrize(
    ("longest", "n_ctx"),
    [(1, 512), (511, 512), (512, 768), (767, 768), (768, 1024), (2047, 2048)],
)
def test_the_context_holds_the_longest_prompt_and_one_token_more(tokenizer, longest, n_ctx):
    assert fit(tokenizer, [prompt(longest), prompt(1)])[1:] == (longest, n_ctx)


def test_only_prompts_longer_than_the_model_was_trained_for_are_refused(tokenizer):
    found, longest, n_ctx = fit(tokenizer, [prompt(100), prompt(2048), prompt(700), ""])
    assert (n_ctx, longest) == (768, 700)
    problems = [str(one) for one in found if isinstance(one, Problem)]
    assert problems == [
        (
            "prompt 2: 2,048 tokens do not fit the context of 2,048 tokens that the model was trained with; shorten "
            "the prompt, or set n_ctx to use a longer context"
        ),
        "prompt 4: the prompt has no tokens",
    ]
    assert [(one.where, len(one.content)) for one in found if isinstance(one, Prompt)] == [
        ("prompt 1", 100),
        ("prompt 3", 700),
    ]


def test_text_and_messages_get_the_tokens_that_the_whole_model_gives_them(tokenizer, models):
    messages = {"messages": [{"role": "user", "content": "Which day is it?"}]}
    given = ["The standard library", messages]
    llm = Config(str(models("llama")), {"n_ctx": 512}).open_llama()
    for generation_prompt in (False, True):
        ours, theirs = (
            [list(one.content) for one in fit(one, given, generation_prompt=generation_prompt)[0]]
            for one in (tokenizer, llm)
        )
        assert ours == theirs
