"""Nine made-up traces for replays: each has a kind of load that the given ones lack. The same for the same seed.

A generator yields prompts as labels of blocks; a block is what its label and those before it say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import islice

import numpy as np

from benchmarks.replay import Prompts

Labels = list[Hashable]


def popular(rng: np.random.Generator, n: int) -> int:
    """A number below `n`; each is asked for about in inverse proportion to its rank."""
    return int((n + 1) ** rng.random()) - 1


def chat(rng: np.random.Generator) -> Iterator[Labels]:
    """Conversations that grow by a block or more each turn; the recent ones are likely to go on."""
    said: list[Labels] = []
    while True:
        if not said or rng.random() < 0.2:
            said.append([("system", int(rng.integers(3)), i) for i in range(2)])
        one = said[-1 - min(int(rng.geometric(0.05)), len(said) - 1)]
        one += rng.integers(1 << 40, size=rng.integers(1, 4)).tolist()
        yield list(one)


def agents(rng: np.random.Generator) -> Iterator[Labels]:
    """Four agents at once: the same tools, and after each step a block more."""
    running: list[Labels] = [[] for _ in range(4)]
    while True:
        i = int(rng.integers(len(running)))
        if not running[i] or rng.random() < 0.08:
            running[i] = [("tools", j) for j in range(10)]
        running[i].append(int(rng.integers(1 << 40)))
        yield list(running[i])


def loop(rng: np.random.Generator) -> Iterator[Labels]:
    """200 documents of 8 blocks, one after another, over and over."""
    while True:
        for document in range(200):
            yield [(document, i) for i in range(8)]


def scan(rng: np.random.Generator) -> Iterator[Labels]:
    """Popular documents, and every fourth prompt a long one that never comes back."""
    while True:
        if rng.random() < 0.25:
            yield rng.integers(1 << 40, size=24).tolist()
        else:
            document = popular(rng, 1000)
            yield [(document, i) for i in range(6)]


def zipf_drift(rng: np.random.Generator) -> Iterator[Labels]:
    """Popular documents; which ones are popular changes slowly."""
    for at in range(1 << 40):
        document = at // 10 + popular(rng, 1000)
        yield [(document, i) for i in range(6)]


def rag(rng: np.random.Generator) -> Iterator[Labels]:
    """A system prompt, two documents in the order in which they were found, and a question."""
    while True:
        found = [popular(rng, 100) for _ in range(2)]
        yield ["system", *((one, i) for one in found for i in range(3)), int(rng.integers(1 << 40))]


def tenants(rng: np.random.Generator) -> Iterator[Labels]:
    """Eight tenants, each half as active as the one before, with documents of their own."""
    while True:
        tenant = int(min(rng.geometric(0.5), 8))
        document = popular(rng, 100 * tenant)
        yield [tenant, *((document, i) for i in range(6)), int(rng.integers(4))]


def bursts(rng: np.random.Generator) -> Iterator[Labels]:
    """Sessions of eight requests in a row, two at a time, that never come back."""
    sessions: list[list[Labels]] = [[], []]
    while True:
        one = sessions[int(rng.integers(2))]
        if len(one) % 8 == 0:
            one[:] = [["system", int(rng.integers(1 << 40))]]
        else:
            one.append([*one[-1], *rng.integers(1 << 40, size=2).tolist()])
        yield one[-1]


def uniform(rng: np.random.Generator) -> Iterator[Labels]:
    """One of 1,000 prompts of four blocks, all as likely as the others."""
    while True:
        prompt = int(rng.integers(1000))
        yield [(prompt, i) for i in range(4)]


TRACES: dict[str, Callable[[np.random.Generator], Iterator[Labels]]] = {
    made.__name__.replace("_", "-"): made
    for made in (chat, agents, loop, scan, zipf_drift, rag, tenants, bursts, uniform)
}


def prompts(name: str, n_requests: int) -> Prompts:
    """The first requests of a trace, as numbers of blocks."""
    numbers: dict[tuple[int, Hashable], int] = {}
    found: Prompts = []
    for labels in islice(TRACES[name](np.random.default_rng(11)), n_requests):
        found.append([])
        for label in labels:
            before = found[-1][-1] if found[-1] else -1
            found[-1].append(numbers.setdefault((before, label), len(numbers)))
    return found
