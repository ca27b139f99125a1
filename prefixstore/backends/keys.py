"""The keys of encrypted locations, and where they come from.

A file of keys is text. Each line has a key, the newest first, or the key of one tenant; all are 32 random bytes::

    key 9uK1…=
    key Jz0c…=
    tenant alice 4mQx…=

A key alone, without the word, is one too. Names of tenants are percent-encoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
import shlex
import stat
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable
from urllib.parse import quote, unquote

from prefixstore.backends.files import expanded
from prefixstore.backends.trusted import require_trusted_files
from prefixstore.errors import InvalidParameterError, LocationError

__all__ = ["ENVIRONMENT", "Key", "KeyProvider", "Keys", "key_id", "new_key", "provider_of"]

# where the keys come from if a store is not told
ENVIRONMENT = "PREFIXSTORE_KEY"
SECRET_BYTES = 32
_OF_ID = b"prefixstore key"
NONE = "none"
COMMAND_SECONDS = 60
HEADER = "# Keys of prefixstore, the newest first. Whoever has this file can read what is stored under them."


@runtime_checkable
class KeyProvider(Protocol):
    """Gives the text of a file of keys: when a store is opened, and again if its location has a key that is not known.

    It may raise any error: then the location cannot be opened now.
    """

    def read(self) -> str:
        """The text."""


Key: TypeAlias = "str | KeyProvider"


def new_key() -> bytes:
    """A random key."""
    return secrets.token_bytes(SECRET_BYTES)


def key_id(key: bytes) -> bytes:
    """By which a location says that it needs this key: 4 bytes, which tell nothing of it."""
    return hashlib.blake2b(key, digest_size=4, person=_OF_ID).digest()


@dataclass(frozen=True)
class Keys:
    """What is in a file of keys.

    Attributes
    ----------
    masters
        The keys by their ids, the newest first.
    tenants
        The keys of tenants that have one of their own, by the name of the tenant (its salt).
    """

    masters: Mapping[bytes, bytes]
    tenants: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, source: str) -> Keys:
        """Read the text of a file of keys.

        Raises
        ------
        LocationError
            If it is not one. The message names `source` and the line, and repeats nothing of it.
        """
        masters: dict[bytes, bytes] = {}
        tenants: dict[str, bytes] = {}
        for number, line in enumerate(text.lstrip("\ufeff").splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                secret = base64.b64decode(words[-1], altchars=b"-_", validate=True)
            except (binascii.Error, ValueError):
                secret = b""
            is_key = len(words) == 1 or (len(words) == 2 and words[0] == "key")
            if len(secret) != SECRET_BYTES or not (is_key or (len(words) == 3 and words[0] == "tenant")):
                raise LocationError(
                    f"line {number} of {source} is no key: write 32 bytes in base64, after the word key, or after "
                    "tenant and a name; prefixstore key new makes one"
                )
            if is_key:
                masters.setdefault(key_id(secret), secret)
            else:
                tenants[unquote(words[1])] = secret
        if not masters:
            raise LocationError(f"{source} has no key; prefixstore key new makes one")
        return cls(masters, tenants)

    @classmethod
    def read(cls, provider: KeyProvider) -> Keys:
        """What a provider gives. Raises `LocationError` as `parse` does."""
        return cls.parse(provider.read(), str(provider))

    def text(self) -> str:
        """The text of a file of keys."""
        lines = [f"key {base64.b64encode(key).decode()}" for key in self.masters.values()]
        lines += [f"tenant {quote(name)} {base64.b64encode(key).decode()}" for name, key in self.tenants.items()]
        return "\n".join([HEADER, *lines, ""])


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
        key = os.environ.get(ENVIRONMENT) or NONE
    if isinstance(key, KeyProvider):
        return key
    if key == NONE:
        return None
    if not isinstance(key, str):
        raise InvalidParameterError(f"key must be a string or a KeyProvider, not {type(key).__name__}")
    kind, _, rest = key.partition(":")
    if kind not in SOURCES or not rest:
        # what was given may be the key itself
        raise InvalidParameterError('key must begin with file:, env: or command:, as in "file:/etc/prefixstore.key"')
    return SOURCES[kind](rest)


@dataclass(frozen=True)
class _File:
    path: str

    def read(self) -> str:
        # Kubernetes mounts a secret as a link
        path = Path(expanded(self.path)).resolve()
        require_trusted_files(path)
        try:
            if os.name == "posix" and path.stat().st_mode & stat.S_IRWXO:
                raise LocationError(f"{path} can be read by every user; run: chmod 600 '{path}'")
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise LocationError(
                f"the keys in {path} cannot be read: {reason}; prefixstore key new makes some"
            ) from None

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class _Variable:
    name: str

    def read(self) -> str:
        text = os.environ.get(self.name)
        if not text:
            raise LocationError(f"the variable {self.name}, which should have the keys, is not set")
        return text

    def __str__(self) -> str:
        return f"the variable {self.name}"


@dataclass(frozen=True)
class _Command:
    line: str

    def read(self) -> str:
        try:
            done = subprocess.run(  # noqa: S603 - the user's own command
                shlex.split(self.line),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=COMMAND_SECONDS,
                check=True,
            )
            return done.stdout.decode()
        except subprocess.CalledProcessError as error:
            raise LocationError(f"{self} has ended with code {error.returncode}, without keys") from None
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
            raise LocationError(f"{self} gives no keys: {type(error).__name__}") from None
        except ValueError as error:
            raise LocationError(f"{self} cannot be run: {error}") from None

    def __str__(self) -> str:
        return f"the command {self.line.split()[0]}"


SOURCES: dict[str, Callable[[str], KeyProvider]] = {"file": _File, "env": _Variable, "command": _Command}
