"""The parameters of `PrefixStore`: their defaults, and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from prefixstore.backends.encryption_keys import Key, provider_of
from prefixstore.engine.budget import Budget
from prefixstore.engine.eviction import policy_named
from prefixstore.engine.policy import Policy
from prefixstore.errors import InvalidParameterError
from prefixstore.format.autocodec import Encoder
from prefixstore.units import parse_bytes, parse_seconds, shown


@dataclass(frozen=True)
class Parameters:
    """Validated parameters in internal units: bytes, and seconds. None is no limit.

    Attributes
    ----------
    label
        The parameter `namespace`.
    budget
        From `max_bytes`, `max_entries` and `quota`.
    keys
        Where the keys of the location are, and those of a far one.
    """

    # defaults, as users write them
    PAGE_TOKENS: ClassVar[int] = 256
    MIN_TOKENS: ClassVar[int] = 16
    SNAPSHOT_INTERVAL: ClassVar[int] = 1024
    MAX_SNAPSHOTS: ClassVar[int] = 16
    MAX_BYTES: ClassVar[str] = "10GiB"
    QUEUE_BYTES: ClassVar[str] = "256MiB"
    CODEC: ClassVar[str] = "auto"
    POLICY: ClassVar[str] = "adaptive"
    MAX_DELAY: ClassVar[float] = 0.1

    label: str | None
    salt: str | None
    page_tokens: int
    min_tokens: int
    snapshot_interval: int
    max_snapshots: int
    budget: Budget
    ttl: float | None
    encoder: Encoder
    policy: Policy
    priority: int
    read_only: bool
    write_behind: bool
    queue_bytes: int
    max_delay: float | None
    far_budget: Budget
    far_encoder: Encoder
    far_policy: Policy
    keys: tuple[Key | None, Key | None]

    @classmethod
    def parse(cls, **given: Any) -> Parameters:
        """Check the parameters of a `PrefixStore`, all of them, by their names there.

        Raises `InvalidParameterError` if one cannot be used; the message names it.
        """
        policy, far_policy = policy_named(given["policy"]), policy_named(given["policy"])
        codec = given["codec"]
        if not isinstance(codec, str):
            raise InvalidParameterError(f'codec={shown(codec)} must be a string, such as "auto"')
        size = parse_bytes(given["max_bytes"], "max_bytes")
        far_size = size if given["far_max_bytes"] is None else parse_bytes(given["far_max_bytes"], "far_max_bytes")
        quota = None if given["quota"] is None else parse_bytes(given["quota"], "quota")
        least, limit = (size, "max_bytes") if size <= far_size else (far_size, "far_max_bytes")
        if quota is not None and quota > least:
            raise InvalidParameterError(f"quota={quota} is larger than {limit}={least}; lower it, or raise {limit}")
        entries = None if given["max_entries"] is None else _count(given, "max_entries", 1)
        return cls(
            label=_text(given["namespace"], "namespace"),
            salt=_text(given["salt"], "salt"),
            page_tokens=_count(given, "page_tokens", 1),
            min_tokens=_count(given, "min_tokens", 0),
            snapshot_interval=_count(given, "snapshot_interval", 1),
            max_snapshots=_count(given, "max_snapshots", 1),
            budget=Budget(size, entries, quota),
            ttl=None if given["ttl"] is None else parse_seconds(given["ttl"], "ttl"),
            encoder=Encoder(codec),
            policy=policy,
            priority=_count(given, "priority", -(2**15), 2**15 - 1),
            read_only=_flag(given["read_only"], "read_only"),
            write_behind=_flag(given["write_behind"], "write_behind"),
            queue_bytes=parse_bytes(given["queue_bytes"], "queue_bytes"),
            max_delay=None if given["max_delay"] is None else parse_seconds(given["max_delay"], "max_delay"),
            far_budget=Budget(far_size, None, quota),
            far_encoder=Encoder(codec),
            far_policy=far_policy,
            keys=_keys(given["key"]),
        )


def _count(given: Mapping[str, Any], parameter: str, smallest: int, largest: int = 2**31 - 1) -> int:
    value = given[parameter]
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise InvalidParameterError(f"{parameter}={shown(value)} must be an integer of at least {smallest}")
    if value > largest:
        raise InvalidParameterError(f"{parameter}={shown(value)} must be an integer of at most {largest}")
    return value


def _flag(value: bool, parameter: str) -> bool:
    # "false", from a file of settings or the environment, would be taken for true
    if not isinstance(value, bool):
        raise InvalidParameterError(f"{parameter}={shown(value)} must be True or False")
    return value


def _keys(key: Any) -> tuple[Key | None, Key | None]:
    given = list(key) if isinstance(key, (list, tuple)) else [key, key]
    if len(given) != 2:
        raise InvalidParameterError(
            "key must be one for all locations, or a list of two: of the nearer, and of the far"
        )
    for one in given:
        provider_of(one)
    return given[0], given[1]


def _text(value: str | None, parameter: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidParameterError(f"{parameter}={shown(value)} must be a non-empty string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidParameterError(
            f"{parameter}={shown(value)} is not valid text: it has an unpaired surrogate"
        ) from None
    return value
