"""From files, lines and messages to the tokens that a completion would evaluate, and where these branch off."""

from __future__ import annotations

import json
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.errors import InvalidParameterError
from prefixstore.format.keys import as_tokens
from prefixstore.warming.prompt_list import Problem, Prompt, PromptTrie, read_prompts, tokenized, tokens_of_prompt
from prefixstore.warming.tokens import chat_tokens
from tests.support.warming import write_jsonl

# turns must alternate, and the user's text is in the middle of a line
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def llm(models):
    return llama_cpp.Llama(str(models("llama")), n_ctx=512, n_threads=1, verbose=False)


@pytest.fixture
def evaluated(llm, monkeypatch):
    """The tokens that a real completion passes on for evaluation."""

    class AskedError(Exception):
        pass

    def generate(tokens, **options):
        raise AskedError(list(tokens))

    def ask(call):
        with monkeypatch.context() as patch:
            patch.setattr(llm, "generate", generate)
            with pytest.raises(AskedError) as asked:
                call()
        return asked.value.args[0]

    return ask


# -- text and tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["The standard library", " leading space", "<|im_start|>user\nhi", "naïve ☺", "\n\n"])
def test_text_becomes_the_tokens_of_a_completion(llm, evaluated, text):
    assert tokens_of_prompt(llm, text).tolist() == evaluated(lambda: llm.create_completion(text, max_tokens=1))
    assert tokens_of_prompt(llm, {"prompt": text}).tolist() == tokens_of_prompt(llm, text).tolist()


def test_a_model_that_needs_a_first_token_gets_it_once(llm, evaluated, monkeypatch):
    monkeypatch.setattr(llm._model, "add_bos_token", lambda: True)
    tokens = tokens_of_prompt(llm, "some text").tolist()
    assert tokens[0] == llm.token_bos()
    assert tokens == evaluated(lambda: llm.create_completion("some text", max_tokens=1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the prompt has no tokens"),
        ({"tokens": []}, "the prompt has no tokens"),
        ({"messages": []}, "not a list of objects"),
        ({"messages": [{"content": "no role"}]}, "not a list of objects"),
        ({"prompt": 7}, '"prompt" is not a string'),
        ({"tokens": ["a"]}, "flat sequence of integers"),
        ({"tokens": [1, 4096]}, "the vocabulary of the model, which has 4,096 tokens"),
        ({"text": "hello"}, "has none of them"),
        ({"prompt": "a", "tokens": [1]}, "has prompt and tokens"),
    ],
)
def test_an_invalid_prompt_is_refused_with_a_reason(llm, content, message):
    with pytest.raises(InvalidParameterError, match=message):
        tokens_of_prompt(llm, content)


# -- messages ---------------------------------------------------------------------------------------------------------


def said(*turns: str) -> list[dict]:
    roles = ("system", "user", "assistant")
    return [{"role": roles[i % 2 + 1] if i else "system", "content": text} for i, text in enumerate(turns)]


@pytest.mark.parametrize("words", ["Hello", "42 is it", "\n\nWell", " and", "☺"])
def test_messages_end_where_any_next_user_turn_begins(llm, evaluated, words):
    messages = said("You are terse.")
    tokens = tokens_of_prompt(llm, {"messages": messages}).tolist()
    full = evaluated(lambda: llm.create_chat_completion([*messages, {"role": "user", "content": words}], max_tokens=1))
    header = llm.tokenize(
        b"<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user", add_bos=False, special=True
    )
    assert tokens[: len(header)] == header
    # a newline at the start of the text may merge into one token with the newline before it
    shared = len(tokens) - words.startswith("\n")
    assert full[:shared] == tokens[:shared]


def test_messages_can_end_where_the_assistant_answers(llm, evaluated):
    messages = [*said("You are terse."), {"role": "user", "content": "Hello"}]
    wanted = evaluated(lambda: llm.create_chat_completion(messages, max_tokens=1))
    assert tokens_of_prompt(llm, {"messages": messages}, generation_prompt=True).tolist() == wanted
    # a line may set it for itself
    assert tokens_of_prompt(llm, {"messages": messages, "generation_prompt": True}).tolist() == wanted
    without = {"messages": messages, "generation_prompt": False}
    assert tokens_of_prompt(llm, without, generation_prompt=True).tolist() != wanted


def test_where_turns_must_alternate_an_answer_is_inserted_or_the_message_of_the_template_told(llm, monkeypatch):
    formatter = llama_cpp.llama_chat_format.Jinja2ChatFormatter(ALTERNATING, "<|im_end|>", "<|endoftext|>")
    monkeypatch.setattr(llm, "chat_handler", formatter.to_chat_handler())
    question = [{"role": "user", "content": "Hi"}]
    asked = llm.detokenize(tokens_of_prompt(llm, {"messages": question}).tolist(), special=True)
    assert asked.endswith(b"[INST] Hi [/INST]")
    answered = [*question, {"role": "assistant", "content": "Hello"}]
    assert b"Hello[INST]" in llm.detokenize(tokens_of_prompt(llm, {"messages": answered}).tolist(), special=True)
    with pytest.raises(InvalidParameterError, match="alternate!"):
        tokens_of_prompt(llm, {"messages": [{"role": "assistant", "content": "a"}]})


@pytest.mark.parametrize("chat_format", ["llama-2", "chatml", "gemma", "chatml-function-calling", "mistral-instruct"])
def test_registered_formats_work_as_well(llm, evaluated, monkeypatch, chat_format):
    monkeypatch.setattr(llm, "chat_format", chat_format)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    tokens = tokens_of_prompt(llm, {"messages": messages}).tolist()
    following = [*messages, {"role": "user", "content": "A clock"}]
    full = evaluated(lambda: llm.create_chat_completion(following, max_tokens=1))
    assert len(tokens) > 5
    assert full[: len(tokens)] == tokens


def test_a_multimodal_chat_handler_is_refused(llm, monkeypatch):
    class Multimodal:
        clip_model_path = "clip.gguf"

    monkeypatch.setattr(llm, "chat_handler", Multimodal())
    with pytest.raises(InvalidParameterError, match="multimodal"):
        chat_tokens(llm, said("Look"), {}, generation_prompt=False)


# -- files ------------------------------------------------------------------------------------------------------------


def test_lines_are_read_with_their_numbers_and_bad_ones_are_reported(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a"}\n\n{"tokens": [1]}\nno json\n"text"\n{"prompt": "\xff"}\n{"prompt": "z"}'
    )
    found = list(read_prompts([file]))
    assert [entry.where for entry in found] == [f"{file}:{line}" for line in (1, 3, 4, 5, 6, 7)]
    assert [type(entry) for entry in found] == [Prompt, Prompt, Problem, Problem, Problem, Prompt]
    assert found[0].content == {"prompt": "a"}
    assert "not valid JSON" in str(found[2])
    assert "not a JSON object" in str(found[3])


def test_other_files_are_one_prompt_each(tmp_path):
    (tmp_path / "a.md").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_bytes(b"good\nbad \xff\n")
    one, other = read_prompts([tmp_path / "a.md", tmp_path / "b.txt"])
    assert one == Prompt(str(tmp_path / "a.md"), "one\ntwo\n")
    assert str(other) == f"{tmp_path / 'b.txt'}:2: not valid UTF-8"


def test_folders_and_patterns_are_read_in_order(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden/d.txt", "deep/.e.txt", "deep/f.jsonl"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(json.dumps({"prompt": name}) + "\n")
    monkeypatch.chdir(tmp_path)
    names = [str(Path("in") / name) for name in ("a.txt", "b.txt", "deep/c.txt")]
    assert [entry.where for entry in read_prompts(["in"])] == [*names, "in/deep/f.jsonl:1"]
    assert [entry.where for entry in read_prompts(["in/*.txt"])] == names[:2]
    assert [entry.where for entry in read_prompts(["in/**/*.txt"])] == names
    assert [entry.where for entry in read_prompts([str(tmp_path / "in" / "*.txt")])] == [
        str(tmp_path / n) for n in names[:2]
    ]


# -- together ---------------------------------------------------------------------------------------------------------


def test_prompts_become_tokens_and_everything_else_problems(llm, tmp_path):
    file = write_jsonl(tmp_path / "p.jsonl", [{"tokens": [9, 8]}, {"prompt": ""}])
    problems: list[Problem] = []
    given = ["text", [1, 2], {"tokens": [3]}, file, Prompt("here", [4]), Problem("there", "broken"), {"tokens": [-1]}]
    given.append(Path("n" * 300))
    found = [(tokens.tolist(), where) for tokens, where in tokenized(llm, given, problems)]
    assert [where for _, where in found] == ["prompt 1", "prompt 2", "prompt 3", f"{file}:1", "here"]
    assert [tokens for tokens, _ in found[1:]] == [[1, 2], [3], [9, 8], [4]]
    assert [problem.where for problem in problems] == [f"{file}:2", "there", "prompt 7", "n" * 300]


@pytest.mark.parametrize("prompts", ["one text", {"prompt": "one mapping"}])
def test_a_single_prompt_instead_of_a_list_is_refused(llm, prompts):
    with pytest.raises(InvalidParameterError, match="not a single prompt"):
        list(tokenized(llm, prompts, []))


# -- their trie --------------------------------------------------------------------------------------------------------

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=14)


@given(PROMPTS, st.integers(0, 6))
def test_stops_are_where_other_prompts_branch_off(prompts, start):
    made = PromptTrie(((as_tokens(tokens), "") for tokens in prompts), 0)

    def common(one, other):
        n = min(len(one), len(other))
        return int(np.argmin([*(one[:n] == other[:n]), False]))

    for i in range(len(made)):
        row = made.tokens(i)
        shared = {common(row, made.tokens(j)) for j in range(len(made)) if j != i}
        assert made.stops(i, start) == tuple(sorted(n for n in shared if start < n < len(row)))
