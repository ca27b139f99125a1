"""Whether a server hangs: it neither answers nor does anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

__all__ = ["Patience", "hangs"]


@dataclass(frozen=True)
class Patience:
    """How long a server may do nothing.

    Attributes
    ----------
    interval
        Seconds between two questions, and that an answer may take.
    questions
        How many in a row it may leave without an answer, with no work done meanwhile.
    """

    interval: float = 10.0
    questions: int = 6


async def hangs(
    ask: Callable[[float], Awaitable[bool]], work_done: Callable[[], int | None], patience: Patience
) -> None:
    """Return when a server hangs.

    A server that computes may be silent for as long as one batch takes, or all of its threads for requests may be
    taken. So silence counts only if no work was done since the last question. Questions are counted, and not seconds:
    after this process was stopped and continued, say, all of them are asked again.

    Parameters
    ----------
    ask
        Probes the server, given how many seconds the answer may take. Returns whether there was one.
    work_done
        A number that grows with the work that the server does; None if it is not known, and then it never hangs.
    patience
        How long it may do nothing.
    """
    before: int | None = None
    silent = 0
    while silent < patience.questions:
        await asyncio.sleep(patience.interval)
        if await ask(patience.interval):
            before, silent = None, 0
            continue
        done = work_done()
        silent = silent + 1 if done is not None and done == before else 0
        before = done
