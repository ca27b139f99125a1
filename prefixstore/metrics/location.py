"""Prometheus metrics of a location without a store: for the textfile collector of node_exporter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prefixstore.engine.page_view import Used
from prefixstore.format.figures import History
from prefixstore.format.namespace import model_digits
from prefixstore.metrics.exposition import OTHER, import_prometheus, new_registry, render
from prefixstore.metrics.stores import METRICS

if TYPE_CHECKING:
    from prefixstore.maintenance.holdings import Holding

__all__ = ["MOST_MODELS", "location_text"]

# the largest ones have series of their own; all others are one
MOST_MODELS = 50
# characters of a label that a user has chosen
LABEL_LENGTH = 64
# by the name of the gauge: what a holding calls it
HOLDINGS = {
    "model_pages": ("pages", "Pages of a model."),
    "model_tokens": ("tokens", "Tokens in the pages of a model."),
    "model_stored_bytes": ("stored_bytes", "Size of the payloads of a model, as stored."),
    "model_state_bytes": ("raw_bytes", "Size of the states that the payloads of a model decode to."),
    "model_hits": ("hits", "How often the stored pages of a model were used."),
    "model_pinned_pages": ("pinned", "Pages of a model that are pinned."),
}
# by the name of the gauge: what the figures call it
FIGURES = {
    "kept_hits": ("hits", "Prompts of which something was restored, as recorded in the location."),
    "kept_misses": ("misses", "Prompts for which the store had nothing, as recorded in the location."),
    "kept_prompt_tokens": ("prompt_tokens", "Tokens of the prompts that were looked up, as recorded in the location."),
    "kept_restored_tokens": ("tokens_restored", "Tokens that were restored, as recorded in the location."),
    "kept_computed_tokens": ("tokens_computed", "Tokens that were computed, as recorded in the location."),
    "kept_saved_seconds": ("seconds_saved", "Time saved by restoring, as recorded in the location."),
    "kept_written_pages": ("allocations", "Pages that were written, as recorded in the location."),
    "kept_evicted_pages": ("evictions", "Pages that were evicted, as recorded in the location."),
}
# days, today included
WINDOWS = {"day": 1, "week": 7, "month": None}


def location_text(
    used: Used, holdings: Iterable[Holding], max_bytes: int | None = None, history: History | None = None
) -> str:
    """What a location holds, in total and by model, all tenants together; and how it was used in 1, 7 and 31 days.

    Raises `MissingExtraError`.
    """
    client, registry = import_prometheus(), new_registry()

    def gauge(name: str, text: str, *labels: str) -> Any:
        return client.Gauge(f"prefixstore_{name}", text, labels, registry=registry)

    models = _by_model(holdings)
    gauge("used_bytes", METRICS["used_bytes"].text, "tier").labels("location").set(used.bytes)
    if max_bytes is not None:
        gauge("budget_bytes", METRICS["budget_bytes"].text, "tier").labels("location").set(max_bytes)
    gauge("pages", METRICS["pages"].text).set(used.entries)
    for name, field in (("stored_bytes", "stored_bytes"), ("state_bytes", "raw_bytes")):
        gauge(name, METRICS[name].text).set(sum(held[field] for held in models.values()))
    for name, (field, text) in HOLDINGS.items():
        made = gauge(name, text, "model", "label")
        for labels, held in models.items():
            made.labels(*labels).set(held[field])
    if history is not None:
        for name, (field, text) in FIGURES.items():
            made = gauge(name, text, "window")
            for window, days in WINDOWS.items():
                made.labels(window).set(getattr(history.total(days), field))
    return render(registry)[0].decode()


def _by_model(holdings: Iterable[Holding]) -> dict[tuple[str, str], Counter[str]]:
    """What there is of each model and label, the largest first, and of those beyond `MOST_MODELS` together.

    Neither keys of namespaces nor tenants are told, of which there can be any number.
    """
    found: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in holdings:
        settings = one.namespace.settings if one.namespace is not None else {}
        labels = model_digits(settings), str(settings.get("label") or "")[:LABEL_LENGTH]
        found[labels].update({field: getattr(one, field) for field, _ in HOLDINGS.values()})
    shown: dict[tuple[str, str], Counter[str]] = {}
    for i, (labels, held) in enumerate(sorted(found.items(), key=lambda each: -each[1]["stored_bytes"])):
        shown.setdefault(labels if i < MOST_MODELS else (OTHER, OTHER), Counter()).update(held)
    return shown
