"""A report: its content as JSON, and the page, a self-contained file.

Runs are compact columns instead of one object for each.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

import numpy as np

from prefixstore.counters import DAY
from prefixstore.engine.page_view import PageView
from prefixstore.engine.saved_notes import noted_policy
from prefixstore.format.figures import NOTE, Figures, History
from prefixstore.format.namespace import model_digits
from prefixstore.format.record import Facts
from prefixstore.maintenance.holdings import Holding, holdings_of, in_all, read_facts
from prefixstore.models.file import model_title
from prefixstore.models.vocabulary import Words
from prefixstore.report.labels import labels_of, visible
from prefixstore.report.runs import MOST_RUNS, USES, Column, limited, runs_of

Content: TypeAlias = dict[str, Any]

# Bands of ages in seconds, the shortest last: more than 30 days, up to 30, 7, 1 day, 6 hours, 1 hour.
AGES = (30 * DAY, 7 * DAY, DAY, DAY // 4, DAY // 24)
# digits of a key
DIGITS = 12
# columns of runs that are in the report as they are
SHOWN = ("parent", "space", "tokens", "pages", "snapshots", "bytes", "hits", "least_hits", "pinned", "runs")

PARTS = Path(__file__).with_name("page")
# of a page, and of no other file
BEGIN = "<!doctype html>\n<!-- a report of prefixstore -->\n"
SCRIPTS = ("tree.js", "icicle.js", "panels.js", "main.js")
# in JSON they can only be in texts; so no text can end the element that it is in
ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def content_of(
    view: PageView,
    location: str,
    *,
    words: Words | None = None,
    is_of: Callable[[str], bool] = lambda _: True,
    max_bytes: int | None = None,
    most_runs: int = MOST_RUNS,
    clock: Callable[[], int] = time.time_ns,
) -> Content:
    """What a report says of a location; `location` is its URL, without passwords.

    Without `words` runs are labelled with token ids, and so are, if the location has several models, those of which
    `is_of` says, by their digests, that the words are not theirs. More than `most_runs` are not shown one by one. The
    clock counts nanoseconds since the epoch.
    """
    now = clock()
    found = read_facts(view, now)
    facts = found[found["is_readable"]]
    held = sorted(holdings_of(view, facts), key=lambda one: one.key)
    spaces, total = [one.key for one in held], in_all(held)
    runs = limited(runs_of(facts, spaces, now)[0], most_runs)
    models = [str(one.settings.get("model") or "") for one in held]
    known = {model: len({*models} - {""}) < 2 or not model or is_of(model) for model in {*models}}
    labels, shared = labels_of(view, facts, runs, [words if known[model] else None for model in models])
    history = History.of(view.note(NOTE))
    used = view.used
    keys = "".join(bytes(facts["key"][head]).hex()[:DIGITS] if head >= 0 else " " * DIGITS for head in runs["head"])
    return {
        "location": visible(location),
        "made": now // 10**9,
        "labels": "text" if words is not None else "tokens",
        "policy": visible(noted_policy(view) or ""),
        "used_bytes": used.bytes,
        "max_bytes": max_bytes if max_bytes is not None else history.max_bytes,
        "pages": used.entries,
        "unreadable": len(found) - len(facts),
        "tokens": total.tokens,
        "stored_bytes": total.stored_bytes,
        "raw_bytes": total.raw_bytes,
        "page_uses": total.hits,
        "pinned": total.pinned,
        "spaces": [_space(one, history.models) for one in held],
        "runs": {
            **{name: runs[name].tolist() for name in SHOWN},
            "start": (runs["start"] + np.array(shared, np.int64)).tolist(),
            "idle": _seconds(now, runs["last_used"]).tolist(),
            "age": _seconds(now, runs["created"]).tolist(),
            "keys": keys,
            "labels": labels,
        },
        "bands": _bands(facts, now),
        "days": _asked(history),
    }


def _space(held: Holding, names: Mapping[str, str]) -> dict[str, str]:
    """What a namespace is called. Its settings are those that a user gave, or a model has."""
    return {
        "key": held.key.hex()[:DIGITS],
        "model": visible(model_title(held.settings, names)),
        "digest": visible(model_digits(held.settings)),
        "tenant": visible(str(held.settings.get("salt") or "")),
    }


def _asked(history: History) -> list[tuple[int, ...]]:
    """What was asked of all namespaces on each day, the first one first.

    When it began; prompts of which something was restored, and of which nothing was; their tokens: all, restored, and
    computed; evicted pages.
    """
    found: defaultdict[int, list[Figures]] = defaultdict(list)
    for (day, _), figures in history.days.items():
        found[day].append(figures)
    days = {day: Figures.sum(some) for day, some in sorted(found.items())}
    return [
        (day * DAY, one.hits, one.misses, one.prompt_tokens, one.tokens_restored, one.tokens_computed, one.evictions)
        for day, one in days.items()
    ]


def _seconds(now: int, times: Column) -> Column:
    """Seconds since then; -1 if that is not known."""
    return np.where(times > 0, np.maximum(now - times, 0) // 10**9, -1)


def _age_bands(ages: Column) -> Column:
    """The band of each age: 0 for the longest, or one that is not known."""
    bands = len(AGES) - np.digitize(ages, AGES[::-1], right=True)
    return np.where(ages >= 0, bands, 0)


def _counts(bands: Column, weights: Column, n: int) -> list[int]:
    return [int(count) for count in np.bincount(bands, weights, n)]


def _bands(facts: Facts, now: int) -> dict[str, dict[str, list[int]]]:
    """Pages and bytes in each band of uses, of time since the last use, and of age."""
    last_used = facts["last_used"].astype(np.int64)
    created = facts["created"].astype(np.int64)
    bands = {
        "uses": (np.digitize(facts["hits"], USES), len(USES) + 1),
        "idle": (_age_bands(_seconds(now, last_used)), len(AGES) + 1),
        "age": (_age_bands(_seconds(now, created)), len(AGES) + 1),
    }
    pages = np.ones(len(facts))
    return {
        name: {"pages": _counts(band, pages, n), "bytes": _counts(band, facts["stored_bytes"], n)}
        for name, (band, n) in bands.items()
    }


# -- the page ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _parts() -> tuple[str, str, str]:
    """The frame, the style and the script."""
    script = "".join((PARTS / name).read_text("utf-8") for name in SCRIPTS)
    # one scope: nothing of it is global
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    return BEGIN + (PARTS / "page.html").read_text("utf-8"), (PARTS / "page.css").read_text("utf-8"), script


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def html_of(content: Content) -> str:
    """The page with its content: it runs no script but its own, and cannot connect to anything."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character, escaped in ESCAPED.items():
        data = data.replace(character, escaped)
    frame, style, script = _parts()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; connect-src 'none'; "
        "base-uri 'none'; form-action 'none'"
    )
    title = html.escape(f"prefixstore: {content['location']}")
    # in one pass: what is filled in is not searched
    return Template(frame).substitute(title=title, policy=policy, style=style, data=data, script=script)
