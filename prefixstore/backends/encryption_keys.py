"""The keys of encrypted locations, and where they come from.

A file of keys is text. Each line has a key of the store, or of one tenant; the newest of each are the last ones. All
are 32 random bytes::

    key 9uK1…=
    key Jz0c…=
    tenant alice 4mQx…=
    tenant bob forgotten:2f1c8a90d4b6e735

A key alone, without the word, is one too. Names of tenants are percent-encoded. Of a key that was forgotten its id is
left.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable
from urllib.parse import quote, unquote

from prefixstore.backends.files import expanded
from prefixstore.backends.trusted import require_trusted_files
from prefixstore.errors import InvalidParameterError, LocationError, StorageError, UnavailableError

# where the keys come from if a store is not told
ENVIRONMENT = "PREFIXSTORE_KEY"
NONE = "none"
SECRET_BYTES = 32
ID_BYTES = 8
_OF_ID = b"prefixstore key"
# what stands before the id of a key that was forgotten
FORGOTTEN = "forgotten:"
# Without comments. A key has one form only, so that it can be found in the text.
_LINE = re.compile(rf"(?:key |tenant (\S+) )?(?:([A-Za-z0-9+/]{{42}}[AEIMQUYcgkosw048]=)|{FORGOTTEN}([0-9a-f]{{16}}))")
COMMAND_SECONDS = 60
# The row that says that a location is encrypted: these words, and a sealed message.
HEADER = b"g"
MAGIC = b"prefixstore encrypted\n"


@runtime_checkable
class KeyProvider(Protocol):
    """Gives the text of a file of keys: when a store is opened, and again if its location has a key that is not known.

    If it raises an error, the location cannot be used now.
    """

    def read(self) -> str:
        """The text."""


Key: TypeAlias = "str | KeyProvider"


_default: Key | None = None


def use_by_default(key: Key | None) -> None:
    """Have locations opened with this key if they are given none, and `ENVIRONMENT` is not set."""
    global _default
    if key is not None:
        provider_of(key)  # raises if it is none
    _default = key


def key_id(key: bytes) -> bytes:
    """By which a location says that it needs this key: it tells nothing of it."""
    return hashlib.blake2b(key, digest_size=ID_BYTES, person=_OF_ID).digest()


def line_of(key: bytes, tenant: str | None = None) -> str:
    """The line of a file of keys with this key."""
    word = "key" if tenant is None else f"tenant {quote(tenant, errors='surrogatepass')}"
    return f"{word} {base64.b64encode(key).decode()}\n"


def key_of(stored: bytes | None) -> bytes | None:
    """The id of the key under which a header is sealed; None if it is none: the location is not encrypted."""
    return stored[len(MAGIC) :][:ID_BYTES] if stored is not None and stored.startswith(MAGIC) else None


@dataclass(frozen=True)
class Keys:
    """What is in a file of keys."""

    # all keys, by their ids
    secrets: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)
    # the ids of those of the store (None), and of each tenant that has any, by its name (its salt); the newest last
    ids: Mapping[str | None, Sequence[bytes]] = field(default_factory=dict)
    # names of tenants whose key was deleted, by its id: what was stored under it counts as deleted
    forgotten: Mapping[bytes, str] = field(default_factory=dict)

    @property
    def masters(self) -> Mapping[bytes, bytes]:
        """The keys of the store, by their ids. No tenant has one, so no tenant can forge what they seal."""
        return {name: self.secrets[name] for name in self.ids.get(None, ())}

    @property
    def newest(self) -> bytes:
        """The id of the key under which everything is written that belongs to no tenant with a key."""
        return self.ids[None][-1]

    @property
    def current(self) -> tuple[bytes, ...]:
        """The ids of all keys under which something is written: the newest ones, that of the store first."""
        return (self.newest, *(names[-1] for tenant, names in self.ids.items() if tenant is not None))

    def missing(self, needed: Sequence[bytes]) -> list[bytes]:
        """Those of these keys, by their ids, that are not there; one that was forgotten is not missing."""
        return [name for name in needed if name not in self.secrets and name not in self.forgotten]

    @classmethod
    def parse(cls, text: str, source: str) -> Keys:
        """Read the text of a file of keys.

        Raises `LocationError` if it is none. The message names `source` and the line, and repeats nothing of it.
        """
        found: dict[bytes, bytes] = {}
        ids: dict[str | None, list[bytes]] = {}
        forgotten: dict[bytes, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not (words := line.partition("#")[0].split()):
                continue
            match = _LINE.fullmatch(" ".join(words))
            quoted, word, gone = match.groups() if match is not None else (None, None, None)
            tenant = None if quoted is None else unquote(quoted, errors="surrogatepass")
            key = base64.b64decode(word or "")
            name = key_id(key)
            if gone and tenant is not None:
                forgotten[bytes.fromhex(gone)] = tenant
            elif key and name not in found:
                found[name] = key
                ids.setdefault(tenant, []).append(name)
            else:
                raise LocationError(
                    f"line {number} of {source} is not a key, or repeats that of another line: write 32 bytes in "
                    "base64, after the word key, or after tenant and a name; prefixstore key new makes one"
                )
        if None not in ids:
            raise LocationError(f"{source} has no key; prefixstore key new makes one")
        return cls(found, ids, forgotten)

    @classmethod
    def read(cls, provider: KeyProvider) -> Keys:
        """What a provider gives.

        Raises `LocationError` as `parse` does, or if nothing is where the keys should be, and `UnavailableError` if an
        object raises an error that is none of a location.
        """
        try:
            return cls.parse(provider.read(), name_of_provider(provider))
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - an object is the user's, and may raise anything
            wrong = LocationError if isinstance(provider, Source) else UnavailableError
            # the text of an error may have the command, and so a password
            reason = getattr(error, "strerror", None) or type(error).__name__
            message = f"{name_of_provider(provider)} gives no keys: {reason}; prefixstore key new makes a file of them"
            raise wrong(message) from None


def name_of_provider(provider: KeyProvider) -> str:
    """How messages name a provider: a user's own object by its type, since its text may contain keys."""
    return str(provider) if isinstance(provider, Source) else type(provider).__name__


def provider_of(key: Key | None) -> KeyProvider | None:
    """Where keys come from; None if nothing is to be encrypted.

    `key` is ``"file:PATH"``, ``"env:NAME"`` (the text is in a variable), ``"command:…"`` (it is what the command
    prints), or an object that gives it; ``"none"`` for no keys; None for what `ENVIRONMENT` says, or else for no keys.
    Raises `InvalidParameterError` if it is none of these.
    """
    if key is None:
        # an empty one is an error: a command that should have given it may have failed
        key = os.environ.get(ENVIRONMENT, _default or NONE)
    if isinstance(key, KeyProvider):
        return key
    if key == NONE:
        return None
    kind, _, rest = key.partition(":") if isinstance(key, str) else ("", "", "")
    if kind not in ("file", "env", "command") or not rest.strip():
        # what was given may be the key itself
        raise InvalidParameterError(
            "key (PREFIXSTORE_KEY, --from-key, --to-key) must be a KeyProvider, or begin with file:, env: or command:, "
            'as in "file:/etc/kv.key"; "none" is for no encryption'
        )
    return Source(kind, rest)


@dataclass(frozen=True)
class Source:
    """Where `key` says that the keys are."""

    kind: str
    rest: str = field(repr=False)

    def __str__(self) -> str:
        return {"file": self.rest, "env": f"the variable {self.rest}"}.get(self.kind, "the command for the keys")

    def read(self) -> str:
        if self.kind == "env":
            return os.environ.get(self.rest, "")
        if self.kind == "file":
            # Kubernetes mounts a secret as a link
            path = Path(expanded(self.rest)).resolve(strict=True)
            require_trusted_files(path)
            if os.name == "posix" and path.stat().st_mode & stat.S_IRWXO:
                raise LocationError(f"{path} can be read by every user; run: chmod o= '{path}'")
            return path.read_text("utf-8-sig")
        command = shlex.split(self.rest)
        try:
            done = subprocess.run(  # noqa: S603 - the user's own
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=COMMAND_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise LocationError(f"the command for the keys has not ended after {COMMAND_SECONDS} s") from None
        if done.returncode:
            raise LocationError(f"the command for the keys has ended with code {done.returncode}")
        return done.stdout.decode()
