"""Parses the URL of a store in object storage: a bucket, a prefix, options. Credentials are never part of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from prefixstore.backends.location import without_password
from prefixstore.errors import InvalidParameterError

__all__ = ["Address"]

# options of a URL, by scheme, and what obstore calls them
_COMMON = {"connect_timeout": "connect_timeout", "timeout": "timeout"}
_OPTIONS = {
    "s3": {
        "endpoint": "endpoint",
        "region": "region",
        "virtual_hosted_style": "virtual_hosted_style_request",
        "anonymous": "skip_signature",
    },
    "gs": {},
    "az": {"account": "account_name", "endpoint": "endpoint"},
}
_SWITCHES = ("virtual_hosted_style", "anonymous")
# bytes: S3 has names of at most 1,024, and ours are up to 750 long
LONGEST_PREFIX = 250
_SECONDS = re.compile(r"[0-9]{1,5}(\.[0-9]+)?")
# what can be a part of the URL of a request: for anything else obstore panics
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
_ENDPOINT = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?")


@dataclass(frozen=True)
class Address:
    """Where a store is. The prefix has no slash at its ends, and may be empty.

    `options` are for obstore, by its names; `timeouts` are seconds, by the names of its ``client_options``.
    """

    scheme: str
    bucket: str
    prefix: str
    shown: str
    options: Mapping[str, str | bool] = field(default_factory=dict)
    timeouts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, location: str) -> Address:
        """Read a URL such as ``"s3://bucket/prefix?endpoint=http://127.0.0.1:8333"``.

        Raises `InvalidParameterError` if it is not valid, or has a user name or a password.
        """
        shown = without_password(location)
        try:
            parts = urlsplit(location)
        except ValueError:
            raise InvalidParameterError(f"location={shown!r} is not a valid URL") from None
        if "@" in parts.netloc:
            raise InvalidParameterError(
                "location has a user name or a password in it; leave credentials to the environment "
                "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a role, ...)"
            )
        scheme = parts.scheme.lower()
        if scheme == "file":
            raise InvalidParameterError(
                f"location={shown!r}: objects in a directory have no conditional writes; use lmdb:///path or "
                "sqlite:////path"
            )
        bucket, prefix = unquote(parts.netloc), unquote(parts.path).strip("/")
        if parts.fragment or not bucket:
            raise InvalidParameterError(f'location={shown!r} names no bucket; pass for example "s3://bucket/prefix"')
        if not _BUCKET.fullmatch(bucket):
            raise InvalidParameterError(f"location={shown!r}: the name of a bucket has letters, digits, . _ and - only")
        if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
            raise InvalidParameterError(f"location={shown!r} has an empty segment, . or .. in its prefix")
        if len(prefix.encode()) > LONGEST_PREFIX:
            raise InvalidParameterError(f"location={shown!r}: a prefix has at most {LONGEST_PREFIX} bytes")
        options, timeouts = _read_options(scheme, shown, parts.query)
        return cls(scheme, bucket, prefix, shown, options, timeouts)


def _read_options(scheme: str, shown: str, query: str) -> tuple[dict[str, str | bool], dict[str, float]]:
    """Options for obstore, and timeouts in seconds."""
    options: dict[str, str | bool] = {}
    timeouts: dict[str, float] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in _COMMON:
            if not _SECONDS.fullmatch(value) or not float(value):
                raise InvalidParameterError(f"location={shown!r}: {name} must be a number of seconds")
            timeouts[name] = float(value)
        elif name not in _OPTIONS[scheme]:
            known = ", ".join(sorted(_OPTIONS[scheme].keys() | _COMMON.keys()))
            # a credential may be among the options: neither names nor values are repeated
            raise InvalidParameterError(f"location has an unknown option; known for {scheme}:// are {known}")
        elif name in _SWITCHES:
            if value.lower() not in ("true", "false"):
                raise InvalidParameterError(f"location={shown!r}: {name} must be true or false")
            options[_OPTIONS[scheme][name]] = value.lower() == "true"
        else:
            if name == "endpoint" and not _ENDPOINT.fullmatch(value):
                raise InvalidParameterError("location: endpoint must be http://host:port or https://host:port")
            if name != "endpoint" and not _NAME.fullmatch(value):
                raise InvalidParameterError(f"location={shown!r}: {name} must have letters, digits and - only")
            options[_OPTIONS[scheme][name]] = value
    return options, timeouts
