"""`PrefixStore`, the public class: an engine, and the hook that connects it to a ``Llama``."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from prefixstore.backends.keys import Key
from prefixstore.engine.budget import Evicted
from prefixstore.engine.engine import Engine
from prefixstore.engine.index import Path
from prefixstore.engine.invariants import Violation
from prefixstore.engine.miss import bypassing
from prefixstore.engine.queue import Drained
from prefixstore.errors import (
    ClosedError,
    InvalidParameterError,
    MisuseError,
    NotAttachedError,
    StorageError,
)
from prefixstore.format.figures import History
from prefixstore.format.keys import Tokens, TokenSequence, as_tokens
from prefixstore.format.namespace import Namespace
from prefixstore.llama.hooks import Hooks
from prefixstore.opening import Locations, open_engine
from prefixstore.parameters import Parameters
from prefixstore.results import LastPrompt, PromptMeter, Stats
from prefixstore.stats import Kind
from prefixstore.units import parse_bytes, parse_seconds, parse_target, shown

if TYPE_CHECKING:
    from llama_cpp import Llama
    from llama_cpp.llama import LlamaState
    from typing_extensions import Self

    from prefixstore.diagnosis.explanation import Explanation
    from prefixstore.llama.hook import Hook
    from prefixstore.sessions.sessions import Sessions
    from prefixstore.traces.recorder import Recorder
    from prefixstore.warming.prompts import PromptLike

__all__ = ["Match", "PrefixStore"]

log = logging.getLogger("prefixstore")


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
        A ``llama_cpp.Llama`` to attach to at once. Any other is attached by `attach`, or by its first completion after
        ``llm.set_cache(store)``: one store serves any number of them, each in the namespace of its model and settings,
        and keeps none alive.
    namespace
        A label that separates this store's pages from others in the same location, in addition to the models'
        fingerprints.
    salt
        Separates pages as `namespace` does, for tenants that must not share them.
    page_tokens
        Tokens in a page. A model with a shorter sliding window gets shorter pages.
    min_tokens
        Sequences shorter than this are neither stored nor restored.
    snapshot_interval
        For models whose memory cannot step back (recurrent, hybrid): tokens between snapshots, in addition to those
        where another prompt is likely to part from this one, one token before its end, and at the end of a turn.
    max_snapshots
        How many snapshots along one conversation are kept; older ones are spaced further apart.
    max_bytes
        Size limit of the location, index included: bytes, or text such as ``"20GiB"`` or ``"500MB"``. It applies
        to the whole location; each process that writes enforces its own limit.
    max_entries
        Limit on the number of pages in the location; None for no limit.
    high_water, low_water
        Shares of `max_bytes`. When more than `high_water` is in use, new pages are packed (see `codec`), until no more
        than `low_water` is.
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
        disk, a server), and keeps pages raw in a local file that fits into memory. When more than `high_water` is in
        use, new pages are packed with the codec that saves most. A page that is stored keeps its form.
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
        Whether a background thread packs and writes pages. If not, the completion waits for pages to be written.
    queue_bytes
        Memory for pages that wait to be written. A page that does not fit is captured later, or not at all. A far
        location has a second queue of the same size.
    max_delay
        How long a prompt may take beyond computing it, because the location is slow: seconds, a `timedelta`, or text
        such as ``"2s"``; or 5 % of the computing time, if that is more. Tokens not restored by then are computed.
        A lookup waits just as long for a far location. None for no limit.
    far_max_bytes
        With two locations: the size limit of the far one; by default `max_bytes`, the limit of the nearer one.
    key
        Where the keys are under which the location is encrypted: ``"file:PATH"``, ``"env:NAME"``, ``"command:…"``, or a
        `prefixstore.KeyProvider`; by default as the environment variable ``PREFIXSTORE_KEY`` says, and if that is not
        set, or with ``"none"``, it is not encrypted. With two locations one for both, or a list of two. What is in
        memory is never encrypted. Needs the extra ``encryption``.

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
    >>> llm.set_cache(PrefixStore("lmdb:///var/cache/kv"))  # doctest: +SKIP
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
        key: Key | Sequence[Key | None] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "location", "llm")}
        if hasattr(location, "_ctx"):
            raise InvalidParameterError(
                f"location is a {type(location).__name__}; the location comes first: "
                'PrefixStore("kv", llm), or PrefixStore(None, llm) for the default one'
            )
        self._parameters = parameters = Parameters.parse(**given)
        # what becomes of the last prompt, and of the last one of each Llama
        self._last = PromptMeter()
        self._last_of: weakref.WeakKeyDictionary[Llama, PromptMeter] = weakref.WeakKeyDictionary()
        self._sessions: weakref.WeakKeyDictionary[Hook, weakref.ref[Sessions]] = weakref.WeakKeyDictionary()
        self._warned_closed = False
        self._engine = open_engine(location, parameters)
        self._hooks = Hooks(self._engine, parameters)
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

    def __reduce__(self) -> NoReturn:
        # also what `copy` calls
        raise MisuseError(
            f"a store cannot be pickled or copied: it holds threads and an open location; pass the location on, and "
            f"open it there: PrefixStore({self.location!r})"
        )

    # -- lifetime -----------------------------------------------------------------------------------------------------

    def attach(self, llm: Llama) -> None:
        """Attach the store to a ``Llama``: its pages are captured as it evaluates tokens.

        A completion of a ``Llama`` whose cache is this store attaches it by itself. If another thread is still in a
        call of an earlier session of this ``Llama``, this waits for its end.

        Raises
        ------
        MisuseError
            If this store, or another one, is attached to this ``Llama`` already.
        """
        self._alive()
        self._hooks.attach(llm, self)

    def detach(self, llm: Llama | None = None) -> None:
        """Restore the own methods of a ``Llama``, by default of all, and remove this store as its cache.

        Does nothing to one that is not attached.
        """
        for hook in self._hooks.all:
            if llm is not None and hook.context.llm_or_none is not llm:
                continue
            sessions = self._sessions_of(hook)
            with sessions.queue.unless_in_use() if sessions is not None else nullcontext(True) as is_free:
                self._hooks.detach(hook, self, settles=is_free)

    def _sessions_of(self, hook: Hook) -> Sessions | None:
        found = self._sessions.get(hook)
        return found() if found is not None else None

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

    def hook_of(self, llm: Llama | None) -> Hook:
        """For jobs: the hook of a Llama, or one for this call if it is not attached; without a Llama, that of `llm`."""
        self._alive()
        return self._hooks.of(llm)

    def sessions(self, llm: Llama | None = None, *, max_sessions: int = 64) -> Sessions:
        """Many conversations on an attached ``Llama``, one at a time; see `Sessions.admit`.

        Parameters
        ----------
        llm
            The attached ``Llama``; by default the only one, or of several the one that was used last.
        max_sessions
            How many are kept: above that, the least recently used ones are evicted.

        Returns
        -------
        Sessions
            The same one at each call, as long as it is in use.

        Raises
        ------
        NotAttachedError
            If no Llama is attached.
        ContextError
            If states of this context cannot be stored.
        MisuseError
            If they exist with a different `max_sessions`.
        """
        from prefixstore.sessions.sessions import Sessions  # noqa: PLC0415 - imported where it is used

        self._alive()
        hook = self._hooks.current if llm is None else self._hooks.find(llm)
        if hook is None:
            raise NotAttachedError("sessions need an attached Llama; call attach(llm) first")
        found = self._sessions_of(hook)
        if found is None or not found.is_usable:
            found = Sessions(self, hook, self._engine, max_sessions)
            # they keep the store, not the other way round
            self._sessions[hook] = weakref.ref(found)
        elif found.max_sessions != max_sessions:
            raise MisuseError(
                f"the sessions of this store have max_sessions={found.max_sessions}; pass the same, or drop them first"
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
        llm = self.llm
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
        """What is stored of the context of `llm`, or why nothing is."""
        hook = self._hooks.current
        return hook.kind if hook is not None else Kind.UNBOUND

    @property
    def llm(self) -> Llama | None:
        """The attached Llama; of several, the one that was attached or used last.

        `kind`, `namespace` and `page_tokens` are those of this one, and methods that take a Llama take it by default.
        """
        hook = self._hooks.current
        return hook.context.llm_or_none if hook is not None else None

    def is_attached(self, llm: Llama) -> bool:
        """Whether the store is attached to this Llama."""
        return self._hooks.find(llm) is not None

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
        hook = self._hooks.current
        return hook.page_tokens if hook is not None else self._parameters.page_tokens

    @property
    def namespace(self) -> Namespace:
        """The namespace of `llm`.

        Raises
        ------
        NotAttachedError
            If no Llama is attached.
        """
        return self.hook_of(None).context.namespace

    def match(self, tokens: TokenSequence, llm: Llama | None = None) -> Match:
        """The longest stored prefix of `tokens`. Changes nothing, neither in the store nor in the context.

        Parameters
        ----------
        tokens
            Token ids, shape ``(n,)``; an int32 array is fastest.
        llm
            The Llama; by default the attached one.
        """
        path = self.path(tokens, llm)
        pages = tuple(page.key.hex() for page in path.pages)
        return Match(path.n_tokens, pages, sum(page.stored_bytes or page.raw_bytes for page in path.pages))

    def path(self, tokens: TokenSequence, llm: Llama | None = None) -> Path:
        """As `match`, with the pages themselves, for jobs."""
        wanted = as_tokens(tokens)
        return self.hook_of(llm).strategy.path(wanted, len(wanted))

    def explain(self, prompt: PromptLike, llm: Llama | None = None, *, generation_prompt: bool = True) -> Explanation:
        """Explain what is stored of a prompt, and why not more. Changes nothing.

        Parameters
        ----------
        prompt
            Text, token ids, or a mapping with ``"prompt"``, ``"messages"`` (and ``"tools"``) or ``"tokens"``.
        llm
            The Llama; by default the attached one.
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
        from prefixstore.diagnosis.explain import explain_prompt  # noqa: PLC0415 - imported where it is used

        return explain_prompt(self._engine, self.hook_of(llm), prompt, generation_prompt=generation_prompt)

    def restore(self, tokens: TokenSequence, llm: Llama | None = None, *, always: bool = False) -> int:
        """Restore the stored prefix of a prompt into the context, to continue with ``eval`` or ``generate``.

        Parameters
        ----------
        tokens
            The prompt, shape ``(n,)``. Its last token is always left to evaluate.
        llm
            The Llama; by default the attached one.
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
        hook, wanted = self.hook_of(llm), as_tokens(tokens)
        self._hooks.use(hook)
        try:
            live = hook.restore(wanted, always=always)
        finally:
            self._note(hook)
        self._alive()
        return live

    def capture(self, llm: Llama | None = None) -> int:
        """Capture all pages of the context that are not stored, the tail included; the number of pages.

        A background thread writes them; `flush` waits for it. For an `llm` that the store is not attached to, the
        caller guarantees that the context holds what ``llm.input_ids`` says.
        """
        return self.hook_of(llm).capture()

    def pin(self, tokens: TokenSequence, llm: Llama | None = None) -> int:
        """Keep the stored prefix of `tokens` from eviction; the number of tokens that are pinned."""
        return self._pin(tokens, llm, pinned=True)

    def unpin(self, tokens: TokenSequence, llm: Llama | None = None) -> int:
        """Undo `pin`; the number of tokens that are no longer pinned."""
        return self._pin(tokens, llm, pinned=False)

    def _pin(self, tokens: TokenSequence, llm: Llama | None, *, pinned: bool) -> int:
        hook, wanted = self.hook_of(llm), as_tokens(tokens)
        self._writable("pin")
        self._engine.drain()
        return self._engine.pin(hook.context.namespace.key, wanted, hook.page_tokens, pinned=pinned)

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
        """Delete the pages in the namespaces of all attached Llamas, pinned ones too; how many were deleted.

        Parameters
        ----------
        everything
            Delete the pages of all namespaces in the location.

        Raises
        ------
        NotAttachedError
            If no Llama is attached, without `everything`.
        """
        self._alive()
        self._writable("clear")
        hooks = self._hooks.attached
        if not hooks and not everything:
            raise NotAttachedError("no Llama is attached whose pages to delete; clear(everything=True) deletes all")
        self._engine.drain()
        for hook in hooks:
            sessions = self._sessions_of(hook)
            if sessions is not None and sessions.is_usable:
                sessions.evict_all()
        if everything:
            return self._engine.clear(None)
        return sum(self._engine.clear(key) for key in {hook.context.namespace.key for hook in hooks})

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
        return bypassing(self._engine)

    def boundary(self, *prefixes: PromptLike | int, llm: Llama | None = None) -> AbstractContextManager[None]:
        """Let prompts in the block be resumable after these prefixes, such as a document that several questions follow.

        This is for models whose memory cannot step back (recurrent and hybrid ones), which are resumed only where a
        snapshot was taken. The end of the system prompt, of documents before the question, and of what two prompts had
        in common are found without it. Other models are resumed anywhere. The block applies as that of `bypass` does.

        Parameters
        ----------
        prefixes
            Each is a number of tokens, or what prompts begin with: text, token ids, or ``{"messages": [...]}``.
            In the prompt the last message may go on.
        llm
            The Llama that makes tokens of it; the attached one by default.

        Examples
        --------
        >>> with store.boundary({"messages": [rules, {"role": "user", "content": document}]}):  # doctest: +SKIP
        ...     llm.create_chat_completion([rules, {"role": "user", "content": document + question}])

        Raises
        ------
        NotAttachedError
            If there is no Llama.
        InvalidParameterError
            If a prefix is not valid.
        """
        from prefixstore.diagnosis.explain import tokens_of  # noqa: PLC0415 - imported where it is used
        from prefixstore.models.boundaries import asking_for  # noqa: PLC0415 - imported where it is used

        lengths = [prefix for prefix in prefixes if isinstance(prefix, int)]
        for n in lengths:
            if isinstance(n, bool) or n < 1:
                raise InvalidParameterError(f"boundary({shown(n)}): a number of tokens has to be at least 1")
        others = [prefix for prefix in prefixes if not isinstance(prefix, int)]
        texts = [tokens_of(self.hook_of(llm).llm, prefix, generation_prompt=False) for prefix in others]
        return asking_for([*lengths, *texts])

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
        """How the location was used on each of the last 31 days, by all its processes, in each namespace.

        Prompts of warming jobs do not count. Figures that this process has not written yet are included.

        Raises
        ------
        StorageError
            If the location fails.

        Examples
        --------
        >>> history = store.history()  # doctest: +SKIP
        >>> history.total(1).hit_rate, history.total().seconds_saved  # of today, of all days  # doctest: +SKIP
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
        llm, state = self._asking(), None
        if llm is not None and self._is_closed("miss:closed"):
            raise KeyError("the store is closed")
        hook = self.hook_of(None) if llm is None else self._hooks.asking(llm, self)
        if hook is not None:
            wanted = as_tokens(tokens)
            try:
                state = hook.lookup(wanted)
            finally:
                self._note(hook)
        if state is None:
            raise KeyError("no prefix of this prompt is stored")
        return state

    def __setitem__(self, tokens: TokenSequence, state: LlamaState) -> None:
        llm = self._asking()
        if llm is None:
            self._alive()
            hooks = self._hooks.attached
            if not hooks:
                raise NotAttachedError("no Llama is attached whose states could be stored; call attach(llm) first")
            from prefixstore.llama.llama_state import store_state  # noqa: PLC0415 - the extra "llama"

            store_state(hooks, state)
        elif not self._is_closed("dropped:closed"):
            # the key does not say what the context holds: the key includes sampled tokens that were never evaluated
            hook = self._hooks.find(llm)
            if hook is not None:
                hook.completed()

    @staticmethod
    def _asking() -> Llama | None:
        """The Llama whose completion asks, if one does."""
        try:
            from prefixstore.llama.binding import running_completion  # noqa: PLC0415 - the extra "llama"
        except ImportError:
            return None
        return running_completion().get("self")

    def _note(self, hook: Hook) -> None:
        """A prompt was looked up."""
        meter, llm = hook.context.prompt, hook.context.llm_or_none
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


def _finalize(store: weakref.ref[PrefixStore], engine: Engine) -> None:
    """Close the engine of a store: immediately if it is closed or the process ends; otherwise it is being collected."""
    if store() is not None:
        engine.close()
    else:
        engine.close_soon()
