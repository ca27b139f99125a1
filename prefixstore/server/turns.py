"""The messages of a chat, by which a request is known as the next one of a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Turn", "Turns"]

# What a request may add to the one before it, in bytes: of no more than that there is hardly anything in the store.
MOST_NEW = 2048
# of one that has more messages, nothing is kept
MOST_MESSAGES = 4096


class Turn(NamedTuple):
    """One message: its digest, its bytes, and whether it is an answer."""

    digest: bytes
    size: int
    is_answer: bool


@dataclass(frozen=True)
class Turns:
    """The messages of a chat, without their contents.

    Attributes
    ----------
    others
        The digest of all other fields.
    messages
        The messages.
    """

    others: bytes
    messages: tuple[Turn, ...]

    @classmethod
    def of(cls, chat: Mapping[str, Any]) -> Turns | None:
        """Those of a chat as ``/apply-template`` takes it; None if it is of another form."""
        messages = chat.get("messages")
        if not isinstance(messages, list) or len(messages) > MOST_MESSAGES:
            return None
        try:
            others = _digest({name: value for name, value in chat.items() if name != "messages"})
            return cls(others[0], tuple(Turn(*_digest(one), _is_answer(one)) for one in messages))
        except RecursionError:
            # what is nested deeply may be read, and not be written
            return None

    def follow(self, last: Turns) -> bool:
        """Whether this is the next request of a conversation: all messages of the last one, its answer, little more.

        Bytes do not tell that: two users with one system prompt differ in few of them.
        """
        n = len(last.messages)
        new = self.messages[n:]
        return (
            self.others == last.others
            and self.messages[:n] == last.messages
            and bool(new)
            and new[0].is_answer
            and sum(one.size for one in new) <= MOST_NEW
        )


def _digest(value: object) -> tuple[bytes, int]:
    text = json.dumps(value).encode()
    return hashlib.blake2b(text, digest_size=16).digest(), len(text)


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"
