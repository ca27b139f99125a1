"""The figures of use that a location keeps, by model and by tenant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prefixstore.engine.history import described
from prefixstore.format.figures import OTHERS, Described, Figures, History
from prefixstore.maintenance.archive import Holding
from prefixstore.models.file import model_names

__all__ = ["Group", "by_model", "by_tenant", "described_of"]


@dataclass(frozen=True)
class Group:
    """What a location holds of one model or tenant, and how it was used.

    Attributes
    ----------
    title
        Its name.
    pages, tokens, stored_bytes
        What is stored.
    figures
        What was counted while it served.
    """

    title: str
    pages: int
    tokens: int
    stored_bytes: int
    figures: Figures

    def as_dict(self, name: str) -> dict[str, object]:
        """All of it, for JSON; its title as `name`."""
        sizes = {"pages": self.pages, "tokens": self.tokens, "stored_bytes": self.stored_bytes}
        return {name: self.title, **sizes, **self.figures.as_dict()}


def by_model(history: History, holdings: Iterable[Holding]) -> list[Group]:
    """What is stored and was counted of each model, with its quantization and KV types; the largest first."""
    return _groups(history, holdings, lambda one: one.title)


def by_tenant(history: History, holdings: Iterable[Holding]) -> list[Group]:
    """As `by_model`, of each tenant (salt); pages without one are those of the tenant ``""``."""
    return _groups(history, holdings, lambda one: one.tenant or "")


def described_of(history: History, holding: Holding) -> Described:
    """What the namespace of a holding is: as the figures describe it, or else by its settings."""
    name = holding.key.hex()[:16]
    if name in history.described:
        return history.described[name]
    if holding.namespace is None:
        return Described(name)
    return described(holding.namespace, model_names({}, holding.namespace.settings))


def _groups(history: History, holdings: Iterable[Holding], title: Callable[[Described], str]) -> list[Group]:
    figures: defaultdict[str, list[Figures]] = defaultdict(list)
    held: defaultdict[str, list[Holding]] = defaultdict(list)
    known = dict(history.described)
    for holding in holdings:
        one = described_of(history, holding)
        known[one.namespace] = one
        held[title(one)].append(holding)
    for period in history.days:
        if period.purpose == "serving":
            one = known.get(period.namespace) or Described(period.namespace)
            figures["others" if period.namespace == OTHERS else title(one)].append(period.figures)
    found = [
        Group(
            name,
            sum(one.pages for one in held[name]),
            sum(one.tokens for one in held[name]),
            sum(one.stored_bytes for one in held[name]),
            Figures.sum(figures[name]),
        )
        for name in dict.fromkeys([*held, *figures])
    ]
    return sorted(found, key=lambda one: (-one.stored_bytes, -one.figures.lookups, one.title))
