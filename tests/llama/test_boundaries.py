"""Where snapshots are worth a stop in a prompt, for each shape of prompt."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest

from prefixstore.llama.binding import token_kinds
from prefixstore.models.boundaries import TokenKind, kinds_of_vocabulary, message_starts, prompt_boundaries
from tests.support.models import finish


def prompt_of(text: str) -> tuple[np.ndarray, list[int], dict[int, TokenKind]]:
    """The tokens of a prompt in which "|" stands before each token at which a snapshot is expected."""
    ids: dict[str, int] = {}
    tokens, expected = [], []
    for word in re.findall(r"\||<[^ >]+>|\n+|[^\s|<]+", text):
        if word == "|":
            expected.append(len(tokens))
        else:
            tokens.append(ids.setdefault(word, len(ids)))
    kinds = {number: kind_of_word(word) for word, number in ids.items()}
    return np.array(tokens, "<i4"), expected, kinds


def kind_of_word(word: str) -> TokenKind:
    if word.startswith("<"):
        return TokenKind(ends=word.startswith("</"), control=True)
    return TokenKind.of_text(word)


def text(name: str, n: int) -> str:
    return " ".join(f"{name}{i}" for i in range(n))


SYSTEM, DOCUMENT, QUESTION = text("s", 300), text("d", 400), text("q", 30)
HEAD = f"<system> \n {SYSTEM} </end> \n |<user> \n"
END = "</end> \n <assistant> |\n"
PROMPTS = {
    "a question": f"{HEAD} {QUESTION} {END}",
    "a document, then the question": f"{HEAD} {DOCUMENT} \n\n |{QUESTION} {END}",
    "a document, then a short question": f"{HEAD} {DOCUMENT} \n\n |why now and how {END}",
    "the question, then a document": f"{HEAD} {QUESTION} \n\n {DOCUMENT} {END}",
    "a document in the system prompt": f"<system> \n {SYSTEM} \n\n |{DOCUMENT} </end> \n |<user> \n {QUESTION} {END}",
    "a question of two paragraphs": f"{HEAD} {DOCUMENT} \n\n |{QUESTION} \n\n |{QUESTION} {END}",
    "a template that ends with a word": f"{HEAD} {DOCUMENT} \n\n |Question: {QUESTION} \n\n Answer: {END}",
    "a template of lines": f"{HEAD} {DOCUMENT} \n |Question: {QUESTION} \n Answer: {END}",
    "line ends in tokens of their own": f"{HEAD} {DOCUMENT} \n . \n {DOCUMENT} \n \n |{QUESTION} {END}",
    "a completion without messages": f"{SYSTEM} \n\n |{DOCUMENT} \n\n |{QUESTION} |.",
    "a completion of one paragraph": f"{SYSTEM} |.",
    "no system prompt": f"<user> \n {DOCUMENT} \n\n |{QUESTION} {END}",
    "headers with blank lines": f"<s> \n\n {SYSTEM} </end> |<u> \n\n {DOCUMENT} \n\n |{QUESTION} </end> <a> |\n\n",
    "an answer that has begun": f"{HEAD} {DOCUMENT} </end> \n |<assistant> {QUESTION} |.",
}


@pytest.mark.parametrize("name", PROMPTS)
def test_where_a_prompt_is_worth_a_snapshot(name):
    tokens, expected, kinds = prompt_of(PROMPTS[name])
    assert prompt_boundaries(tokens, kinds.__getitem__, min_tokens=16, min_gap=64, most=8) == expected


# One chat of two questions in each template; "|" stands before each token at which a message begins, but for the first.
# Control tokens are in brackets; "/]" ends a message, "_" is white space.
TEMPLATES = {
    "chatml": "[im_start] system _ be brief [im_end/] _ |[im_start] user _ why [im_end/] _ |[im_start] assistant _ so "
    "[im_end/] _ |[im_start] user _ how [im_end/] _ |[im_start] assistant _",
    "llama 3": "[begin] [header] system [/header] _ be brief [eot/] |[header] user [/header] _ why [eot/] "
    "|[header] assistant [/header] _ so [eot/] |[header] user [/header] _ how [eot/] |[header] assistant [/header] _",
    "gemma": "[bos] [turn] user _ be brief why [end/] _ |[turn] model _ so [end/] _ |[turn] user _ how [end/] _ "
    "|[turn] model _",
    "mistral, with control tokens": "[s] [INST] why [/INST] so [eos/] |[INST] how [/INST]",
    "mistral, spelled out": "[s] inst why /inst so [eos/] | _ inst how /inst",
    "granite": "[role] system [end_role] be brief [eos/] _ |[role] user [end_role] why [eos/] _ "
    "|[role] assistant [end_role]",
    "phi 3": "[system] _ be brief [end/] _ |[user] _ why [end/] _ |[assistant] _ so [end/] _ |[user] _ how [end/]",
    "no template": "why is that so _ and how",
    "nothing after the end": "[im_start] user _ why [im_end/] _",
    "an end after an end": "[im_start] assistant _ so [im_end/] [eos/] |[im_start] user",
    "nothing": "",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_where_messages_start_in_a_template(name):
    words = TEMPLATES[name].replace("| ", "|").split()
    plain = [word.lstrip("|") for word in words]
    kinds = [
        TokenKind(ends=word.endswith("/]"), control=True) if word.startswith("[") else TokenKind(blank=word == "_")
        for word in plain
    ]
    expected = [i for i, word in enumerate(words) if word.startswith("|")]
    assert message_starts(kinds) == expected


VOCABULARIES = {
    "gpt2": ["Ġthe", "Ġ", "Ċ", "ĊĊ", ".ĊĊ", "ĊĊĠĠ", "<|im_start|>", "<|im_end|>"],
    "llama": ["▁the", "▁", "<0x0A>", "\n\n", ".\n\n", "\n\n▁▁", "<start_of_turn>", "<end_of_turn>"],
    "rwkv": [" the", " ", "\\n", "\\n\\n", ".\\n\\n", "\\n\\n  ", "<s>", "<eos>"],
    "plamo2": ["the", " ", "<0x0A>", "\n\n", ".\n\n", "\n\n  ", "<|plamo:bos|>", "<EOT>"],
}


@pytest.mark.parametrize("model", VOCABULARIES)
def test_a_vocabulary_file_tells_what_tokens_do(tmp_path, model):
    texts = VOCABULARIES[model]
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list([*texts, "</s>"])
    writer.add_token_types([1, 1, 6, 1, 1, 1, 3, 3, 3])
    writer.add_eos_token_id(8)
    finish(writer)
    kind = kinds_of_vocabulary(tmp_path / "v.gguf")
    ends = TokenKind(ends=True, control=True)
    blank = [TokenKind(blank=True, breaks=n) for n in range(3)]
    text, control = TokenKind(), TokenKind(control=True)
    expected = [text, *blank, TokenKind(breaks=2), blank[2], control, ends, ends, text]
    assert [kind(token) for token in range(10)] == expected
    assert kind(-1) == text


def test_a_file_and_llama_cpp_agree_about_a_vocabulary(llama, models):
    llm = llama()
    kind, other = kinds_of_vocabulary(models("llama")), token_kinds(llm)
    for token in range(-1, llm.n_vocab() + 1):
        assert kind(token) == other(token), token
