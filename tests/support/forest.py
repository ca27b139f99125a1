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
SYSTEM = (
    "You are a careful assistant of a company that sells bicycles. Answer from the handbook, and say so if it is ",
    "You are a coding agent. You have these tools: read_file(path), write_file(path, text), run(command). ",
    "Translate what the user writes into plain English. Keep names, numbers and the order of the sentences. ",
)
QUESTIONS = (
    "How do I return a bicycle that I bought in June?",
    "My brakes squeal when it rains. What should I do?",
    "Which size of frame do I need? I am 178 cm tall.",
    "Can you cancel my order number 20418, please?",
    "What is the warranty for an electric motor?",
    "Where can I try the touring bike near Bremen?",
    "Is the child seat compatible with a belt drive?",
    "Write a friendly answer to this complaint:",
    "Summarise the last five reviews of the trailer.",
    "Do you ship spare wheels to Norway?",
)
TASKS = (
    "Fix the failing test of the parser",
    "Add a --json option to the list command",
    "Why does the import take ten seconds? Find out",
    "Rename the class Turnstile to HandleLock",
    "Write docs for the new configuration file",
    "Upgrade to version 3 of the HTTP library",
    "Here is a traceback. What is wrong?",
    "Make the queue survive a restart",
    "Review the last commit, and be strict",
    "Port the build to the new container image",
    "Explain how the cache decides what to evict",
    "Find the memory leak in the uploader",
    "Delete everything that is not used any more",
    "Translate the messages into German",
)
OPENINGS = ("", "I asked twice already.", "Thank you!", "It is urgent,", "My name is Ola.")
TITLES = ("Handbook", "Invoice", "Parts list", "Minutes", "Price list", "Manual", "Contract", "Letter")
FILLER = (
    "The chain is cleaned with a dry cloth and oiled every three hundred kilometres, sooner after rain. ",
    "An order can be cancelled until it leaves the warehouse, which is usually the next working day. ",
    "Torque for the stem bolts is five newton metres; carbon parts need assembly paste and a good wrench. ",
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

    def text(self, n: int) -> list[int]:
        found: list[int] = []
        while len(found) < n:
            found += self.tokenize(self.random.choice(FILLER))
        return found[:n]

    def uses(self) -> int:
        return int(self.random.paretovariate(0.9)) - 1

    def idle(self) -> float:
        return min(self.random.expovariate(1 / (4 * DAY)), 80 * DAY)

    def beginning(self, text: str, n: int, idle: float, age: float) -> tuple[Tree, Tree]:
        """What many prompts begin with, in whole pages."""
        tokens = self.tokenize(text)
        return chain(tokens + self.text(n - len(tokens)), 0, idle, age)

    def talk(self, beginning: str, n: int, turns: int, hits: int, idle: float) -> Tree:
        """A conversation: what follows is used less often."""
        tokens = self.tokenize(beginning) + self.text(n)
        first, last = chain(tokens, hits, idle, idle + self.random.random() * 20 * DAY)
        for turn in range(turns):
            more = self.text(self.random.randrange(200, 900))
            part, end = chain(more, max(hits - turn, 0), idle, idle + self.random.random() * 3 * DAY)
            last.children.append(part)
            last = end
        return first

    def chats(self) -> list[Tree]:
        found = []
        for text, n, users in ((SYSTEM[0], 1536, 34), (SYSTEM[2], 512, 12)):
            root, last = self.beginning(text, n, HOUR / 3, 60 * DAY)
            root.pinned = last.pinned = text == SYSTEM[0]
            for i in range(users):
                question = f"{QUESTIONS[i % len(QUESTIONS)]} {OPENINGS[i // len(QUESTIONS)]} "
                size, turns = self.random.randrange(60, 500), self.random.randrange(4)
                last.children.append(self.talk(question, size, turns, self.uses(), self.idle()))
            found.append(root)
        return found

    def agents(self, sessions: int, first: int) -> list[Tree]:
        root, last = self.beginning(SYSTEM[1], 3072, HOUR, 40 * DAY)
        for i in range(first, first + sessions):
            task = f"{TASKS[i % len(TASKS)]}. "
            last.children.append(self.talk(task, 700, self.random.randrange(3, 14), self.uses() + 1, self.idle()))
        return [root]

    def documents(self, n: int) -> list[Tree]:
        titles = (f"{TITLES[i % len(TITLES)]} {i + 1}: " for i in range(n))
        size = self.random.randrange
        return [self.talk(title, size(300, 1800), 0, self.uses() // 2, 3 * self.idle()) for title in titles]


def lived_in(backend: Pages, tokenize: Tokenize, now: float | None = None) -> int:
    """Chats, agents and documents of two models and two tenants: some 1,000 pages, always the same ones."""
    life = Life(tokenize)
    n = put(backend, space("assistant-8B"), life.chats(), size=65_536, now=now)
    n += put(backend, space("coder-32B", salt="tools"), life.agents(14, 0), size=98_304, now=now)
    n += put(backend, space("coder-32B", salt="research"), life.agents(8, 5), size=98_304, now=now)
    return n + put(backend, space("assistant-8B", types=1), life.documents(60), size=131_072, now=now)


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
