"""The keys of encrypted stores: ``key new``, ``key add``, ``key list``, ``key rotate``, ``key forget``."""

from __future__ import annotations

import base64
import os
from functools import partial
from pathlib import Path

from prefixstore.backends.encryption_keys import ENVIRONMENT, FORGOTTEN, SECRET_BYTES, Keys, Source, key_id, line_of
from prefixstore.backends.files import expanded
from prefixstore.cli.command import Result
from prefixstore.cli.named_files import writing
from prefixstore.cli.output import DONE, FAILED, confirmed, table
from prefixstore.errors import InvalidParameterError, LocationError
from prefixstore.maintenance.archive import Archive
from prefixstore.units import counted

FIRST_LINE = "# Keys of prefixstore, the newest last. Whoever has this file can read what is stored under them.\n"


def new(key_file: str) -> Result:
    """Make a file with a new key.

    Only its owner can read the file. A file that exists is never replaced. Keep a copy elsewhere: without it, nothing
    that is stored under the key can be read.

    Example: prefixstore key new /etc/prefixstore.key
    """
    path, key = _path(key_file), os.urandom(SECRET_BYTES)
    if path.exists():
        raise InvalidParameterError(f"{path} exists; prefixstore key add puts a new key into it")
    with writing(str(path), replace=False) as file:
        file.write((FIRST_LINE + line_of(key)).encode())
    name = key_id(key).hex()
    text = f"{path} has the key {name}; keep a copy elsewhere. To use it:\nexport {ENVIRONMENT}=file:{path.absolute()}"
    return Result({"file": str(path), "key": name}, text)


def add(key_file: str, *, tenant: str | None = None) -> Result:
    """Add a new key to a file of keys.

    It is the newest, under which everything is written from then on: by stores that are opened, and by others as soon
    as they meet it. With --tenant it is the key of one tenant, without which what that tenant stores cannot be read.
    key rotate then encrypts what is stored already. The file is appended to, and stays as it is otherwise.

    Example: prefixstore key add /etc/prefixstore.key --tenant alice
    """
    path, key = _path(key_file), os.urandom(SECRET_BYTES)
    _read(path)
    if tenant is not None and not tenant.strip():
        raise InvalidParameterError("--tenant is empty")
    # one write, at the end wherever that is then: another one may add a key, too
    _write(path, "ab", b"\n" * (not path.read_bytes().endswith(b"\n")) + line_of(key, tenant).encode())
    name = key_id(key).hex()
    text = f"{path} has the key {name}" + ("" if tenant is None else f" of {tenant!r}")
    return Result(
        {"file": str(path), "key": name, "tenant": tenant},
        f"{text} now; prefixstore key rotate STORE encrypts what is stored already",
    )


def list_(key_file: str) -> Result:
    """List the ids of the keys in a file, in the order of their lines, the newest last.

    Then those of tenants, and of those who were forgotten.

    Example: prefixstore key list /etc/prefixstore.key
    """
    keys = _read(_path(key_file))
    forgotten = {name.hex(): tenant for name, tenant in keys.forgotten.items()}
    tenants = {tenant: [name.hex() for name in names] for tenant, names in keys.ids.items() if tenant is not None}
    names = [name.hex() for name in keys.ids[None]]
    rows = [["key", name, "the newest" if name == names[-1] else ""] for name in names]
    rows += [["tenant", name, tenant] for tenant, of_tenant in tenants.items() for name in of_tenant]
    rows += [["forgotten", name, tenant] for name, tenant in forgotten.items()]
    data = {"keys": names, "tenants": tenants, "forgotten": forgotten}
    return Result(data, lambda: table(["what", "id", "name"], rows))


def rotate(location: str) -> Result:
    """Encrypt everything in a store under the newest key.

    It needs no older one then, and what tenants have stored is under their keys. Servers may go on using the store if
    they can read the newest key. May be interrupted, and run again. Exit code 1: something could not be decrypted, and
    the older keys are still needed.

    Example: prefixstore key rotate lmdb:///var/cache/kv
    """
    with Archive(location) as archive:
        name, done, left = archive.rotate_keys()
        where = archive.location
    text = f"{where}: {counted(done, 'row')} encrypted anew; the newest key of the store is {name}"
    if left:
        rows = counted(left, "row")
        text += f"; {rows} cannot be decrypted, or are written by others under older keys: keep these keys"
    return Result({"location": where, "key": name, "rows": done, "left": left}, text, FAILED if left else DONE)


def forget(key_file: str, tenant: str, *, dry_run: bool = False, yes: bool = False) -> Result | int:
    """Delete the key of a tenant from a file of keys.

    What is stored under it counts as deleted, and can never be read again. Purge the tenant first: prefixstore purge
    STORE --salt TENANT. This is for what a purge does not reach: copies and backups of the store. Restart the servers
    that have read the key, and delete it from copies of the file.

    Example: prefixstore key forget /etc/prefixstore.key alice
    """
    path = _path(key_file)
    if tenant not in _read(path).ids:
        raise InvalidParameterError(f"{path} has no key of {tenant!r}; prefixstore key list shows what it has")
    overwrite = partial(_overwrite, path, tenant)
    question = f"{path}: delete the key of {tenant!r} for ever?"
    if confirmed(overwrite, lambda _: question, dry_run=dry_run, yes=yes) is None:
        return FAILED
    text = f"{path} {'would have' if dry_run else 'has'} no key of {tenant!r} any more"
    text += "; prefixstore check STORE --repair deletes what is left of it"
    return Result({"file": str(path), "tenant": tenant, "dry_run": dry_run}, text)


def _path(key_file: str) -> Path:
    """A file of keys: a link stays one. Accepts ``file:PATH``, too, as everything else takes it."""
    return Path(expanded(key_file.removeprefix("file:")))


def _read(path: Path) -> Keys:
    try:
        return Keys.read(Source("file", str(path)))
    except LocationError as error:
        # of a store it is a location that cannot be used; here it is the file that was named
        raise InvalidParameterError(str(error)) from None


def _write(path: Path, mode: str, data: bytes) -> None:
    """Write into a file of keys, which keeps its owner and its mode. Raises `InvalidParameterError`."""
    try:
        with path.open(mode) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InvalidParameterError(f"{path} cannot be written: {error.strerror}") from error


def _overwrite(path: Path, tenant: str, *, dry_run: bool) -> bool:
    """Overwrite the keys of a tenant by their ids, in their place."""
    keys, text = _read(path), path.read_bytes()
    for name in keys.ids[tenant]:
        key = base64.b64encode(keys.secrets[name])
        text = text.replace(key, f"{FORGOTTEN}{name.hex()}".encode().ljust(len(key)))
    if not dry_run:
        _write(path, "rb+", text)
    return True
