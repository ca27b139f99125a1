"""Locations that look like those of a year of use: trees of prompts with uses, made without a model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from prefixstore.engine.pages import Pages
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import Usage
from tests.support.pages import make_page

PAGE_TOKENS = 256
HOUR, DAY = 3600, 86_400
CAREFUL = "You are a careful assistant of a company that sells bicycles. Answer from the handbook, and say so if it is "
CODING = "You are a coding agent. You have these tools: read_file(path), write_file(path, text), run(command). "
PLAIN = "Translate what the user writes into plain English. Keep names, numbers and the order of the sentences. "
QUESTIONS = (
    "How do I return a bicycle that I bought in June?",
    "My brakes squeal when it rains. What should I do?",
    "Can you cancel my order number 20418, please?",
    "What is the warranty for an electric motor?",
    "Do you ship spare wheels to Norway?",
)
TASKS = ("Fix the failing test of the parser", "Add a --json option to the list command", "Review the last commit")
FILLER = (
    "The chain is cleaned with a dry cloth and oiled every three hundred kilometres, sooner after rain. ",
    "An order can be cancelled until it leaves the warehouse, which is usually the next working day. ",
    "The battery lasts about eighty kilometres in summer, and less when it is cold or the wind is strong. ",
)

Tokenize = Callable[[str], list[int]]


@dataclass
class Tree:
    """A page to be put, and what follows it."""

    tokens: list[int]
    hits: int = 0
    idle: float = 0.0
    age: float = 0.0
    pinned: bool = False
    children: list[Tree] = field(default_factory=list)


def chain(tokens: Sequence[int], hits: int, idle: float, age: float) -> tuple[Tree, Tree]:
    """Pages of these tokens, one after the other: the first and the last one."""
    pages = [Tree(list(tokens[at : at + PAGE_TOKENS]), hits, idle, age) for at in range(0, len(tokens), PAGE_TOKENS)]
    for one, other in pairwise(pages):
        one.children.append(other)
    return pages[0], pages[-1]


def settle(tree: Tree) -> None:
    """A page is used as often as all that follow it together, and at least as lately."""
    for child in tree.children:
        settle(child)
    tree.hits += sum(child.hits for child in tree.children)
    tree.idle = min([tree.idle, *(child.idle for child in tree.children)])
    tree.age = max([tree.age, *(child.age for child in tree.children)])


def put(backend: Pages, space: Namespace, trees: Sequence[Tree], *, size: int, now: float | None = None) -> int:
    """Put trees of pages into a location; their number. `size`: bytes of a token."""
    began = time.time() if now is None else now
    n = 0
    for tree in trees:
        settle(tree)
    with backend.update() as transaction:
        transaction.put_namespace(space.key, space.canonical)
        waiting = [(tree, space.key, 0) for tree in trees]
        while waiting:
            tree, parent, start = waiting.pop()
            payload = bytes(8)
            key, record = make_page(payload, tree.tokens, parent=parent, start=start, namespace=space.key)
            record = replace(record, raw_bytes=size * len(tree.tokens), created=round((began - tree.age) * 1e9))
            record = replace(record, stored_bytes=size * len(tree.tokens) if size else len(payload))
            used = round((began - tree.idle) * 1e9)
            transaction.put(key, record, Usage(used, tree.hits, pinned=tree.pinned), payload)
            waiting += [(child, key, start + len(tree.tokens)) for child in tree.children]
            n += 1
    return n


def space(label: str, *, salt: str | None = None, types: int = 8) -> Namespace:
    settings = {"label": label, "salt": salt, "page_tokens": PAGE_TOKENS, "type_k": types, "type_v": types}
    return Namespace({**settings, "model": label.encode().hex().ljust(64, "0")})


class Life:
    """Prompts of users, always the same ones."""

    def __init__(self, tokenize: Tokenize) -> None:
        self.tokenize = tokenize
        self.random = random.Random(7)

    def text(self, beginning: str, n: int) -> list[int]:
        found = self.tokenize(beginning)
        while len(found) < n:
            found += self.tokenize(self.random.choice(FILLER))
        return found[:n]

    def talk(self, beginning: str, turns: int) -> Tree:
        """A conversation: what follows is used less often."""
        hits, idle = int(self.random.paretovariate(0.9)), min(self.random.expovariate(1 / (4 * DAY)), 80 * DAY)
        first = last = None
        for turn in range(turns + 1):
            tokens = self.text(beginning if turn == 0 else "", self.random.randrange(200, 900))
            part, end = chain(tokens, max(hits - turn, 0), idle, idle + self.random.random() * 20 * DAY)
            if last is not None:
                last.children.append(part)
            first, last = first or part, end
        assert first is not None
        return first

    def talks(self, system: str, n_tokens: int, beginnings: Sequence[str], n: int, turns: int) -> Tree:
        """What many prompts begin with, in whole pages, and what follows it."""
        root, last = chain(self.text(system, n_tokens), 0, HOUR, 60 * DAY)
        root.pinned = last.pinned = system == CAREFUL
        for i in range(n):
            number = f" ({i // len(beginnings) + 1})" if i >= len(beginnings) else ""
            last.children.append(self.talk(f"{beginnings[i % len(beginnings)]}{number} ", self.random.randrange(turns)))
        return root


def lived_in(backend: Pages, tokenize: Tokenize, now: float | None = None) -> int:
    """Chats, agents and documents of two models and two tenants: some 1,000 pages, always the same ones."""
    life = Life(tokenize)
    chats = [life.talks(CAREFUL, 1536, QUESTIONS, 34, 4), life.talks(PLAIN, 512, QUESTIONS, 5, 4)]
    n = put(backend, space("assistant-8B"), chats, size=65_536, now=now)
    for tenant, sessions in (("tools", 14), ("research", 8)):
        agents = life.talks(CODING, 3072, TASKS, sessions, 14)
        n += put(backend, space("coder-32B", salt=tenant), [agents], size=98_304, now=now)
    documents = [life.talk(f"Document {i + 1}: ", 0) for i in range(60)]
    return n + put(backend, space("assistant-8B", types=1), documents, size=131_072, now=now)


def wide(backend: Pages, n: int, *, seed: int = 1) -> int:
    """So many small pages, in trees of many branches: what a report has to draw at once."""
    rng = random.Random(seed)
    trees: list[Tree] = []
    all_of_them: list[Tree] = []
    for i in range(n):
        tree = Tree([rng.randrange(3000), i % 30_000, i // 30_000, 7], int(rng.paretovariate(0.8)) - 1)
        tree.idle = rng.expovariate(1 / (5 * DAY))
        tree.age = tree.idle + DAY
        above = rng.choice(all_of_them) if all_of_them and rng.random() < 0.98 else None
        (above.children if above is not None else trees).append(tree)
        all_of_them.append(tree)
    return put(backend, Namespace({"label": "wide", "salt": None, "page_tokens": 4}), trees, size=0)
