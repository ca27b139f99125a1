"""The usual causes in forms that the test models do not have: other tags, other tool formats, other dates."""

from __future__ import annotations

import random

import pytest

from prefixstore.diagnosis.culprits import Texts, find_culprit, repeated_start

REST = "All that follows is the same in both of them, and it is long enough to be worth sharing between requests. " * 2


def texts(here, there):
    """Texts whose tokens are characters."""
    at = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    return Texts(here, there, at, list(map(ord, here[at:])), list(map(ord, there[at:])))


def name(here, there):
    found = find_culprit(texts(here, there))
    return found.name if found is not None else None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2026-11-22T09:48:01Z", "2026-11-22T09:48:02Z"),
        ("22.11.2026", "23.11.2026"),
        ("11/22/2026, 9:48 AM", "11/22/2026, 10:02 AM"),
        ("22 Nov 2026", "1 Dec 2026"),
        ("November 2026", "December 2026"),
        ("Sun Nov 22 09:48:01 UTC 2026", "Sun Nov 22 09:51:37 UTC 2026"),
        ("Sunday", "Monday"),
        ("09:48", "17:20"),
        ("1763804881123", "1763804999456"),
    ],
)
def test_dates_and_times(one, other):
    assert name(f"It is {one}. {REST}", f"It is {other}. {REST}") == "timestamp"
    assert name(f"It is {other}. {REST}", f"It is {one}. {REST}") == "timestamp"
    # at the end, or in front of another text, it costs nothing
    assert name(f"{REST} It is {one}.", f"{REST} It is {other}.") is None
    assert name(f"It is {one}. {REST}", f"It is {other}. Something else is said.") is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("4f9c1b7e02ad", "9ab03c55e1f0"),
        ("req_8fK3a9x1", "req_77ab01Qz"),
        ("user-10482", "user-99120"),
        ("7712048", "5510397"),
        ("chatcmpl-9xYz12AbCdEf", "chatcmpl-1qWe45RtYuIo"),
    ],
)
def test_ids(one, other):
    assert name(f"Session: {one}\n{REST}", f"Session: {other}\n{REST}") == "id"


def test_words_are_no_ids():
    assert name(f"You are an assistant of Berlin. {REST}", f"You are an assistant of Madrid. {REST}") is None
    assert name(f"Speak in a formal way. {REST}", f"Speak in a friendly way. {REST}") is None
    assert name(f"Write 3 sentences. {REST}", f"Write 5 sentences. {REST}") is None


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("<reasoning>", "</reasoning>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ],
)
def test_thinking_in_other_tags(opening, closing):
    start, answer = f"<|assistant|>{REST}", "The answer is that all is well.<|end|>"
    stored = f"{start}{opening}\nLet me see.\n{closing}\n\n{answer}"
    assert name(f"{start}{answer}<|user|>Thank you", stored) == "thinking"
    # an empty block in its place
    assert name(f"{start}{opening}\n\n{closing}\n\n{answer}<|user|>Thank you", stored) == "thinking"
    assert name(f"{start}Another answer is given here.", stored) is None


def test_thinking_of_the_harmony_format():
    start = f"<|start|>user<|message|>{REST}<|end|><|start|>assistant"
    answer = "<|channel|>final<|message|>The answer is that all is well.<|return|>"
    stored = f"{start}<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant{answer}"
    assert name(f"{start}{answer}", stored) == "thinking"


def test_tools_of_the_harmony_format_and_of_anthropic():
    def harmony(*names):
        return (
            "namespace functions {\n"
            + "".join(f"// Looks up {n}.\ntype {n} = (_: {{}}) => any;\n" for n in names)
            + "}"
        )

    assert name(harmony("get_time", "get_weather") + REST, harmony("get_weather", "get_time") + REST) == "tools"

    def anthropic(*names):
        return "[" + ", ".join(f'{{"name": "{n}", "input_schema": {{}}}}' for n in names) + "]"

    assert name(anthropic("a", "b", "c") + REST, anthropic("a", "c", "b") + REST) == "tools"
    assert name(anthropic("a", "b") + REST, anthropic("a", "x") + REST) is None


def test_other_tokens_for_the_same_text():
    here, there = "The same text in both.", "The same text in both. And more."
    found = find_culprit(Texts(here, there, 4, [1, 2], [3, 4, 5]))
    assert found is not None
    assert found.name == "seam"
    # one of two ends there
    assert find_culprit(Texts(here, there, len(here), [], [3])) is None


def test_a_bos_twice_is_named_only_if_one_of_two_has_it():
    assert repeated_start([1, 1, 5, 6], [1, 5, 6, 7], 1).name == "bos"
    assert "what is stored" in repeated_start([1, 5, 6], [1, 1, 5, 6], 1).what
    for here, there, bos in (
        ([1, 1, 5], [1, 1, 6], 1),
        ([1, 1, 5], [1, 7, 8], 1),
        ([1, 5, 6], [1, 5, 7], 1),
        ([-1, -1, 5], [-1, 5], -1),
        ([1, 1], [1], 1),
        ([], [], 1),
    ):
        assert repeated_start(here, there, bos) is None


def test_any_two_texts_are_compared_in_reasonable_time():
    chance = random.Random(1)
    pieces = [
        "<think>",
        "</think>",
        '{"name": "a",',
        '"parameters": {}}',
        "2026-11-22",
        "a-b-c-d",
        "x" * 50,
        "0123456789",
        " ",
        "\n",
    ]
    for _ in range(200):
        start = "".join(chance.choices(pieces, k=5))
        here, there = (start + "".join(chance.choices(pieces, k=chance.randint(0, 200))) for _ in range(2))
        find_culprit(texts(here, there))
    for hostile in ("a-" * 8000, "x" * 16000, "<think>" * 2000, '"name": "' * 2000, "1:" * 8000, "a1" * 8000):
        find_culprit(texts(hostile + "1", hostile + "2"))
        find_culprit(texts("1" + hostile, "2" + hostile))
