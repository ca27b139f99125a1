"""``prefixstore key``, and the other commands with encrypted stores and files."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from contextlib import closing

import pytest

from prefixstore.backends.encryption_keys import Keys, key_id, provider_of
from prefixstore.cli import main
from prefixstore.engine.pages import open_pages
from tests.support.places import MIB, contents, fill, space

ALICE = space("alice")
SEQUENCES = ([1, 2, 3, 4, 5, 6, 7, 8], [20, 21, 22, 23, 24])


@pytest.fixture
def run(capfd):
    def call(*arguments, code=0):
        assert main([str(one) for one in arguments]) == code, capfd.readouterr()
        return capfd.readouterr()

    return call


@pytest.fixture
def key(tmp_path, run, monkeypatch):
    """A file of keys, which all commands use."""
    path = tmp_path / "kv.key"
    run("key", "new", path)
    monkeypatch.setenv("PREFIXSTORE_KEY", f"file:{path}")
    return path


def keys_in(path):
    return Keys.read(provider_of(f"file:{path}"))


def filled(url, sequences=SEQUENCES, settings=ALICE, key=None):
    with closing(open_pages(url, max_bytes=64 * MIB, key=key)) as pages:
        fill(pages, settings, sequences)
        return contents(pages)


def pages_of(url, key=None):
    with closing(open_pages(url, max_bytes=64 * MIB, read_only=True, key=key)) as pages:
        return contents(pages)


def test_a_new_file_is_its_owners_and_is_never_replaced(tmp_path, run):
    path = tmp_path / "kv.key"
    out = run("key", "new", f"file:{path}").out
    assert f"export PREFIXSTORE_KEY=file:{path}" in out
    assert keys_in(path).newest.hex() in out
    assert path.stat().st_mode & 0o777 == 0o600
    assert "exists; prefixstore key add" in run("key", "new", path, code=2).err
    assert "prefixstore key new" in run("key", "add", tmp_path / "none", code=2).err


def test_keys_are_added_in_place(tmp_path, run, key):
    link = tmp_path / "link"
    link.symlink_to(key)
    key.write_text("# mine\n" + key.read_text().rstrip("\n"))
    key.chmod(0o640)
    first = keys_in(key).newest
    run("key", "add", link)
    run("key", "add", key, "--tenant", "alice & bob")
    assert link.is_symlink()
    assert key.stat().st_mode & 0o777 == 0o640
    assert key.read_text().startswith("# mine\n")
    assert keys_in(key).ids[None][0] == first
    for name in ("", "  "):
        assert "--tenant" in run("key", "add", key, "--tenant", name, code=2).err
    # as a key of the store, that of a tenant can be replaced
    run("key", "add", key, "--tenant", "alice & bob")
    ids = {owner: [name.hex() for name in names] for owner, names in keys_in(key).ids.items()}
    assert {owner: len(names) for owner, names in ids.items()} == {None: 2, "alice & bob": 2}
    listed = json.loads(run("key", "list", key, "--json").out)
    assert listed == {"keys": ids.pop(None), "tenants": ids, "forgotten": {}}
    assert f"{listed['keys'][-1]}  the newest" in run("key", "list", key).out


def test_a_key_is_replaced(tmp_path, run, key):
    url = f"lmdb://{tmp_path}/kv"
    before = filled(url)
    old = key.read_text()
    run("key", "add", key)
    newest = keys_in(key).newest.hex()
    assert f"encrypted anew; the newest key of the store is {newest}" in run("key", "rotate", url).out
    assert json.loads(run("key", "rotate", url, "--json").out)["rows"] == 0
    key.write_text(key.read_text().removeprefix(old))
    assert pages_of(url) == before
    assert f"key {newest}" in run("stats", url).out
    assert f"AES-256-GCM, key {newest}" in run("doctor", url).out
    key.write_text(old)
    assert newest in run("check", url, code=3).err


def test_a_tenant_is_forgotten(tmp_path, run, key):
    url = f"lmdb://{tmp_path}/kv"
    run("key", "add", key, "--tenant", "alice")
    filled(url)
    bob = filled(url, settings=space("bob"))
    before = key.read_bytes()
    run("key", "forget", key, "alice", "--dry-run")
    assert key.read_bytes() == before
    run("key", "forget", key, "alice")
    assert len(key.read_bytes()) == len(before)
    [name] = keys_in(key).forgotten.values()
    assert name == "alice"
    assert before.split()[-1] not in key.read_bytes()
    left = pages_of(url)
    assert {one[0].namespace for one in left.values()} == {space("bob").key}
    assert left.items() <= bob.items()
    assert "has no key of 'alice'" in run("key", "forget", key, "alice", code=2).err
    planned = run("check", url, "--repair", "--dry-run", code=1).out.splitlines()
    done = run("check", url, "--repair", "--yes", code=0).out.splitlines()
    assert done[: len(planned) - 1] == planned[:-1]
    assert "no problems" in run("check", url).out


@pytest.mark.parametrize(
    "line", ["tenant key:alice {}", "tenant  key%3Aalice {}  ", "\ufefftenant key:alice {}\ntenant key%3aalice {}"]
)
def test_keys_are_forgotten_however_their_tenant_is_written(run, key, line):
    secrets = [bytes(32), bytes([1] * 32)][: line.count("{}")]
    written = [base64.b64encode(secret).decode() for secret in secrets]
    key.write_text(line.format(*written) + "\n" + key.read_text())
    run("key", "forget", key, "key:alice")
    assert not any(secret in key.read_text() for secret in written)
    assert keys_in(key).forgotten == {key_id(secret): "key:alice" for secret in secrets}


def test_exports_are_encrypted_and_imported_with_the_key(tmp_path, run, key, monkeypatch):
    url, out, other = f"lmdb://{tmp_path}/kv", tmp_path / "f.pstore", f"sqlite:///{tmp_path}/other.db"
    before = filled(url)
    run("export", url, "--out", out)
    run("export", url, "--out", out, "--yes")
    whole = out.read_bytes()
    assert ALICE.canonical not in whole
    for cut in (0, 10, 41, -1):
        out.write_bytes(whole[:cut])
        assert main(["import", other, str(out)]) in (1, 3)
    out.write_bytes(whole)
    # from a slow pipe
    code = f"import sys; from prefixstore.cli import main; sys.exit(main(['import', {other!r}, '-']))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as importing:
        for piece in (whole[:3], whole[3:12], whole[12:]):
            importing.stdin.write(piece)
            importing.stdin.flush()
        importing.stdin.close()
        assert importing.wait() == 0
    assert pages_of(other).keys() == before.keys()
    monkeypatch.delenv("PREFIXSTORE_KEY")
    name = keys_in(key).newest
    assert f"needs the key {name.hex()}" in run("import", f"lmdb://{tmp_path}/plain", out, code=3).err
    run("import", f"lmdb://{tmp_path}/plain", out, "--from-key", f"file:{key}")
    assert pages_of(f"lmdb://{tmp_path}/plain").keys() == before.keys()


def test_copies_are_encrypted_and_decrypted(tmp_path, run, key, monkeypatch):
    plain, secret, back = (f"lmdb://{tmp_path}/{name}" for name in ("plain", "secret", "back"))
    before = filled(plain, key="none")
    monkeypatch.delenv("PREFIXSTORE_KEY")
    run("copy", plain, secret, "--to-key", f"file:{key}")
    assert pages_of(secret, key=f"file:{key}").keys() == before.keys()
    assert "is encrypted, under the key" in run("stats", secret, code=3).err
    monkeypatch.setenv("PREFIXSTORE_KEY", f"file:{key}")
    run("copy", secret, back, "--to-key", "none")
    assert pages_of(back, key="none").keys() == before.keys()
    assert "is not encrypted" in run("stats", back, code=3).err
    monkeypatch.delenv("PREFIXSTORE_KEY")
    assert "is not encrypted" in run("key", "rotate", back, code=2).err


def test_a_file_of_settings_names_the_key(tmp_path, run, key, monkeypatch):
    url = f"lmdb://{tmp_path}/kv"
    filled(url)
    monkeypatch.delenv("PREFIXSTORE_KEY")
    config = tmp_path / "kv.toml"
    config.write_text(f'[store]\nlocation = "{url}"\nkey = "file:kv.key"\n')
    assert "AES-256-GCM" in run("stats", "--config", config).out
    assert "is encrypted" in run("stats", url, code=3).err
    for wrong in ("5", '""', "[]"):
        config.write_text(f'[store]\nlocation = "{url}"\nkey = {wrong}\n')
        assert "key" in run("stats", "--config", config, code=2).err
