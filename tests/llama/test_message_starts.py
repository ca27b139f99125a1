"""Where messages begin, in the templates of many models."""

from __future__ import annotations

import numpy as np
import pytest

from prefixstore.llama.binding import token_kinds
from prefixstore.models.boundaries import TokenKind, message_starts

ENDS, CONTROL, BLANK, TEXT = (
    TokenKind(ends=True, control=True),
    TokenKind(control=True),
    TokenKind(blank=True),
    TokenKind(),
)
# one chat of two questions in each template; "|" stands before each token at which a message begins, but for the first
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


def kind_of_word(word: str) -> TokenKind:
    if word.startswith("["):
        return ENDS if word.endswith("/]") else CONTROL
    return BLANK if word == "_" else TEXT


@pytest.mark.parametrize("name", TEMPLATES)
def test_where_messages_start_in_a_template(name):
    words = TEMPLATES[name].replace("| ", "|").split()
    kinds = [kind_of_word(word.lstrip("|")) for word in words]
    expected = [i for i, word in enumerate(words) if word.startswith("|")]
    assert message_starts(kinds) == expected


def test_messages_of_a_chat_start_where_the_vocabulary_of_a_model_says(llama):
    llm = llama()
    chat = [
        "<|im_start|>system\nYou answer.<|im_end|>\n",
        "<|im_start|>user\nWhy?\n\n<|im_end|>\n",
        "<|im_start|>assistant\nSo.<|im_end|>\n",
        "<|im_start|>user\nAnd how?<|im_end|>\n",
        "<|im_start|>assistant\n",
    ]
    ids = [llm.tokenize(message.encode(), add_bos=False, special=True) for message in chat]
    tokens = [token for message in ids for token in message]
    starts = np.cumsum([len(message) for message in ids])[:-1].tolist()
    assert message_starts(list(map(token_kinds(llm), tokens))) == starts


def test_a_number_that_is_not_a_token_counts_as_text(llama):
    llm = llama()
    kind = token_kinds(llm)
    assert kind(-1) == kind(10**6) == TEXT
