"""The requests of the comparison: four workloads, the same for the same seed, in two phases.

A request consists of tokens and of answers to earlier requests. The cold phase starts with an empty cache. The warm
phase continues in a new process: the same users ask again, the chat continues, the documents are used for other
questions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np

from benchmarks import agent

SEED = 6

# tokens, or the number of an earlier request, for its answer
Part = list[int] | int
Request = tuple[Part, ...]
Words = Callable[[int], list[int]]


@dataclass(frozen=True)
class Workload:
    """Requests of both phases; their answers are numbered consecutively."""

    cold: list[Request]
    warm: list[Request]


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, and counts."""

    system: int
    users: int
    turn: int
    turns: tuple[int, int]
    document: int
    questions: int
    agent_tokens: int
    agent_requests: int


LARGE = Sizes(
    system=1500, users=6, turn=200, turns=(8, 6), document=400, questions=8, agent_tokens=4000, agent_requests=40
)
SMALL = Sizes(
    system=1000, users=4, turn=150, turns=(5, 4), document=250, questions=5, agent_tokens=1000, agent_requests=24
)


def prompt_of(request: Request, answers: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(answers[part] if isinstance(part, int) else part for part in request))


def users(words: Words, sizes: Sizes) -> Workload:
    """One system prompt, and users who ask in turns: two rounds, then a third round and two new users."""
    system = words(sizes.system)
    said: list[list[Part]] = [[] for _ in range(sizes.users)]
    requests: list[Request] = []
    for _ in range(3):
        for user in said:
            user.append(words(40))
            requests.append((system, *user))
            user.append(len(requests) - 1)
    requests += [(system, words(40)) for _ in range(2)]
    return Workload(requests[: 2 * sizes.users], requests[2 * sizes.users :])


def chat(words: Words, sizes: Sizes) -> Workload:
    """One conversation, in turns; the process ends in the middle of it."""
    said: list[Part] = [words(200)]
    requests: list[Request] = []
    for _ in range(sum(sizes.turns)):
        said.append(words(sizes.turn))
        requests.append(tuple(said))
        said.append(len(requests) - 1)
    return Workload(requests[: sizes.turns[0]], requests[sizes.turns[0] :])


def documents(words: Words, sizes: Sizes) -> Workload:
    """A system prompt, three of six documents in random order (popular ones more often), and a question."""
    rng = np.random.default_rng(SEED)
    system, texts = words(200), [words(sizes.document) for _ in range(6)]
    popularity = 1 / np.arange(1, len(texts) + 1) ** 1.5
    requests: list[Request] = []
    for _ in range(2 * sizes.questions):
        found = rng.choice(len(texts), 3, replace=False, p=popularity / popularity.sum())
        requests.append((system, *(texts[i] for i in found), words(30)))
    return Workload(requests[: sizes.questions], requests[sizes.questions :])


def session(tokenize: Callable[[str], list[int]], longest: int, most: int) -> Workload:
    """The last `most` requests of the session with the longest prompt of at most `longest` tokens in the agent trace.

    The process ends halfway.
    """
    by_session = sorted(agent.requests(), key=lambda request: (request["session_id"], request["timestamp"]))
    found = [
        [tokenize(request["input"]) for request in requests]
        for _, requests in groupby(by_session, key=lambda request: request["session_id"])
    ]
    chosen = max((prompts for prompts in found if max(map(len, prompts)) <= longest), key=lambda p: max(map(len, p)))
    chosen = chosen[-most:]
    half = len(chosen) // 2
    return Workload([(prompt,) for prompt in chosen[:half]], [(prompt,) for prompt in chosen[half:]])


def random_words(seed: int = SEED) -> Words:
    """Random tokens, for a generated model."""
    rng = np.random.default_rng(seed)
    return lambda n: rng.integers(300, 8000, n).tolist()


def passages(llm: Any, seed: int = SEED) -> Words:
    """English from the agent trace, for a model that was trained on English."""
    text = "\n".join(dict.fromkeys(request["output"] for request in agent.requests()))
    tokens = llm.tokenize(text.encode(), add_bos=False)
    rng = np.random.default_rng(seed)

    def words(n: int) -> list[int]:
        start = rng.integers(len(tokens) - n)
        return tokens[start : start + n]

    return words


def workload(name: str, llm: Any, sizes: Sizes, *, trained: bool) -> Workload:
    words = passages(llm) if trained else random_words()
    if name == "agent":
        return session(
            lambda text: llm.tokenize(text.encode(), add_bos=False), sizes.agent_tokens, sizes.agent_requests
        )
    return {"users": users, "chat": chat, "documents": documents}[name](words, sizes)
