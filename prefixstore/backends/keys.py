"""The keys of encrypted locations, and where they come from.

A file of keys is text. Each line has a key, the newest last, or the key of one tenant; all are 32 random bytes::

    key 9uK1…=
    key Jz0c…=
    tenant alice 4mQx…=
    forgotten bob 2f1c8a90d4b6e735

A key alone, without the word, is one too. Names of tenants are percent-encoded. Of a key that was forgotten its id is
left.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import shlex
import stat
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable
from urllib.parse import quote, unquote

from prefixstore.backends.files import expanded
from prefixstore.backends.trusted import require_trusted_files
from prefixstore.errors import InvalidParameterError, LocationError, StorageError, UnavailableError

__all__ = [
    "ENVIRONMENT",
    "HEADER",
    "ID_BYTES",
    "MAGIC",
    "Key",
    "KeyProvider",
    "Keys",
    "key_id",
    "key_of",
    "line_of",
    "new_key",
    "provider_of",
    "tenant_in",
    "use_by_default",
]

# where the keys come from if a store is not told
ENVIRONMENT = "PREFIXSTORE_KEY"
NONE = "none"
SECRET_BYTES = 32
ID_BYTES = 8
_OF_ID = b"prefixstore key"
COMMAND_SECONDS = 60
# The row that says that a location is encrypted: these words, and a sealed message. In one that is not, it has 8 bytes
# (it is `engine.keyspace.GENERATION`), so a store without a key finds out.
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
    """Have locations opened with this key if they are given none, and `ENVIRONMENT` is not set.

    Raises `InvalidParameterError` as `provider_of` does.
    """
    global _default
    if key is not None:
        provider_of(key)
    _default = key


def new_key() -> bytes:
    """A random key."""
    return secrets.token_bytes(SECRET_BYTES)


@lru_cache(10_000)
def key_id(key: bytes) -> bytes:
    """By which a location says that it needs this key: it tells nothing of it."""
    return hashlib.blake2b(key, digest_size=ID_BYTES, person=_OF_ID).digest()


def line_of(key: bytes, tenant: str | None = None) -> str:
    """The line of a file of keys with this key."""
    word = "key" if tenant is None else f"tenant {quote(tenant, errors='surrogatepass')}"
    return f"{word} {base64.b64encode(key).decode()}\n"


def tenant_in(word: str) -> str:
    """The name of a tenant that a word in a file of keys is."""
    return unquote(word, errors="surrogatepass")


def key_of(stored: bytes | None) -> bytes | None:
    """The id of the key under which a header is sealed; None if it is none: the location is not encrypted."""
    return stored[len(MAGIC) :][:ID_BYTES] if stored is not None and stored.startswith(MAGIC) else None


@dataclass(frozen=True)
class Keys:
    """What is in a file of keys.

    Attributes
    ----------
    masters
        The keys by their ids, the newest first.
    tenants
        The keys of tenants that have one of their own, by the name of the tenant (its salt).
    forgotten
        Names of tenants whose key was deleted, by its id: what was stored under it counts as deleted.
    """

    masters: Mapping[bytes, bytes]
    tenants: Mapping[str, bytes] = field(default_factory=dict)
    forgotten: Mapping[bytes, str] = field(default_factory=dict)

    @property
    def newest(self) -> bytes:
        """The id of the key under which everything is written."""
        return next(iter(self.masters))

    @property
    def of_tenants(self) -> list[bytes]:
        """Ids of the keys of tenants."""
        return list(map(key_id, self.tenants.values()))

    @property
    def known(self) -> set[bytes]:
        """Ids of all keys, including those that were forgotten, which are not missing."""
        return {*self.masters, *self.of_tenants, *self.forgotten}

    @classmethod
    def parse(cls, text: str, source: str) -> Keys:
        """Read the text of a file of keys.

        Raises
        ------
        LocationError
            If it is not one. The message names `source` and the line, and repeats nothing of it.
        """
        masters: list[bytes] = []
        tenants: dict[str, bytes] = {}
        forgotten: dict[bytes, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            match line.partition("#")[0].split():
                case []:
                    pass
                case ["forgotten", name, known_by] if gone := _decoded(bytes.fromhex, known_by, ID_BYTES):
                    forgotten[gone] = tenant_in(name)
                case ["tenant", name, key] if secret := _decoded(_base64, key, SECRET_BYTES):
                    if tenants.setdefault(tenant_in(name), secret) != secret:
                        raise LocationError(f"line {number} of {source} has another key of a tenant that has one")
                case ["key", key] | [key] if secret := _decoded(_base64, key, SECRET_BYTES):
                    masters.insert(0, secret)
                case _:
                    raise LocationError(
                        f"line {number} of {source} is no key: write 32 bytes in base64, after the word key, or after "
                        "tenant and a name; prefixstore key new makes one"
                    )
        if not masters:
            raise LocationError(f"{source} has no key; prefixstore key new makes one")
        return cls({key_id(key): key for key in masters}, tenants, forgotten)

    @classmethod
    def read(cls, provider: KeyProvider) -> Keys:
        """What a provider gives.

        Raises
        ------
        LocationError
            As `parse` does.
        UnavailableError
            If the provider raises an error that is none of a location.
        """
        try:
            return cls.parse(provider.read(), str(provider))
        except StorageError:
            raise
        except Exception as error:  # a provider is the user's, and may raise anything
            raise UnavailableError(f"{provider} gives no keys: {type(error).__name__}") from error


_base64 = partial(base64.b64decode, validate=True)


def _decoded(decode: Callable[[str], bytes], word: str, size: int) -> bytes | None:
    """The bytes that a word stands for; None if it does not, or they are not so many."""
    try:
        found = decode(word)
    except ValueError:
        return None
    return found if len(found) == size else None


def provider_of(key: Key | None) -> KeyProvider | None:
    """Where keys come from; None if nothing is to be encrypted.

    Parameters
    ----------
    key
        ``"file:PATH"``, ``"env:NAME"`` (the text is in a variable), ``"command:…"`` (it is what the command prints), or
        an object that gives it; ``"none"`` for no keys; None for what `ENVIRONMENT` says, or else for no keys.

    Raises
    ------
    InvalidParameterError
        If it is none of these.
    """
    if key is None:
        key = os.environ.get(ENVIRONMENT) or _default or NONE
    if isinstance(key, KeyProvider):
        return key
    if key == NONE:
        return None
    if not isinstance(key, str):
        raise InvalidParameterError(f"key must be a string or a KeyProvider, not {type(key).__name__}")
    kind, _, rest = key.partition(":")
    if kind not in SOURCES or not rest.strip():
        # what was given may be the key itself
        raise InvalidParameterError(
            "key (PREFIXSTORE_KEY, --from-key, --to-key) must begin with file:, env: or command:, as in "
            '"file:/etc/kv.key"; "none" is for no encryption'
        )
    return _Source(kind, rest)


@dataclass(frozen=True)
class _Source:
    """Where `key` says that the keys are."""

    kind: str
    rest: str

    def read(self) -> str:
        return SOURCES[self.kind](self.rest)

    def __str__(self) -> str:
        return {"file": self.rest, "env": f"the variable {self.rest}"}.get(self.kind, "the command for the keys")


def _file(name: str) -> str:
    name = expanded(name)
    try:
        # Kubernetes mounts a secret as a link
        path = Path(name).resolve(strict=True)
        require_trusted_files(path)
        if os.name == "posix" and path.stat().st_mode & stat.S_IRWXO:
            raise LocationError(f"{path} can be read by every user; run: chmod o= '{path}'")
        return path.read_text("utf-8-sig")
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or ("it is not text" if isinstance(error, UnicodeError) else error)
        raise LocationError(f"the keys in {name} cannot be read: {reason}; prefixstore key new makes one") from None


def _variable(name: str) -> str:
    text = os.environ.get(name)
    if not text:
        raise LocationError(f"the variable {name}, which should have the keys, is not set")
    return text


def _command(line: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - the user's own command
            shlex.split(line), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=COMMAND_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        raise LocationError(f"the command for the keys has ended with code {error.returncode}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LocationError(f"the command for the keys cannot be run: {reason}") from None
    return done.stdout.decode()


SOURCES: dict[str, Callable[[str], str]] = {"file": _file, "env": _variable, "command": _command}
