"""The namespace: everything that must be equal for a stored state to be valid in a context."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from prefixstore.errors import CorruptError
from prefixstore.format.keys import namespace_key

# What the client of a server may add to its tenant's name. It stands before the first colon, where nothing else has a
# slash.
_WITHIN = re.compile(r"/(cache-salt-[0-9a-f]{32})(?=:)")
_SCALARS = (str, int, float, bool, type(None))


@lru_cache
def parted(salt: str) -> tuple[str, str | None]:
    """The tenant of a salt, to which quotas, purges and keys apply, and the part of it that the salt names, if any."""
    source, colon, name = salt.partition(":")
    found = _WITHIN.search(source + colon)
    return _WITHIN.sub("", source + colon, count=1) + name, found[1] if found else None


def model_digits(settings: Mapping[str, object]) -> str:
    """The first 12 digits of the digest of the model, its name where it has no other; empty without a model."""
    return str(settings.get("model") or "")[:12]


@dataclass(frozen=True)
class Namespace:
    """The settings that a state depends on, and their fingerprint.

    Parameters
    ----------
    settings
        Everything that must be equal, by name. Values are JSON scalars: str, int, float, bool or None.

    Notes
    -----
    Two contexts share pages if and only if their settings are equal. The store keeps the settings beside the
    fingerprint, so that it can show later what differs.
    """

    settings: Mapping[str, str | int | float | bool | None]

    @property
    def canonical(self) -> bytes:
        """The settings as canonical JSON: sorted keys, no whitespace, UTF-8."""
        return json.dumps(dict(self.settings), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def key(self) -> bytes:
        """The fingerprint: a hash of `canonical`, `KEY_BYTES` long."""
        return namespace_key(self.canonical)

    @property
    def salt(self) -> str | None:
        """The tenant, if the settings name one."""
        salt = self.settings.get("salt")
        return str(salt) if salt is not None else None

    def differences(self, other: Namespace) -> dict[str, tuple[object, object]]:
        """The settings that differ from `other`: name to (here, there)."""
        names = sorted(self.settings.keys() | other.settings.keys())
        pairs = {name: (self.settings.get(name), other.settings.get(name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def nearest_differences(self, stored: Iterable[Namespace]) -> dict[str, tuple[object, object]]:
        """The differences from the most similar of these namespaces.

        Empty if this one is among them, or if there are none. Where the models differ, only that is returned: their
        settings do not matter then.
        """
        others = list(stored)
        if not others or any(other.key == self.key for other in others):
            return {}
        nearest = min((self.differences(other) for other in others), key=lambda found: ("model" in found, len(found)))
        return {"model": nearest["model"]} if "model" in nearest else nearest

    @classmethod
    def parse(cls, canonical: bytes) -> Namespace:
        """The namespace whose `canonical` bytes these are.

        Raises
        ------
        CorruptError
            If they are not settings, or not canonical.
        """
        try:
            settings = json.loads(canonical)
            is_canonical = isinstance(settings, dict) and cls(settings).canonical == canonical
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"the settings of a namespace are not valid JSON: {error}") from None
        if not is_canonical or not all(isinstance(value, _SCALARS) for value in settings.values()):
            raise CorruptError("the settings of a namespace are not a canonical JSON object of scalars")
        return cls(settings)


def salt_in(settings: bytes | None) -> str | None:
    """The salt of a namespace with these settings."""
    if settings is not None:
        with suppress(CorruptError):
            return Namespace.parse(settings).salt
    return None
