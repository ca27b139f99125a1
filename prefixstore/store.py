"""`PrefixStore`, the public class: an engine, and the hook that connects it to a ``Llama``."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prefixstore.backends import is_shared
from prefixstore.engine.budget import Evicted
from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Path
from prefixstore.engine.invariants import Violation
from prefixstore.engine.queue import Drained
from prefixstore.errors import (
    ClosedError,
    InvalidParameterError,
    MissingExtraError,
    MisuseError,
    NotAttachedError,
    StorageError,
)
from prefixstore.format.figures import History
from prefixstore.format.keys import Tokens, TokenSequence, as_tokens
from prefixstore.format.namespace import Namespace
from prefixstore.last_prompt import LastPrompt, PromptMeter
from prefixstore.llama.bypass import Bypass
from prefixstore.opening import Locations, locations_of, open_engine
from prefixstore.parameters import Parameters
from prefixstore.stats import Kind, Stats
from prefixstore.units import parse_bytes, parse_seconds, parse_target, shown

if TYPE_CHECKING:
    from llama_cpp import Llama
    from llama_cpp.llama import LlamaState
    from typing_extensions import Self

    from prefixstore.diagnosis.explanation import Explanation
    from prefixstore.llama.hook import Hook
    from prefixstore.llama.portable.hook import PortableHook
    from prefixstore.sessions.sessions import Sessions
    from prefixstore.traces.recorder import Recorder
    from prefixstore.warming.prompts import PromptLike

__all__ = ["Match", "PrefixStore"]

log = logging.getLogger("prefixstore")


def _inside(wrapper: object) -> str:
    """Where the Llama is in an object of another library, such as langchain's."""
    names = ("client", "llm", "model", "_model", "_llm")
    found = next((name for name in names if hasattr(getattr(wrapper, name, None), "_ctx")), None)
    return f"; the Llama in it is its attribute .{found}: pass llm.{found}" if found is not None else ""


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


class PrefixStore:
    """A persistent prefix cache for llama-cpp-python.

    Parameters
    ----------
    location
        ``"lmdb:///path"``, a bare path (LMDB as well), ``"sqlite:////path"``, ``"postgresql+psycopg://user@host/db"``,
        ``"valkey://host:6379/0"``, ``"s3://bucket/prefix"``, ``"memory:"`` (pages of this store's own),
        ``"memory://name"`` (one memory for all stores of this process that name it, with the same `max_bytes`, until
        the last one is closed), or None for the location named by the environment variable ``PREFIXSTORE_LOCATION``,
        or else LMDB in the user's cache directory. A list of two, such as
        ``["lmdb:///var/cache/kv", "s3://team/kv"]``, is a local location in front of one that several machines share.
    llm
        The ``llama_cpp.Llama`` to attach to; it may also be attached later. The store does not keep it alive.
    namespace
        A name that separates this store's pages from others in the same location, in addition to the model's
        fingerprint. A store with a name and without an `llm` can be the cache of any ``Llama``: it works on the
        ``LlamaState`` objects of llama-cpp-python, and shares its pages with attached stores of the same `namespace`
        and `salt`. Without a name, this works only if the location is ``"memory:"``; otherwise `attach` it first.
    salt
        Separates pages as `namespace` does, for tenants that must not share them.
    page_tokens
        Tokens in a page. A model with a shorter sliding window gets shorter pages.
    min_tokens
        Sequences shorter than this are neither stored nor restored.
    snapshot_interval
        For models whose memory cannot step back (recurrent, hybrid): tokens between snapshots, in addition to
        snapshots at message starts, before the last token of a prompt, and at the end of a turn.
    max_snapshots
        How many snapshots along one conversation are kept; older ones are spaced further apart.
    max_bytes
        Size limit of the location, index included: bytes, or text such as ``"20GiB"`` or ``"500MB"``. It applies
        to the whole location; each process that writes enforces its own limit.
    max_entries
        Limit on the number of pages in the location; None for no limit.
    high_water, low_water
        Shares of both limits. When more than `high_water` is in use, the background thread frees space down to
        `low_water`, so that there is space for the next pages: it packs pages (see `codec`), and evicts when there is
        nothing left to pack.
    quota
        Limit for one tenant: a size, for each namespace and for all namespaces of a `salt` together, or
        ``{"namespace": size, "salt": size}``. A tenant with a quota evicts its own pages first, so it evicts those of
        others only when it has none left.
    ttl
        Time to live after the last use: seconds, a `timedelta`, or text such as ``"30d"``. It applies to the pages that
        this store writes. A page outlives the pages that continue it, and a pinned page never expires. None for no
        limit.
    ram_bytes
        Memory for states of hot pages, decoded and verified, in front of the location: bytes, or text. None to keep no
        states in RAM.
    codec
        How pages are packed: ``"raw"``, ``"zstd"`` or ``"zstd:LEVEL"``, ``"planes"`` (high and low bytes
        of 16-bit values split, then zstd), or ``"auto"``, which tries the codecs on the first pages of a namespace, and
        again from time to time: while there is space, it compresses only where that barely slows restores (a slow
        disk, a server), and keeps pages raw in a local file that fits into memory. When the location is full, the
        background thread packs the pages that would be evicted first before it evicts any; a packed page that is
        restored becomes raw again when there is space.
    policy
        Which pages are evicted first, among those that no other page depends on: ``"adaptive"``, which learns from the
        prompts of this process which pages are used again; ``"lru"``, ``"lfu"``, ``"longest_first"``, or
        ``"priority"``.
    priority
        Priority of the pages that this store writes, for the policy ``"priority"``: from -32768 (evicted first) to
        32767.
    read_only
        Restore from an existing store, and never write to it.
    write_behind
        Whether a background thread packs and writes pages, and frees space in idle time. If not, the completion waits
        for pages to be written, and space is freed when a page needs it.
    queue_bytes
        Memory for pages that wait to be written. A page that does not fit is captured later, or not at all. A far
        location has a second queue of the same size.
    max_delay
        How long a prompt may take beyond computing it, because the location is slow: seconds, a `timedelta`, or text
        such as ``"2s"``; or 5 % of the computing time, if that is more. Tokens not restored by then are computed.
        A lookup waits just as long for a far location. None for no limit.
    far_max_bytes
        With two locations: the size limit of the far one; by default `max_bytes`, the limit of the nearer one.

    Raises
    ------
    InvalidParameterError
        If a parameter is not valid; the message names it and says what to pass.
    LocationError, IncompatibleError
        If the location cannot be opened.
    ContextError
        If a file of the model cannot be read, or is not the one that was loaded.

    Examples
    --------
    >>> llm = Llama("model.gguf", n_ctx=8192)  # doctest: +SKIP
    >>> llm.set_cache(PrefixStore("lmdb:///var/cache/kv", llm))  # doctest: +SKIP
    """

    def __init__(
        self,
        location: Locations = None,
        llm: Llama | None = None,
        *,
        namespace: str | None = None,
        salt: str | None = None,
        page_tokens: int = Parameters.PAGE_TOKENS,
        min_tokens: int = Parameters.MIN_TOKENS,
        snapshot_interval: int = Parameters.SNAPSHOT_INTERVAL,
        max_snapshots: int = Parameters.MAX_SNAPSHOTS,
        max_bytes: int | str = Parameters.MAX_BYTES,
        max_entries: int | None = None,
        high_water: float = Parameters.HIGH_WATER,
        low_water: float = Parameters.LOW_WATER,
        quota: int | str | Mapping[str, int | str] | None = None,
        ttl: float | str | timedelta | None = None,
        ram_bytes: int | str | None = None,
        codec: str = Parameters.CODEC,
        policy: str = Parameters.POLICY,
        priority: int = 0,
        read_only: bool = False,
        write_behind: bool = True,
        queue_bytes: int | str = Parameters.QUEUE_BYTES,
        max_delay: float | str | timedelta | None = Parameters.MAX_DELAY,
        far_max_bytes: int | str | None = None,
    ) -> None:
        if hasattr(location, "_ctx"):
            raise InvalidParameterError(
                f"location is a {type(location).__name__}; the location comes first: "
                'PrefixStore("kv", llm), or PrefixStore(None, llm) for the default one'
            )
        self._parameters = parameters = Parameters.parse(
            namespace=namespace,
            salt=salt,
            page_tokens=page_tokens,
            min_tokens=min_tokens,
            snapshot_interval=snapshot_interval,
            max_snapshots=max_snapshots,
            max_bytes=max_bytes,
            max_entries=max_entries,
            high_water=high_water,
            low_water=low_water,
            quota=quota,
            ttl=ttl,
            ram_bytes=ram_bytes,
            codec=codec,
            policy=policy,
            priority=priority,
            read_only=read_only,
            write_behind=write_behind,
            queue_bytes=queue_bytes,
            max_delay=max_delay,
            far_max_bytes=far_max_bytes,
        )
        self._hook: Hook | None = None
        self._portable: PortableHook | None = None
        # without one, whose states are stored outside of a completion would not be known
        self._needs_namespace = namespace is None and any(map(is_shared, locations_of(location)))
        self._bypass = Bypass()
        # what becomes of the last prompt, and of the last one of each Llama
        self._last = PromptMeter()
        self._last_of: weakref.WeakKeyDictionary[Llama, PromptMeter] = weakref.WeakKeyDictionary()
        self._sessions: weakref.ref[Sessions] | None = None
        self._warned_closed = False
        self._engine = open_engine(location, parameters)
        self.location = self._engine.location
        # at the end of the process, or on garbage collection: what was captured is written
        self._finalizer = weakref.finalize(self, _finalize, weakref.ref(self), self._engine)
        self._trace_as_told()
        try:
            if llm is not None:
                self.attach(llm)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"PrefixStore({self.location!r}, kind={self.kind.value!r})"

    # -- lifetime -----------------------------------------------------------------------------------------------------

    def attach(self, llm: Llama) -> None:
        """Attach the store to a ``Llama``: its pages are captured as it evaluates tokens.

        If another thread is still in a call of an earlier session of this ``Llama``, this waits for its end.

        Raises
        ------
        MisuseError
            If the store or the Llama is already attached.
        """
        from prefixstore.sessions.queue import between_calls  # noqa: PLC0415 - imported where it is used

        self._alive()
        if self._hook is not None:
            raise MisuseError("the store is attached to a Llama; detach() it first, or open another PrefixStore")
        with between_calls(llm):
            self._hook = hook = self._make_hook(llm)
            try:
                hook.attach(self)
            except BaseException:
                self.detach()
                raise

    def detach(self) -> None:
        """Restore the ``Llama``'s own methods, and remove this store as its cache. Does nothing if not attached."""
        if self._hook is not None:
            sessions = self._sessions() if self._sessions is not None else None
            with sessions.unless_in_use() if sessions is not None else nullcontext(True) as is_free:
                self._hook.detach(self, settles=is_free)  # if this is interrupted, it can be done again
            self._hook = None

    def close(self) -> None:
        """Detach, write queued pages, make them durable, and release the location. A second call does nothing.

        Raises
        ------
        StorageError
            If something cannot be written, or made durable. The store is closed all the same.
        """
        self.detach()
        self._finalizer()

    def __enter__(self) -> Self:
        self._alive()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _alive(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("the store is closed; open a new PrefixStore")

    def _make_hook(self, llm: Llama) -> Hook:
        try:
            from prefixstore.llama.hook import Hook, register_cache  # noqa: PLC0415 - the extra "llama"
        except ImportError as error:
            raise MissingExtraError('llm= needs llama-cpp-python; pip install "prefixstore[llama]"') from error
        if not hasattr(llm, "_ctx") or not hasattr(llm, "_model"):
            raise InvalidParameterError(f"llm must be a llama_cpp.Llama, not {type(llm).__name__}{_inside(llm)}")
        register_cache(PrefixStore)
        return Hook(llm, self._engine, self._parameters, self._bypass)

    def _hook_of(self, llm: Llama | None) -> Hook:
        """The hook of the attached Llama, or one for this call."""
        self._alive()
        if llm is not None and (self._hook is None or self._hook.llm is not llm):
            return self._make_hook(llm)
        if self._hook is None:
            raise NotAttachedError("no Llama is attached; pass one as llm=, or call attach(llm) first")
        return self._hook

    def sessions(self, *, max_sessions: int = 64, max_resident: int = 0) -> Sessions:
        """Many conversations on the attached ``Llama``, one at a time; see `Sessions.admit`.

        Parameters
        ----------
        max_sessions
            How many are kept: above that, the least recently used ones are evicted.
        max_resident
            How many of them keep their rows in the context while they are idle, as long as there is space; see
            docs/sessions.md for when that is worthwhile.

        Returns
        -------
        Sessions
            The same one at each call, as long as it is in use.

        Raises
        ------
        NotAttachedError
            If no Llama is attached.
        ContextError
            If states of this context cannot be stored, or sequences cannot wait in it.
        MisuseError
            If they exist with a different `max_sessions` or `max_resident`.
        """
        from prefixstore.sessions.sessions import Sessions  # noqa: PLC0415 - imported where it is used

        self._alive()
        if self._hook is None:
            raise NotAttachedError("sessions need a Llama; call attach(llm) first")
        found = self._sessions() if self._sessions is not None else None
        if found is None or not found.is_usable:
            found = Sessions(self, self._hook, self._engine, max_sessions, max_resident)
            # they keep the store, not the other way round
            self._sessions = weakref.ref(found)
        elif (found.max_sessions, found.max_resident) != (max_sessions, max_resident):
            raise MisuseError(
                f"the sessions of this store have max_sessions={found.max_sessions} and "
                f"max_resident={found.max_resident}; pass the same, or drop them first"
            )
        return found

    def trace(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | str = "64MiB",
        block_tokens: int = 32,
        text: bool = False,
    ) -> Recorder:
        """Record the requests to the store from now on, for ``prefixstore trace replay`` and ``simulate``.

        Hashes and lengths are recorded; text only on request. A store is recorded to one file at a time.
        With the environment variable ``PREFIXSTORE_TRACE=FILE`` every store of a process is recorded.

        Parameters
        ----------
        path
            The file, to which the trace is appended. With `text`, it gets mode 0600 even if it exists.
        max_bytes
            Recording ends when the file has this size: bytes, or text such as ``"64MiB"``.
        block_tokens
            Tokens per hash: fewer make a trace more exact, and longer.
        text
            Whether to record the text of prompts as well, or their tokens if no Llama is attached.

        Returns
        -------
        Recorder
            Ends with ``close()``, as a context manager, or with the store.

        Raises
        ------
        InvalidParameterError
            If the file cannot be written, or a parameter is not valid.
        """
        from prefixstore.traces.recorder import Recorder  # noqa: PLC0415 - imported where it is used

        self._alive()
        parameters = self._parameters
        about = {
            "page_tokens": parameters.page_tokens,
            "min_tokens": parameters.min_tokens,
            "max_bytes": parameters.budget.max_bytes,
            "max_entries": parameters.budget.max_entries,
            "policy": parameters.policy.name,
        }
        recorder = Recorder(
            path, about, max_bytes=max_bytes, block_tokens=block_tokens, text=self._text_of if text else None
        )
        before, self._engine.tap = self._engine.tap, recorder
        if isinstance(before, Recorder):
            before.close()
        return recorder

    def _text_of(self, tokens: Tokens) -> str:
        llm = self._llm_or_none
        if llm is None:
            return " ".join(map(str, tokens.tolist()))
        return llm.detokenize(tokens.tolist(), special=True).decode("utf-8", "replace")

    def _trace_as_told(self) -> None:
        """Record if the environment says so; a file that cannot be written must not keep a server from starting."""
        path = os.environ.get("PREFIXSTORE_TRACE")
        if path:
            try:
                self.trace(path, text=bool(os.environ.get("PREFIXSTORE_TRACE_TEXT")))
            except InvalidParameterError as error:
                log.warning("nothing is recorded: %s", error)

    # -- looking up, restoring, capturing -----------------------------------------------------------------------------

    @property
    def kind(self) -> Kind:
        """What is stored of the attached context, or why nothing is; without one, how states are stored."""
        hook = self._hook or self._portable
        return hook.kind if hook is not None else Kind.UNBOUND

    @property
    def llm(self) -> Llama | None:
        """The Llama that the store is attached to."""
        return self._hook.llm if self._hook is not None else None

    @property
    def _llm_or_none(self) -> Llama | None:
        return self._hook.context.llm_or_none if self._hook is not None else None

    @property
    def engine(self) -> Engine:
        """The engine, for jobs that iterate over pages or leave notes for each other."""
        self._alive()
        return self._engine

    @property
    def parameters(self) -> Parameters:
        """The validated parameters, for code that works on the engine itself."""
        return self._parameters

    @property
    def read_only(self) -> bool:
        """Whether the store never writes."""
        return self._parameters.read_only

    @property
    def min_tokens(self) -> int:
        """Shorter prompts are neither stored nor restored."""
        return self._parameters.min_tokens

    @property
    def page_tokens(self) -> int:
        """Tokens per page; fewer than the parameter if the model has a shorter sliding window."""
        hook = self._hook or self._portable
        return hook.page_tokens if hook is not None else self._parameters.page_tokens

    @property
    def overwrites_window(self) -> bool:
        """Whether the attached context overwrites rows that leave a sliding window, so pages are captured before."""
        return self._hook is not None and self._hook.overwrites_window

    @property
    def namespace(self) -> Namespace:
        """The namespace that the store uses.

        Raises
        ------
        NotAttachedError
            If neither a Llama nor a name determines it.
        """
        if self._hook is not None:
            return self._hook.namespace
        if self._portable is not None:
            return self._portable.namespace
        if self._parameters.label is None:
            raise NotAttachedError("the namespace is unknown without a Llama; call attach(llm), or pass namespace=")
        return Namespace(
            {
                "label": self._parameters.label,
                "salt": self._parameters.salt,
                "page_tokens": self._parameters.page_tokens,
            }
        )

    def _place(self, tokens: TokenSequence) -> tuple[bytes, Tokens, int]:
        """Where to look a prompt up: namespace key, tokens, length of a page."""
        self._alive()
        return self.namespace.key, as_tokens(tokens), self.page_tokens

    def match(self, tokens: TokenSequence) -> Match:
        """The longest stored prefix of `tokens`. Changes nothing, neither in the store nor in the context.

        Parameters
        ----------
        tokens
            Token ids, shape ``(n,)``; an int32 array is fastest.
        """
        path = self.path(tokens)
        pages = tuple(page.key.hex() for page in path.pages)
        return Match(path.n_tokens, pages, sum(page.stored_bytes or page.raw_bytes for page in path.pages))

    def path(self, tokens: TokenSequence) -> Path:
        """As `match`, with the pages themselves, for jobs."""
        namespace, wanted, page_tokens = self._place(tokens)
        if self._hook is not None and self._hook.context.kind.has_snapshots:
            return self._engine.match_snapshot(namespace, wanted, page_tokens, len(wanted))
        return self._engine.match(namespace, wanted, page_tokens)

    def explain(self, prompt: PromptLike, llm: Llama | None = None, *, generation_prompt: bool = True) -> Explanation:
        """Explain what is stored of a prompt, and why not more. Changes nothing.

        Parameters
        ----------
        prompt
            Text, token ids, or a mapping with ``"prompt"``, ``"messages"`` (and ``"tools"``) or ``"tokens"``.
        llm
            The Llama; the attached one by default.
        generation_prompt
            Whether messages end where the assistant answers them, as in a request.

        Returns
        -------
        Explanation
            ``print`` it: how many tokens match, where the prompt diverges from the nearest stored one and the usual
            cause, which setting differs, whether a page was evicted, and how long restoring and computing take.

        Raises
        ------
        NotAttachedError
            If there is no Llama.
        InvalidParameterError
            If the prompt is not valid.
        StorageError
            If the location cannot be read.
        """
        from prefixstore.diagnosis.of_store import explain_prompt  # noqa: PLC0415 - imported where it is used

        return explain_prompt(self._engine, self._hook_of(llm), prompt, generation_prompt=generation_prompt)

    def restore(self, tokens: TokenSequence, llm: Llama | None = None, *, always: bool = False) -> int:
        """Restore the stored prefix of a prompt into the context, to continue with ``eval`` or ``generate``.

        Parameters
        ----------
        tokens
            The prompt, shape ``(n,)``. Its last token is always left to evaluate.
        llm
            The Llama; the attached one by default.
        always
            Restore even if computing was measured to be faster.

        Returns
        -------
        int
            How many tokens of the prompt are live now: continue with ``llm.eval(tokens[n:])``. At most one less than
            the context has places.

        Raises
        ------
        ClosedError
            If the store is closed, also while it restores: ``llm.n_tokens`` says what the context holds then.
        """
        hook, wanted, meter = self._hook_of(llm), as_tokens(tokens), PromptMeter()
        try:
            live = hook.restore(wanted, always=always, meter=meter)
        finally:
            self._note(meter, hook.context.llm_or_none)
        self._alive()
        return live

    def capture(self, llm: Llama | None = None) -> int:
        """Capture all pages of the context that are not stored, the tail included; the number of pages.

        A background thread writes them; `flush` waits for it. For an `llm` that the store is not attached to, the
        caller guarantees that the context holds what ``llm.input_ids`` says.
        """
        return self._hook_of(llm).capture()

    def pin(self, tokens: TokenSequence) -> int:
        """Keep the stored prefix of `tokens` from eviction; the number of tokens that are pinned."""
        return self._pin(tokens, pinned=True)

    def unpin(self, tokens: TokenSequence) -> int:
        """Undo `pin`; the number of tokens that are no longer pinned."""
        return self._pin(tokens, pinned=False)

    def _pin(self, tokens: TokenSequence, *, pinned: bool) -> int:
        namespace, wanted, page_tokens = self._place(tokens)
        self._writable("pin")
        self._engine.drain()
        return self._engine.pin(namespace, wanted, page_tokens, pinned=pinned)

    def flush(self) -> None:
        """Return when everything captured so far is durable.

        Raises
        ------
        StorageError
            If the location fails, or writes nothing for half a minute.
        """
        self._alive()
        self._engine.flush()

    def drain(
        self,
        limit: int | None = None,
        *,
        max_bytes: int | str | None = None,
        seconds: float | str | timedelta | None = None,
    ) -> Drained:
        """Wait until captured pages are written, or some of them; written pages may not be durable yet (see `flush`).

        The background thread writes up to 64 MiB of waiting pages in one transaction. So when a limit is reached,
        more pages than the limit may have been written.

        Parameters
        ----------
        limit
            Return as soon as so many pages and snapshots were written, or dropped, since this call.
        max_bytes
            The same for bytes of states: bytes, or text such as ``"64MiB"``.
        seconds
            Return after this time at the latest: seconds, a `timedelta`, or text such as ``"2s"``.

        Returns
        -------
        Drained
            ``pages`` and ``bytes`` that were written or dropped meanwhile, and how many are ``left``.

        Raises
        ------
        InvalidParameterError
            If a limit is not valid.
        UnavailableError
            If nothing can be written to the location for half a minute.
        """
        self._alive()
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise InvalidParameterError(f"limit={shown(limit)} must be a number of pages, 0 or more")
        return self._engine.drain(
            limit,
            None if max_bytes is None else parse_bytes(max_bytes, "max_bytes"),
            None if seconds is None else parse_seconds(seconds, "seconds"),
        )

    def check(self) -> list[Violation]:
        """Verify every invariant and every checksum of the location; the violations found."""
        self._alive()
        self._engine.drain()
        return self._engine.check()

    def clear(self, *, everything: bool = False) -> int:
        """Delete the pages of this store's namespace, pinned ones too; how many were deleted.

        Parameters
        ----------
        everything
            Delete the pages of all namespaces in the location.
        """
        self._alive()
        self._writable("clear")
        self._engine.drain()
        sessions = self._sessions() if self._sessions is not None else None
        if sessions is not None and sessions.is_usable:
            sessions.evict_all()
        if everything:
            return self._engine.clear(None)
        places = [self.namespace] if self._hook is not None or self._portable is None else self._portable.namespaces
        return sum(self._engine.clear(namespace.key) for namespace in places)

    def evict(self, to: float | str, *, dry_run: bool = False) -> Evicted:
        """Evict pages until the location holds no more than `to`, in the order of the store's policy.

        Only leaves are evicted, as always: pages on which no other page depends. Pinned pages and their ancestors stay,
        and so do pages that are being written, or that another process has used meanwhile. Queued pages are written
        first.

        Parameters
        ----------
        to
            A share of `max_bytes` (a float from 0.0 to 1.0, or ``"80%"``), or a size (an int, or ``"5GiB"``).
        dry_run
            Only report what would be evicted. The eviction runs in one transaction that is rolled back;
            other writers wait meanwhile.

        Returns
        -------
        Evicted
            The ``pages`` and ``bytes``, the ``policy`` that chose them, and what is left.

        Raises
        ------
        InvalidParameterError
            If `to` is not valid.
        MisuseError
            If the store is open with ``read_only=True``.
        StorageError
            If the location fails. Pages evicted until then stay evicted.
        """
        self._alive()
        self._writable("evict")
        target = parse_target(to, self._parameters.budget.max_bytes, "to")
        self._engine.drain()
        return self._engine.evict(target, dry_run=dry_run)

    def _writable(self, name: str) -> None:
        if self._parameters.read_only:
            raise MisuseError(f"{name}() writes, and the store is open with read_only=True")

    def bypass(self) -> AbstractContextManager[None]:
        """Let requests in the block bypass the store: they are neither looked up nor captured.

        They run as if there were no store, from the current context of the ``Llama``, and nothing evaluated in the
        block is ever stored: the next lookup after it starts with an empty context. Anything evaluated before the block
        is stored as usual. Blocks may be nested, and may end with an exception.

        The block applies to one thread, or one asyncio task: `asyncio.to_thread` inherits it,
        ``run_in_executor`` and new threads do not. Streams must be consumed inside the block, since llama-cpp-python
        computes them while they are read.

        Examples
        --------
        >>> with store.bypass():  # doctest: +SKIP
        ...     llm.create_chat_completion(private_messages)
        """
        return self._bypass.on()

    @property
    def last(self) -> LastPrompt | None:
        """How the last prompt was served, by any ``Llama``; None before the first one.

        While the prompt is evaluated, it shows the progress. With several threads, use `last_of` to get the one of a
        given ``Llama``.
        """
        return self._last.record()

    def last_of(self, llm: Llama) -> LastPrompt | None:
        """As `last`, for the last prompt of this ``Llama``."""
        meter = self._last_of.get(llm)
        return meter.record() if meter is not None else None

    def stats(self) -> Stats:
        """What the store has done since it was opened, and what its location holds now."""
        self._alive()
        count = self._engine.counters
        try:
            used, stored, raw = self._engine.used()
        except StorageError:
            # a failing location is when the counters are needed
            used, stored, raw = self._engine.last_used()
        pending = self._engine.pending
        return Stats(
            hits=count["hits"],
            live_hits=count["live_hits"],
            misses=count.group("miss"),
            unreadable=count.group("unreadable"),
            prompt_tokens=count["prompt_tokens"],
            tokens_restored=count["tokens_restored"],
            tokens_computed=count["tokens_computed"],
            pages_captured=count["pages_captured"],
            snapshots_captured=count["snapshots_captured"],
            dropped=count.group("dropped"),
            shortage=self._engine.shortage,
            outdated=count.group("outdated"),
            evictions=count["evictions"],
            expired=count["expired"],
            corrupt=count["corrupt"],
            packed=count["packed"],
            unpacked=count["unpacked"],
            restore_seconds=count.seconds("restore"),
            capture_seconds=count.seconds("capture"),
            lost_seconds=count.seconds("lost"),
            outages=count["outages"],
            seconds_saved=count.seconds("saved"),
            entries=used.entries,
            bytes_used=used.bytes,
            bytes_stored=stored,
            bytes_raw=raw,
            bytes_in_ram=self._engine.ram_bytes,
            queued_bytes=self._engine.queued_bytes,
            pending_pages=pending[0],
            pending_snapshots=pending[1],
            capacity_bytes=self._parameters.budget.max_bytes,
            capacity_entries=self._parameters.budget.max_entries,
            peak_bytes=self._engine.peak_bytes,
            allocations=count["allocations"],
            frees=count["frees"],
            kind=self.kind,
            sessions=self._engine.session_counts(),
            late=self._engine.late,
            tiers=self._engine.tiers(),
        )

    def history(self) -> History:
        """How the location was used, by all its processes: by hour for a week, and by day for a year.

        Kept by namespace (with its model and tenant) and by purpose: serving, warming, maintenance. Figures that this
        process has not written yet are included.

        Raises
        ------
        StorageError
            If the location fails.

        Examples
        --------
        >>> history = store.history()  # doctest: +SKIP
        >>> history.total(3600).hit_rate, history.total().seconds_saved  # doctest: +SKIP
        """
        self._alive()
        return self._engine.history()

    def metrics(self) -> str:
        """What `stats` says, with histograms, as a text for Prometheus: see docs/metrics.md.

        While the location fails, the sizes are the last known ones.

        Raises
        ------
        MissingExtraError
            If prometheus_client is not installed.
        """
        self._alive()
        from prefixstore.metrics import store_text  # noqa: PLC0415 - the extra "server"

        return store_text(self._engine)

    # -- as llama-cpp-python calls a cache ----------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """The budget, in bytes."""
        return self._parameters.budget.max_bytes

    @property
    def cache_size(self) -> int:
        """What the location holds, in bytes, index included."""
        self._alive()
        return self._engine.used()[0].bytes

    def __len__(self) -> int:
        """How many pages the location holds."""
        self._alive()
        return self._engine.used()[0].entries

    def __bool__(self) -> bool:
        # llama-cpp-python asks `if self.cache:` and means `is not None`; an empty store is no missing one
        return True

    def __contains__(self, tokens: TokenSequence) -> bool:
        return self.match(tokens).n_tokens > 0

    def __getitem__(self, tokens: TokenSequence) -> LlamaState:
        from prefixstore.llama.hook import calling_completion  # noqa: PLC0415 - the extra "llama"

        completion = calling_completion(1)
        if completion is not None and self._is_closed("miss:closed"):
            raise KeyError("the store is closed")
        hook = self._bound(completion) if self._hook is not None else self._unbound()
        meter = PromptMeter(sees_evaluation=self._hook is not None)
        try:
            state = hook.lookup(tokens, completion, meter)
        finally:
            self._note(meter, completion.f_locals.get("self") if completion is not None else self._llm_or_none)
        if state is None:
            raise KeyError("no prefix of this prompt is stored")
        return state

    def __setitem__(self, tokens: TokenSequence, state: LlamaState) -> None:
        from prefixstore.llama.hook import calling_completion  # noqa: PLC0415 - the extra "llama"

        completion = calling_completion(1)
        if completion is not None and self._is_closed("dropped:closed"):
            return
        # the key does not say what the context holds: the key includes sampled tokens that were never evaluated
        if self._hook is not None:
            self._bound(completion).completed()
        else:
            self._unbound().save(state, completion)

    def _note(self, meter: PromptMeter, llm: Llama | None) -> None:
        """A prompt was looked up."""
        if meter.n_tokens is not None:
            self._last = meter
            if llm is not None:
                self._last_of[llm] = meter

    def _is_closed(self, count: str) -> bool:
        """Whether a completion uses the store after it was closed, which is counted, and logged once."""
        if self._finalizer.alive:
            return False
        self._engine.counters.count(count)
        if not self._warned_closed:
            self._warned_closed = True
            log.warning("a completion uses a closed store; call llm.set_cache(None), or open a new store")
        return True

    def _bound(self, completion: Any) -> Hook:
        """The hook of the attached Llama, which must be the one that asks."""
        self._alive()
        assert self._hook is not None
        if completion is not None and completion.f_locals.get("self") is not self._hook.llm:
            raise MisuseError("this store is attached to a different Llama; open one store for each Llama")
        return self._hook

    def _unbound(self) -> PortableHook:
        """The hook for any Llama."""
        self._alive()
        if self._portable is None:
            if self._needs_namespace:
                raise NotAttachedError(
                    f"{self.location} is used as a cache before a Llama is attached; call attach(llm), or open the "
                    "store with namespace=, a name that stands for the model and its settings, for any Llama"
                )
            from prefixstore.llama.hook import register_cache  # noqa: PLC0415 - the extra "llama"
            from prefixstore.llama.portable.hook import PortableHook  # noqa: PLC0415 - an extra

            register_cache(PrefixStore)
            self._portable = PortableHook(self._engine, self._parameters, self._bypass)
        return self._portable


def _finalize(store: weakref.ref[PrefixStore], engine: Engine) -> None:
    """Close the engine of a store: immediately if it is closed or the process ends; otherwise it is being collected."""
    if store() is not None:
        engine.close()
    else:
        engine.close_soon()
