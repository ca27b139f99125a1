"""The keys of encrypted stores: ``key new``, ``key add``, ``key rotate``, ``key forget``."""

from __future__ import annotations

from pathlib import Path

from prefixstore.backends.encryption import ciphers
from prefixstore.backends.keys import Keys, key_id, new_key, provider_of
from prefixstore.cli.command import Result
from prefixstore.cli.files import writing
from prefixstore.cli.output import say
from prefixstore.errors import InvalidParameterError, LocationError
from prefixstore.maintenance.archive import Archive
from prefixstore.units import counted

__all__ = ["add", "forget", "new", "rotate"]


def new(key_file: str, *, tenant: str | None = None) -> Result:
    """Make a file with a new key.

    Only its owner can read the file. A file that exists is never replaced. Keep a copy elsewhere: without it, nothing
    that was stored under the key can be read. With --tenant it adds a key of one tenant to a file that exists.

    Example: prefixstore key new /etc/prefixstore.key
    """
    if tenant is None:
        ciphers()
        key = new_key()
        if Path(key_file).exists():
            raise LocationError(f"{key_file} exists; prefixstore key add puts a new key into it")
        _write(key_file, Keys({key_id(key): key}), replace=False)
        return _done(
            key_file, key_id(key), f"{key_file} has the new key {key_id(key).hex()}; keep a copy of it elsewhere"
        )
    keys = _read(key_file)
    if tenant in keys.tenants:
        raise InvalidParameterError(f"{key_file} has a key of {tenant!r} already")
    _write(key_file, Keys(keys.masters, {**keys.tenants, tenant: new_key()}))
    what = f"{key_file} has a key of {tenant!r}: from now on, what that tenant stores needs it"
    return _done(key_file, None, what)


def add(key_file: str) -> Result:
    """Put a new key into a file of keys, before the others.

    What is written from now on is under this key, by processes that have it: they read the file when they start, and
    when a store has a key that they do not know. key rotate then replaces the others.

    Example: prefixstore key add /etc/prefixstore.key
    """
    keys, key = _read(key_file), new_key()
    _write(key_file, Keys({key_id(key): key, **keys.masters}, keys.tenants))
    return _done(
        key_file,
        key_id(key),
        f"{key_file} has the new key {key_id(key).hex()}, before {counted(len(keys.masters), 'other')}",
    )


def rotate(location: str) -> Result:
    """Encrypt all of a store under the newest key.

    It needs no other one then. Servers may go on using it if they can read the newest key. May be interrupted, and run
    again.

    Example: PREFIXSTORE_KEY=file:/etc/prefixstore.key prefixstore key rotate lmdb:///var/cache/kv
    """
    with Archive(location) as archive:
        done, name = archive.rotate_keys(lambda n: say(f"{n:,} rows"))
        where = archive.location
    data = {"location": where, "key": name.hex(), "rows": done}
    return Result(data, f"{where}: {counted(done, 'row')} encrypted anew; it needs the key {name.hex()} alone")


def forget(key_file: str, tenant: str) -> Result:
    """Delete the key of a tenant from a file of keys.

    Nothing that was stored under it can be read any more. Purge the tenant first, while it can be read: prefixstore
    purge STORE --salt TENANT. This is for what purge does not reach: copies and backups of the store. Copies of the
    file of keys still have the key.

    Example: prefixstore key forget /etc/prefixstore.key alice
    """
    keys = _read(key_file)
    if tenant not in keys.tenants:
        raise InvalidParameterError(f"{key_file} has no key of {tenant!r}")
    _write(key_file, Keys(keys.masters, {name: key for name, key in keys.tenants.items() if name != tenant}))
    return _done(key_file, None, f"{key_file} has no key of {tenant!r} any more; delete its copies, too")


def _read(key_file: str) -> Keys:
    provider = provider_of(f"file:{key_file}")
    assert provider is not None
    return Keys.read(provider)


def _write(key_file: str, keys: Keys, *, replace: bool = True) -> None:
    with writing(key_file, replace=replace) as file:
        file.write(keys.text().encode())


def _done(key_file: str, name: bytes | None, text: str) -> Result:
    return Result({"file": key_file, "key": None if name is None else name.hex()}, text)
