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
    """The cause, whichever of two was stored."""
    found = {one.name if (one := find_culprit(texts(*pair))) else None for pair in ((here, there), (there, here))}
    assert len(found) == 1
    return found.pop()


def chat(*turns, tools=()):
    """A conversation, with the tools in JSON before it."""
    defined = "\n".join(f'{{"name": "{one}", "description": "The {one}.", "parameters": {{}}}}' for one in tools)
    return f"{defined}\n<|im_start|>system\n{REST}<|im_end|>\n" + "".join(
        f"<|im_start|>{('user', 'assistant')[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns)
    )


def harmony(*names):
    return (
        "namespace functions {\n" + "".join(f"// Of {n}.\ntype {n} = (_: {{}}) => any;\n" for n in names) + "}" + REST
    )


def anthropic(*names):
    return "[" + ", ".join(f'{{"name": "{n}", "input_schema": {{}}}}' for n in names) + "]" + REST


@pytest.mark.parametrize(
    ("cause", "one", "other"),
    [
        ("timestamp", "2026-11-22T09:48:01Z", "2026-11-22T09:48:02Z"),
        ("timestamp", "11/22/2026, 9:48 AM", "11/22/2026, 10:02 AM"),
        ("timestamp", "November 2026", "December 2026"),
        ("timestamp", "Sunday", "Monday"),
        ("timestamp", "1763804881123", "1763804999456"),
        ("timestamp", "2026-11-22T09:48:01Z trace=8fa3b2c1d0", "2026-11-22T10:02:44Z trace=77ab01c9ef"),
        ("id", "4f9c1b7e02ad", "9ab03c55e1f0"),
        ("id", "req_8fK3a9x1", "req_77ab01Qz"),
        ("id", "7712048", "5510397"),
        ("id", "0b7c2f5e-51a4-4c6e-9a2b-6d1f0c3e7a90", "9f81d3aa-0c17-4b5d-8e6f-2a4b6c8d0e1f"),
        ("value", "Berlin", "Madrid"),
        ("value", "3 sentences", "5 sentences"),
    ],
)
def test_a_value_that_differs_before_much_that_is_the_same(cause, one, other):
    assert name(f"It is {one}. {REST}", f"It is {other}. {REST}") == cause
    # at the end, or in front of another text, it costs nothing
    assert name(f"{REST} It is {one}.", f"{REST} It is {other}.") is None
    assert name(f"It is {one}. {REST}", f"It is {other}. Something else is said.") is None


@pytest.mark.parametrize(
    ("cause", "here", "there"),
    [
        ("tools", chat("Hi", tools=["weather", "time", "people"]), chat("Hi", tools=["people", "weather", "time"])),
        ("tools", chat("Hi", tools=["weather", "time", "people"]), chat("Hi", tools=["weather", "people", "time"])),
        ("tools", harmony("get_time", "get_weather"), harmony("get_weather", "get_time")),
        ("tools", anthropic("a", "b", "c"), anthropic("a", "c", "b")),
        ("white space", f"{REST}\n\nA: A page.\n\nQ: {REST}", f"{REST}\n\nA: A page. \n\n\nQ: {REST}"),
        # innocent differences
        ("value", anthropic("a", "b"), anthropic("a", "x")),
        (None, chat("Hi", tools=["weather", "time"]), chat("Hi", tools=["weather", "time", "people"])),
        (
            None,
            chat('{"name": "time", "arguments": {}} {"name": "weather", "arguments": {}}', tools=["time", "weather"]),
            chat('{"name": "weather", "arguments": {}} {"name": "time", "arguments": {}}', tools=["time", "weather"]),
        ),
        (None, chat("Who are you?"), chat("What can you do for me?")),
        (None, chat("Is 10:30 fine for you?"), chat("Is 11:45 fine for you?")),
        (None, chat("Where is order 482913?"), chat("Where is order 771204?")),
        (
            None,
            f"On 2026-11-22 the harbour was closed for two hours. {REST}",
            f"On 2026-12-24 all shops close at noon, and so do most offices in town. {REST}",
        ),
        (
            None,
            chat("Hi", "<think>\nA first idea that is long enough.\n</think>\n\nOne answer of some length."),
            chat("Hi", "<think>\nA second idea, quite different.\n</think>\n\nAnother answer, a longer one."),
        ),
    ],
)
def test_other_differences(cause, here, there):
    assert name(here, there) == cause


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
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
