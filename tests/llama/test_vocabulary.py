"""The vocabulary of a model file: tokens to text and back."""

from __future__ import annotations

import gguf
import pytest
from llama_cpp import Llama

from prefixstore.errors import ContextError
from prefixstore.models.vocabulary import Vocabulary
from tests.support.models import finish

# llama-cpp-python leaves out what is longer
LONGEST_PIECE = 32


def test_tokens_that_a_model_does_not_have_do_not_end_the_process(models):
    words = Vocabulary(models("llama"))
    tokens = Llama(str(models("llama")), vocab_only=True, verbose=False).tokenize(b"with a statement", add_bos=False)
    assert words.text(tokens) == "with a statement"
    assert words.text([]) == ""
    # as of another model in the same location
    assert words.text([*tokens, 5_000_000, -1, *tokens]) == "with a statement��with a statement"


def test_every_token_is_the_text_that_llama_cpp_gives_it(models):
    words, llm = Vocabulary(models("llama")), Llama(str(models("llama")), vocab_only=True, verbose=False)
    for token in range(llm.n_vocab()):
        text = words.text([token])
        if len(text.encode()) < LONGEST_PIECE:
            assert text == llm.detokenize([token], special=True).decode("utf-8", "replace")
    tokens = llm.tokenize("Überall ein 🙂 <|im_end|>\n\tund so weiter.".encode(), add_bos=False, special=True)
    assert words.text(tokens) == llm.detokenize(tokens, special=True).decode()


@pytest.mark.parametrize(
    ("kind", "tokens", "text"),
    [
        ("llama", ["<s>", "▁Once", "▁upon", "<0x0A>", "<0xC3>", "<0xA9>"], "<s> Once upon\né"),
        ("rwkv", ["<s>", "Once", "\\n\\tupon", "\\xc3\\xa9", "\\'"], "<s>Once\n\tuponé'"),
        ("gpt2", ["<s>", "Once", "Ġupon", "ĊÃ©"], "<s>Once upon\né"),
    ],
)
def test_white_space_and_bytes_are_read_as_each_kind_of_vocabulary_writes_them(tmp_path, kind, tokens, text):
    path = tmp_path / "words.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
    finish(writer)
    assert Vocabulary(path).text(range(len(tokens))) == text


def test_a_file_without_a_vocabulary_is_refused(tmp_path):
    path = tmp_path / "none.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    finish(writer)
    with pytest.raises(ContextError, match="has no vocabulary"):
        Vocabulary(path)
