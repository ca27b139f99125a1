"""What a store tells of itself: `Stats`, what it has done and holds; `LastPrompt`, how one prompt was served."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixstore.units import counted, format_bytes, format_seconds


@dataclass(frozen=True)
class Match:
    """What is stored of a prompt.

    Attributes
    ----------
    n_tokens
        Length of the longest stored prefix, in tokens.
    pages
        Keys of the pages that hold it, in order; the last one may reach beyond the prefix.
    bytes
        Size of these pages as stored.
    """

    n_tokens: int
    pages: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class SessionCounts:
    """What the sessions of a store have done since it was opened.

    Attributes
    ----------
    cold, live, store
        Admissions by their source: nothing was reused; what the context held; what was restored from the store.
    evicted
        Sessions that were evicted: by name, or as the least recently used.
    discarded
        Sessions that were discarded: their block ended with an exception, or the contents of the context were unknown.
    stale_leases
        Calls that were refused, because the lease of their session had ended.
    timeouts
        Admissions that were given up with `BusyError`.
    sessions
        How many there are now in this process.
    waiting
        How many admissions wait for the ``Llama``, or have it.
    """

    cold: int
    live: int
    store: int
    evicted: int
    discarded: int
    stale_leases: int
    timeouts: int
    sessions: int
    waiting: int

    def __str__(self) -> str:
        source = f"{self.live} live, {self.store} restored, {self.cold} cold"
        ends = f"{self.discarded} discarded, {self.evicted} evicted"
        refused = f"{counted(self.timeouts, 'timeout')}, {counted(self.stale_leases, 'stale call')}"
        return f"{counted(self.sessions, 'session')}; admitted: {source}; {ends}, {refused}"


@dataclass(frozen=True)
class TierStats:
    """What one of several locations has done since the store was opened.

    Attributes
    ----------
    location
        Its URL.
    is_available
        Whether it is queried: not while its circuit breaker is open.
    pages, bytes
        Pages restored from it, and the size of their states.
    kept
        Pages of the far location that were kept in the nearer one.
    late
        Lookups and restores that gave up waiting for it.
    entries, bytes_used
        Pages in it, and its size; the last known values. Of the far location they are those of this process's last
        commit, and 0 before the first one.
    queued_bytes
        Bytes of captured pages that wait to be written to it.
    dropped
        Captured pages that are not stored there, by reason, as in `Stats`.
    unreadable
        Pages that were found there and could not be restored, by reason, as in `Stats`.
    outages
        How often its circuit breaker opened.
    """

    location: str
    is_available: bool
    pages: int
    bytes: int
    kept: int
    late: int
    entries: int
    bytes_used: int
    queued_bytes: int
    dropped: dict[str, int]
    unreadable: dict[str, int]
    outages: int

    def __str__(self) -> str:
        state = "" if self.is_available else ", not available"
        given = f"{counted(self.pages, 'page')} given ({format_bytes(self.bytes)}), {self.kept} kept, {self.late} late"
        waiting = f"{format_bytes(self.queued_bytes)} waiting, dropped: {_reasons(self.dropped)}"
        return f"{self.location}{state}: {given}, {waiting}"


@dataclass(frozen=True)
class Stats:
    """What a store has done since it was opened, and what its location holds.

    Attributes
    ----------
    hits
        Lookups that restored pages.
    live_hits
        Lookups for which the context already held as many tokens as the store had to offer.
    misses
        Lookups that reused nothing from the store, by reason: ``"not_found"``, ``"diverged"`` (fewer than `min_tokens`
        tokens begin as something stored does), ``"evicted"`` (the first page was, by this process), ``"short"`` (the
        prompt has fewer than `min_tokens` tokens; in a server, too few to ask the store), ``"slow"`` (computing is
        faster), ``"unreadable"`` (what was found could not be used: see `unreadable`; or was late), ``"unavailable"``
        (the location failed), ``"not_live"`` (the slot of a server was believed to hold the prompt),
        ``"bypassed"`` (inside `PrefixStore.bypass`), ``"logprobs"`` (the request needs the logits of the prompt),
        ``"multimodal"`` (images are not in the tokens), ``"streams"`` (states of this context cannot be stored),
        ``"loaded_state"``, ``"changed"`` (the context held more of the prompt than the store, through a state or a
        change with unknown tokens; it was used, and nothing is stored after it),
        ``"sequence_in_use"`` (sequence 1 of the context, which the store needs, is in use), ``"context_replaced"`` (the
        ``Llama`` has a different context from when the store was attached), ``"closed"`` (the ``Llama`` is),
        ``"not_attached"`` (the ``Llama`` could not be attached when it asked: the log says why), ``"error"``.
    unreadable
        Pages that were found but could not be restored, by reason: ``"corrupt"``, ``"vanished"`` (evicted meanwhile),
        ``"undecryptable"`` (rows and payloads that were changed, or whose key is missing),
        ``"incompatible"`` (written or packed by a newer version; it is kept), ``"unavailable"``,
        ``"shape"`` (the checksum matches, but the bytes are not a state of this context), ``"refused"`` (by llama.cpp).
    prompt_tokens
        Tokens of the prompts that were looked up.
    tokens_restored, tokens_computed
        Tokens restored from the store, and tokens computed by ``eval``.
    pages_captured, snapshots_captured
        Pages and snapshots copied out of the context.
    dropped
        Pages that were captured, or should have been, but are not stored, by reason: ``"queue_full"``, ``"slow"``
        (capturing would take longer than computing did), ``"budget"``, ``"quota"`` (the tenant's), ``"admission"``
        (worth less than what would be evicted for them), ``"full"`` (the
        disk or the map), ``"orphan"`` (the parent was evicted), ``"incomplete"`` (a sliding window has moved past it),
        ``"moved_on"`` (the context left the position of a snapshot before its rows were copied), ``"uncut"`` (a state
        of unknown layout: from then on whole states are stored), ``"version"`` (a llama-server writes slot files of an
        unknown version), ``"unavailable"`` (the location failed), ``"closed"`` (the store is, and a completion saves to
        it), ``"error"`` (a fault of the store). While the contents of the context are unknown: ``"attached_late"``
        (something was evaluated before the store was attached), ``"loaded_state"`` (``load_state`` with a state that
        was not saved here), ``"changed"`` (something other than the store used the context), ``"bypassed"`` (something
        was evaluated inside `PrefixStore.bypass`), ``"stepped_back"`` (rewound to where it cannot continue),
        ``"interrupted"``. This ends with the next lookup,
        `PrefixStore.restore` or ``llm.reset()``.
    outdated
        Captured pages and snapshots that were given up before they were written, since the context or the store had
        moved on to something newer, by reason: ``"superseded"`` (a longer page has the same tokens), ``"thinned"``
        (there are enough snapshots along the conversation), ``"deleted"`` (by `PrefixStore.clear`, or with their
        ancestor). Nothing is lost by that. Other captured pages that are not stored are in `dropped`;
        snapshots that the context left behind are there as ``"moved_on"``.
    evictions, expired, corrupt
        Pages that this store evicted for space, removed as expired, and deleted as damaged.
    packed
        Pages that this store has written packed; see `codec`.
    restore_seconds, capture_seconds
        Foreground time spent on restoring and on capturing pages.
    lost_seconds
        Foreground time spent on requests to a location that failed or was slow.
    outages
        How often the circuit breaker opened because of that. A thread probes the location and closes it again.
    late
        Restores that were given up in the middle, since computing the rest was faster, and lookups that did not wait
        for a far location: see `max_delay`.
    seconds_saved
        Time that computing the restored tokens would have taken, at the rate measured here, less `restore_seconds`.
    entries, bytes_used
        Pages in the location, and its size in bytes, index included; the last known values while it is unreachable.
    bytes_stored, bytes_raw
        Size of the payloads as stored, and of the states they decode to.
    queued_bytes
        Bytes captured but not yet written.
    pending_pages, pending_snapshots
        Pages and snapshots captured but not yet written: they are found by lookups of this process already.
    capacity_bytes, capacity_entries
        What the location may hold: `max_bytes` and `max_entries`, None for no limit.
    peak_bytes
        The largest size of the location since the store was opened, as far as this store has seen.
    allocations, frees
        Pages that this store has written, and pages that it has deleted, for whatever reason: evicted, expired,
        damaged, thinned, cleared, or replaced by a longer one.
    free_bytes, utilization
        The unused part of `capacity_bytes`; and the used share of `capacity_bytes` or `capacity_entries`, whichever is
        higher: from 0 to 1, and above if the capacity was larger before.
    tiers
        With several locations, what each has done, the nearest first. Other values about the contents and drops of a
        location are those of the nearest one.
    kind
        What is stored of the context of `PrefixStore.llm`; ``unbound`` if no Llama is attached.
    sessions
        What its sessions have done; None without `PrefixStore.sessions`.
    """

    hits: int
    live_hits: int
    misses: dict[str, int]
    unreadable: dict[str, int]
    prompt_tokens: int
    tokens_restored: int
    tokens_computed: int
    pages_captured: int
    snapshots_captured: int
    dropped: dict[str, int]
    outdated: dict[str, int]
    evictions: int
    expired: int
    corrupt: int
    packed: int
    restore_seconds: float
    capture_seconds: float
    lost_seconds: float
    outages: int
    seconds_saved: float
    entries: int
    bytes_used: int
    bytes_stored: int
    bytes_raw: int
    queued_bytes: int
    pending_pages: int
    pending_snapshots: int
    capacity_bytes: int
    capacity_entries: int | None
    peak_bytes: int
    allocations: int
    frees: int
    kind: str
    sessions: SessionCounts | None = None
    late: int = 0
    tiers: tuple[TierStats, ...] = ()

    @property
    def free_bytes(self) -> int:
        """What is left of the capacity."""
        return max(self.capacity_bytes - self.bytes_used, 0)

    @property
    def utilization(self) -> float:
        """Which share of the capacity is in use."""
        shares = [self.bytes_used / self.capacity_bytes if self.capacity_bytes else 0.0]
        if self.capacity_entries:
            shares.append(self.entries / self.capacity_entries)
        return max(shares)

    def __str__(self) -> str:
        saved = f"{format_seconds(self.seconds_saved)} saved"
        packed = f"{format_bytes(self.bytes_stored)} for {format_bytes(self.bytes_raw)} of state"
        taken = f"{self.pages_captured} and {self.snapshots_captured} snapshots"
        free, capacity = format_bytes(self.free_bytes), format_bytes(self.capacity_bytes)
        pool = f"{free} of {capacity} free, {self.utilization:.0%} in use"
        peak = (
            f"peak {format_bytes(self.peak_bytes)}, {counted(self.allocations, 'page')} written, {self.frees} deleted"
        )
        waiting = f"{counted(self.pending_pages, 'page')}, {counted(self.pending_snapshots, 'snapshot')}"
        gone = f"{self.packed} packed, {self.evictions} evicted, {self.expired} expired"
        lines = {
            "kind": self.kind,
            "lookups": f"{counted(self.hits, 'hit')}, {self.live_hits} live, misses: {_reasons(self.misses)}",
            "outages": f"{self.outages}, {self.lost_seconds:.1f} s lost, {self.late} lookups and restores late",
            "tokens": f"{self.tokens_restored} restored, {self.tokens_computed} computed, {saved}",
            "stored": f"{counted(self.entries, 'page')}, {format_bytes(self.bytes_used)} used, {packed}",
            "pool": f"{pool}, {peak}",
            "pages": f"{taken} captured, {gone}, dropped: {_reasons(self.dropped)}",
            "waiting": f"{waiting}, {format_bytes(self.queued_bytes)}, given up as outdated: {_reasons(self.outdated)}",
        }
        if self.sessions is not None:
            lines["sessions"] = str(self.sessions)
        lines |= {f"tier {n}": str(tier) for n, tier in enumerate(self.tiers, 1)}
        return "\n".join(f"{name:8} {line}" for name, line in lines.items())


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())) or "none"


@dataclass(frozen=True)
class LastPrompt:
    """How a prompt was served for which a store was queried.

    Attributes
    ----------
    source
        ``"store"`` (something was restored), ``"live"`` (nothing had to be: the context held a part of it already) or
        ``"cold"`` (all of it had to be computed).
    n_tokens
        Length of the prompt.
    live, restored, computed
        Tokens of it that the context held, that were restored from the store, and that were computed. Together they are
        `n_tokens` once the prompt is evaluated.
    lookup_seconds
        Time that it took to find out what is stored, and to capture what the context held before.
    restore_seconds
        Time that it took to restore it.
    compute_seconds
        Time that it took to evaluate the tokens that were computed.
    miss
        Why nothing was used from the store: a name in ``Stats.misses``. None if something was restored, or the context
        held as much as the store.
    """

    source: str
    n_tokens: int
    live: int
    restored: int
    computed: int
    lookup_seconds: float
    restore_seconds: float
    compute_seconds: float
    miss: str | None


@dataclass(eq=False)
class PromptMeter:
    """Measures how a prompt is served. Written by the thread that uses the ``Llama``, and read by any."""

    # False for the tokens of a session that is resumed
    is_prompt: bool = field(default=True, kw_only=True)
    # None until it is looked up
    n_tokens: int | None = None
    # how many tokens need not be computed, and how many of these were restored
    reused: int = 0
    restored: int = 0
    # as in `LastPrompt`
    lookup_seconds: float = 0.0
    restore_seconds: float = 0.0
    compute_seconds: float = 0.0
    miss: str | None = None
    _computed: int = 0
    # tokens of the prompt that were not evaluated yet
    _due: int = 0
    _is_begun: bool = False

    def looked_up(self, n_tokens: int, reused: int, seconds: float) -> None:
        """Note that a prompt of this many tokens was looked up: tokens now live (`reused`), and the time it took."""
        self.n_tokens, self.reused = n_tokens, reused
        self.lookup_seconds = max(seconds - self.restore_seconds, 0.0)
        self._due = n_tokens - reused

    def begun(self, n_live: int) -> None:
        """Note that an evaluation begins after this many tokens: the first one shows how many were really reused."""
        if not self._is_begun and self.n_tokens is not None:
            self._is_begun = True
            self.reused = min(n_live, self.n_tokens)
            self._due = self.n_tokens - self.reused

    def evaluated(self, n: int, seconds: float) -> None:
        """Note that this many tokens were evaluated; those after the end of the prompt do not count."""
        if self._due:
            mine = min(n, self._due)
            self._due -= mine
            self._computed += mine
            self.compute_seconds += seconds * mine / n

    def record(self) -> LastPrompt | None:
        """How the prompt was served so far; None if it was not looked up."""
        if self.n_tokens is None:
            return None
        restored = min(self.restored, self.reused)
        live = self.reused - restored
        return LastPrompt(
            source="store" if restored else "live" if live else "cold",
            n_tokens=self.n_tokens,
            live=live,
            restored=restored,
            computed=self._computed,
            # to the microsecond, since people read it
            lookup_seconds=round(self.lookup_seconds, 6),
            restore_seconds=round(self.restore_seconds, 6),
            compute_seconds=round(self.compute_seconds, 6),
            miss=self.miss,
        )
