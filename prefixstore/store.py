"""`PrefixStore`, the public class: a location that Llamas use as their cache, and what to ask of it with a prompt."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING

from prefixstore.backends.encryption_keys import Key
from prefixstore.engine.miss import bypassing
from prefixstore.errors import InvalidParameterError, NotAttachedError
from prefixstore.format.keys import TokenSequence, as_tokens
from prefixstore.llama.attached import AttachedStore
from prefixstore.opening import Locations
from prefixstore.parameters import Parameters
from prefixstore.results import Match

if TYPE_CHECKING:
    from llama_cpp import Llama

    from prefixstore.diagnosis.explanation import Explanation
    from prefixstore.traces.recorder import Recorder
    from prefixstore.warming.prompt_list import PromptLike

log = logging.getLogger("prefixstore")


class PrefixStore(AttachedStore):
    """A persistent prefix cache for llama-cpp-python.

    Parameters
    ----------
    location
        ``"lmdb:///path"``, a bare path (LMDB as well), ``"sqlite:////path"``, ``"postgresql+psycopg://user@host/db"``,
        ``"valkey://host:6379/0"``, ``"s3://bucket/prefix"``, ``"memory:"`` (pages of this store's own),
        or None for the location named by the environment variable ``PREFIXSTORE_LOCATION``,
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
    quota
        Size limit for one tenant: for all namespaces of a `salt` together, and for each that has none. A tenant with
        a quota evicts its own pages first, so it evicts those of others only when it has none left.
    ttl
        Time to live after the last use: seconds, a `timedelta`, or text such as ``"30d"``. It applies to the pages that
        this store writes. A page outlives the pages that continue it, and a pinned page never expires. None for no
        limit.
    codec
        How pages are packed: ``"raw"``, ``"zstd"`` or ``"zstd:LEVEL"``, ``"planes"`` (high and low bytes
        of 16-bit values split, then zstd), or ``"auto"``, which tries the codecs on the first pages of a namespace, and
        again from time to time: while there is space, it compresses only where that barely slows restores (a slow
        disk, a server), and keeps pages raw in a local file that fits into memory. When more than 95 % of `max_bytes`
        is in use, new pages are packed with the codec that saves most. A page that is stored keeps its form.
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
        quota: int | str | None = None,
        ttl: float | str | timedelta | None = None,
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
        super().__init__(location, Parameters.parse(**given))
        self._trace_as_told()
        try:
            if llm is not None:
                self.attach(llm)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"PrefixStore({self.location!r}, kind={self.kind.value!r})"

    def trace(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | str = "64MiB",
        block_tokens: int = 32,
    ) -> Recorder:
        """Record the requests to the store from now on, for ``prefixstore trace simulate``.

        Hashes and lengths are recorded, and no text. A store is recorded to one file at a time.
        With the environment variable ``PREFIXSTORE_TRACE=FILE`` every store of a process is recorded.

        Parameters
        ----------
        path
            The file, to which the trace is appended; a new one has mode 0600.
        max_bytes
            Recording ends when the file has this size: bytes, or text such as ``"64MiB"``.
        block_tokens
            Tokens per hash: fewer make a trace more exact, and longer.

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
        parameters = self.parameters
        about = {
            "page_tokens": parameters.page_tokens,
            "min_tokens": parameters.min_tokens,
            "max_bytes": parameters.budget.max_bytes,
            "max_entries": parameters.budget.max_entries,
            "policy": parameters.policy.name,
        }
        recorder = Recorder(path, about, max_bytes=max_bytes, block_tokens=block_tokens)
        before, self._engine.tap = self._engine.tap, recorder
        if isinstance(before, Recorder):
            before.close()
        return recorder

    def _trace_as_told(self) -> None:
        """Record if the environment says so; a file that cannot be written must not keep a server from starting."""
        path = os.environ.get("PREFIXSTORE_TRACE")
        if path:
            try:
                self.trace(path)
            except InvalidParameterError as error:
                log.warning("nothing is recorded: %s", error)

    # -- looking up, restoring, capturing -----------------------------------------------------------------------------

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
            ``print`` it: how many tokens match, where the prompt diverges from the nearest stored one, which setting
            differs.

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
        return self._engine.upkeep.pin(hook.context.namespace.key, wanted, hook.page_tokens, pinned=pinned)

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
        hooks = self._attached()
        if not hooks and not everything:
            raise NotAttachedError("no Llama is attached whose pages to delete; clear(everything=True) deletes all")
        self._engine.drain()
        for hook in hooks:
            sessions = hook.sessions()
            if sessions is not None:
                sessions.evict_all()
        if everything:
            return self._engine.upkeep.clear(None)
        return sum(self._engine.upkeep.clear(key) for key in {hook.context.namespace.key for hook in hooks})

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
