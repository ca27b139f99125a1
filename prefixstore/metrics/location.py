"""Prometheus metrics of a location without a store: for the textfile collector of node_exporter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from prefixstore.engine.page_view import Used
from prefixstore.format.figures import DAY, HOUR, History
from prefixstore.metrics.exposition import import_prometheus, new_registry, render
from prefixstore.metrics.labels import OTHER
from prefixstore.metrics.stores import GAUGES
from prefixstore.stats import Purpose

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["MOST_MODELS", "Share", "location_text"]

# the largest ones have series of their own; all others are one
MOST_MODELS = 50
# characters of a label that a user has chosen
LABEL_LENGTH = 64


class Share(NamedTuple):
    """What a location holds of one model.

    Attributes
    ----------
    model
        The first digits of the digest of its file.
    label
        The name of the namespace.
    pages, tokens, stored_bytes, state_bytes
        Pages, their tokens, and the sizes of their payloads and of their states.
    hits
        How often the pages were used.
    pinned
        How many of them are pinned.
    """

    model: str
    label: str
    pages: int
    tokens: int
    stored_bytes: int
    state_bytes: int
    hits: int
    pinned: int


SHARES = {
    "model_pages": ("pages", "Pages of a model."),
    "model_tokens": ("tokens", "Tokens in the pages of a model."),
    "model_stored_bytes": ("stored_bytes", "Size of the payloads of a model, as stored."),
    "model_state_bytes": ("state_bytes", "Size of the states that the payloads of a model decode to."),
    "model_hits": ("hits", "How often the stored pages of a model were used."),
    "model_pinned_pages": ("pinned", "Pages of a model that are pinned."),
}


# by the name of the gauge: what the figures call it
FIGURES = {
    "kept_prompt_tokens": ("prompt_tokens", "Tokens of the prompts that were looked up, as recorded in the location."),
    "kept_restored_tokens": ("tokens_restored", "Tokens that were restored, as recorded in the location."),
    "kept_computed_tokens": ("tokens_computed", "Tokens that were computed, as recorded in the location."),
    "kept_saved_seconds": ("seconds_saved", "Time saved by restoring, as recorded in the location."),
    "kept_evicted_pages": ("evictions", "Pages that were evicted, as recorded in the location."),
}
WINDOWS = {"hour": HOUR, "day": DAY, "year": None}


def location_text(
    used: Used, shares: Iterable[Share], max_bytes: int | None = None, history: History | None = None
) -> str:
    """What a location holds: in total, and by model, all tenants together.

    Parameters
    ----------
    used
        Of the location.
    shares
        What it holds of its namespaces.
    max_bytes
        What it may hold, if that is known.
    history
        How it was used: of the last hour, day and year, by purpose.

    Raises
    ------
    MissingExtraError
        If prometheus_client is not installed.
    """
    gauge, registry = import_prometheus().Gauge, new_registry()
    models = _by_model(shares)

    def tell(name: str, value: float, *tier: str) -> None:
        labels = ("tier",) * len(tier)
        made = gauge(f"prefixstore_{name}", GAUGES[name], labels, registry=registry)
        (made.labels(*tier) if tier else made).set(value)

    tell("used_bytes", used.bytes, "location")
    if max_bytes is not None:
        tell("budget_bytes", max_bytes, "location")
    tell("pages", used.entries)
    tell("stored_bytes", sum(one.stored_bytes for one in models))
    tell("state_bytes", sum(one.state_bytes for one in models))
    for name, (field, text) in SHARES.items():
        made = gauge(f"prefixstore_{name}", text, ("model", "label"), registry=registry)
        for one in models:
            made.labels(one.model, one.label).set(getattr(one, field))
    if history is not None:
        _tell_history(gauge, registry, history)
    return render(registry)[0].decode()


def _tell_history(gauge: Any, registry: CollectorRegistry, history: History) -> None:
    labels = ("window", "purpose")
    text = "Lookups by the source of the reused prefix, as recorded in the location."
    lookups = gauge("prefixstore_kept_lookups", text, (*labels, "source"), registry=registry)
    gauges = {name: gauge(f"prefixstore_{name}", FIGURES[name][1], labels, registry=registry) for name in FIGURES}
    for window, seconds in WINDOWS.items():
        for purpose in Purpose:
            found = history.total(seconds, purpose=purpose)
            lookups.labels(window, purpose.value, "store").set(found.hits)
            lookups.labels(window, purpose.value, "live").set(found.live_hits)
            lookups.labels(window, purpose.value, "none").set(sum(found.misses.values()))
            for name, made in gauges.items():
                made.labels(window, purpose.value).set(getattr(found, FIGURES[name][0]))


def _by_model(shares: Iterable[Share]) -> list[Share]:
    """One share for each model and label, the largest first, and those beyond `MOST_MODELS` as one."""
    groups: defaultdict[tuple[str, str], list[Share]] = defaultdict(list)
    for share in shares:
        groups[share.model, share.label[:LABEL_LENGTH]].append(share)
    models = sorted((_sum(*names, some) for names, some in groups.items()), key=lambda one: -one.stored_bytes)
    rest = models[MOST_MODELS:]
    return models[:MOST_MODELS] + ([_sum(OTHER, OTHER, rest)] if rest else [])


def _sum(model: str, label: str, shares: Iterable[Share]) -> Share:
    return Share(model, label, *map(sum, zip(*(share[2:] for share in shares), strict=True)))
