"""`History`: how a location was used, as counts by hour and by day, for each namespace and purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from prefixstore.format.namespace import Namespace
from prefixstore.stats import Purpose, Request, short

__all__ = [
    "DAY",
    "HOUR",
    "LATEST",
    "LONGEST_NAME",
    "MINUTE",
    "OTHERS",
    "WEEK",
    "Described",
    "Figures",
    "History",
    "Period",
    "Writer",
]

# seconds
MINUTE = 60
HOUR = 3600
DAY = 86_400
WEEK = 604_800
# the last one that is a date: at the end of the year 9999
LATEST = 253_402_300_799
# the namespace of what is counted together, where there are too many namespaces
OTHERS = ""
# characters of names that users have chosen
LONGEST_NAME = 200
# misses of prompts that were to bypass the store: they say nothing about it
PASSED = frozenset({"bypassed", "session"})


@dataclass(frozen=True)
class Figures:
    """What was counted. The names are those of `Stats`.

    Attributes
    ----------
    hits, live_hits
        Lookups that restored something, and those for which the context held as much as the store already.
    misses
        Lookups that reused nothing from the store, by reason.
    prompt_tokens, tokens_restored, tokens_computed
        Tokens of prompts that were looked up, those that were restored, and those that were computed, those of the
        answers too.
    seconds_saved
        Time by which restoring was faster than computing.
    evictions
        Pages that were evicted for space.
    """

    hits: int = 0
    live_hits: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    tokens_restored: int = 0
    tokens_computed: int = 0
    seconds_saved: float = 0.0
    evictions: int = 0

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Figures:
        """The figures in counts, by the names that `Counters` has for them."""
        return cls(
            counts.get("hits", 0),
            counts.get("live_hits", 0),
            {name.partition(":")[2]: n for name, n in sorted(counts.items()) if name.startswith("miss:")},
            counts.get("prompt_tokens", 0),
            counts.get("tokens_restored", 0),
            counts.get("tokens_computed", 0),
            counts.get("saved_microseconds", 0) / 1e6,
            counts.get("evictions", 0),
        )

    @classmethod
    def sum(cls, figures: Iterable[Figures]) -> Figures:
        """All of these together."""
        some = list(figures)
        misses: Counter[str] = Counter()
        for one in some:
            misses.update(one.misses)
        names = [each.name for each in fields(cls) if each.name != "misses"]
        sums = {name: sum(getattr(one, name) for one in some) for name in names}
        return cls(misses=dict(sorted(misses.items())), **sums)

    @property
    def lookups(self) -> int:
        """How many prompts were looked up."""
        return self.hits + self.live_hits + sum(self.misses.values())

    @property
    def hit_rate(self) -> float | None:
        """The share of lookups that restored something, from 0 to 1; None without any.

        Lookups do not count if the context held as much already, or if the caller went past the store: the store had
        nothing to give for them.
        """
        asked = self.hits + sum(n for reason, n in self.misses.items() if reason not in PASSED)
        return self.hits / asked if asked else None

    @property
    def restored_share(self) -> float | None:
        """The share of prompt tokens that were restored, from 0 to 1; None without any."""
        return self.tokens_restored / self.prompt_tokens if self.prompt_tokens else None

    def as_dict(self) -> dict[str, object]:
        """All of it, for JSON, the rates rounded."""
        return {
            "lookups": self.lookups,
            "hits": self.hits,
            "live_hits": self.live_hits,
            "misses": dict(self.misses),
            "hit_rate": _rounded(self.hit_rate),
            "prompt_tokens": self.prompt_tokens,
            "tokens_restored": self.tokens_restored,
            "tokens_computed": self.tokens_computed,
            "restored_share": _rounded(self.restored_share),
            "seconds_saved": round(self.seconds_saved, 3),
            "evictions": self.evictions,
        }


def _rounded(share: float | None) -> float | None:
    return round(share, 4) if share is not None else None


@dataclass(frozen=True)
class Period:
    """What was counted in an hour, a day or a minute, of one namespace, for one purpose.

    Attributes
    ----------
    start, seconds
        When it began, in seconds since the epoch (UTC), and how long it is: 60, 3600 or 86400.
    namespace
        The first 16 digits of the key of the namespace; `OTHERS` (empty) for several together.
    purpose
        ``"serving"``, ``"warming"`` or ``"maintenance"``.
    figures
        What was counted.
    """

    start: int
    seconds: int
    namespace: str
    purpose: str
    figures: Figures


@dataclass(frozen=True)
class Described:
    """What a namespace is, for readers.

    Attributes
    ----------
    namespace
        The first 16 digits of its key.
    tenant, label
        Its salt, and the name that the user gave it.
    model
        The first 12 digits of the digest of the model's file.
    name, quantization
        What the model's file says: ``general.name``, and its type, such as ``"Q4_K_M"``.
    type_k, type_v
        Types of the KV cache, such as ``"f16"``.
    """

    namespace: str
    tenant: str | None = None
    label: str | None = None
    model: str | None = None
    name: str | None = None
    quantization: str | None = None
    type_k: str | None = None
    type_v: str | None = None

    @classmethod
    def of(cls, namespace: Namespace, names: Mapping[str, str | None] | None = None) -> Described:
        """What a namespace is, from its settings and from what a file of the model says."""

        def text(value: object) -> str | None:
            return str(value)[:LONGEST_NAME] if value not in (None, "") else None

        settings = namespace.settings
        return cls(
            short(namespace.key),
            text(settings.get("salt")),
            text(settings.get("label") or settings.get("server")),
            (text(settings.get("model")) or "")[:12] or None,
            **{name: text(value) for name, value in (names or {}).items()},
        )

    @property
    def title(self) -> str:
        """The model as one text, with its quantization and the types of its KV cache if they are not f16."""
        name = self.name or self.label or self.model or "unknown"
        if self.quantization and self.quantization.lower() not in name.lower():
            name += f" {self.quantization}"
        kinds = dict.fromkeys(kind for kind in (self.type_k, self.type_v) if kind is not None)
        return name if set(kinds) <= {"f16"} else f"{name} (KV {'/'.join(kinds)})"


@dataclass(frozen=True)
class Writer:
    """A process that writes to the location, as of its last commit with figures.

    Attributes
    ----------
    writer
        A random id of its store.
    at
        When that was, in seconds since the epoch.
    pending_pages, queued_bytes
        What it had captured and not yet written then, after that commit.
    """

    writer: str
    at: float
    pending_pages: int
    queued_bytes: int


@dataclass(frozen=True)
class History:
    """What a location tells of how it was used.

    Attributes
    ----------
    at
        When it was read, in seconds since the epoch.
    minutes
        Of the last hour, by minute: serving only, all namespaces together.
    hours
        Of the last week, the running hour included, by namespace and purpose.
    days
        Of the last year, today included, by namespace and purpose.
    described
        What the namespaces are, by the first 16 digits of their keys.
    requests
        The last prompts, the oldest first.
    writers
        The processes that have written in the last hour.
    max_bytes, max_entries
        The budget of the store that was the last to write; None if that is not known, or there is no limit.
    """

    at: float
    minutes: tuple[Period, ...] = ()
    hours: tuple[Period, ...] = ()
    days: tuple[Period, ...] = ()
    described: Mapping[str, Described] = field(default_factory=dict)
    requests: tuple[Request, ...] = ()
    writers: tuple[Writer, ...] = ()
    max_bytes: int | None = None
    max_entries: int | None = None

    @property
    def since(self) -> int | None:
        """When the first of the days began, in seconds since the epoch; None if nothing was counted."""
        return min((one.start for one in self.days), default=None)

    def periods(self, seconds: float | None = None) -> tuple[Period, ...]:
        """The periods of the last `seconds`, by namespace and purpose; None for all days.

        Hours for up to a week, and days beyond. The period in which the time began is included, and so is what
        a clock that was wrong has put into the future.
        """
        if seconds is None:
            return self.days
        periods = self.hours if seconds <= WEEK else self.days
        return tuple(one for one in periods if one.start + one.seconds > self.at - seconds)

    def total(
        self, seconds: float | None = None, *, purpose: str = Purpose.SERVING, namespaces: Iterable[str] | None = None
    ) -> Figures:
        """What was counted for a purpose in the last `seconds` (None: in all days), of some namespaces, or of all.

        The last hour of all that was served is told to the minute. Of some namespaces, or of another purpose, it is the
        running hour and the one before, and the last day the running hour and 24 before.
        """
        wanted = None if namespaces is None else set(namespaces)
        if wanted is None and purpose == Purpose.SERVING and seconds is not None and seconds <= HOUR:
            return Figures.sum(one.figures for one in self.minutes if one.start + one.seconds > self.at - seconds)
        return Figures.sum(
            one.figures
            for one in self.periods(seconds)
            if one.purpose == purpose and (wanted is None or one.namespace in wanted)
        )

    def describe(self, namespace: str) -> Described:
        """What a namespace is; of one that is not known, only its digits."""
        return self.described.get(namespace) or Described(namespace)
