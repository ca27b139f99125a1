"""The vocabulary of a model file: tokens to text and back."""

from __future__ import annotations

from prefixstore.warming.tokens import Vocabulary


def test_tokens_that_a_model_does_not_have_do_not_end_the_process(models):
    words = Vocabulary(models("llama"))
    tokens = words.tokens("with a statement")
    assert words.text(tokens) == "with a statement"
    assert words.text([]) == ""
    # as of another model in the same location
    assert words.text([*tokens, 5_000_000, -1, *tokens]) == "with a statement��with a statement"
