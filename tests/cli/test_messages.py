"""What commands say when they cannot do what they were told: a code and a message, and nothing is changed."""

from __future__ import annotations

import shutil

import pytest

from tests.cli.conftest import filled, n_pages

LONG = "x" * 300
SECRET = "valkey://me:S3CRET@host/0"
SOCKET = "unix://:S3CR@ET@/run/x"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("store") / "kv")


@pytest.mark.usefixtures("new_user")
@pytest.mark.parametrize(
    ("code", "command", "says"),
    [
        # wrong usage
        (2, "no-such-command", "No such command"),
        (2, "stats x --no-such-option", "No such option"),
        (2, "stats nonsense://x", "nonsense"),
        (2, "show {store} ffff", "{store}: no page begins with 'ffff'; prefixstore tree lists them"),
        (2, "show {store}", "HASH is missing; see --help"),
        (2, "purge {store}", "no pages are selected"),
        (2, "tree {store} --containing x", "--containing needs --model"),
        (2, "verify {store}", "pass --model FILE, or --config FILE"),
        (2, "copy {store} {store}", "source and target are the same location"),
        (2, "copy {store}", "pass STORE TARGET"),
        (1, "export {store} --out nobody.pstore --salt nobody", "there is no tenant 'nobody'"),
        (2, "ls {store} --sort colour", "--sort colour is unknown; choose used, pages, tokens, stored or uses"),
        (2, "evict {store} --to 80%", "80%"),
        (2, "evict {store} --to 1B --policy x", "policy='x' is unknown"),
        (2, "ls --config three.toml", "location"),
        (2, "stats --config wrong.toml", "config wrong.toml: [store] max_bytes='lots' is not a valid size"),
        (2, "copy {store} link", "source and target are the same location"),
        (2, "init f.toml --store {store} --store link", "cannot be in front of itself"),
        (3, "ls lmdb:///", "has no path; pass for example"),
        (3, "check damaged", "is damaged"),
        (2, "stats --config none.toml", "none.toml: No such file or directory; prefixstore init writes one"),
        (2, "tree {store} --model none.gguf", "model file not found"),
        (2, "tree {store} --model three.toml", "it is not a model file (GGUF)"),
        (2, "tree {store} --model .", "is a folder"),
        (2, f"tree {{store}} --model {LONG}", "File name too long"),
        (2, f"serve --model {LONG}", "File name too long"),
        (2, "explain {store} --model {gguf}", "pass one prompt"),
        (2, "explain {store} --model {gguf} --server http://a --next-turn x", "cannot be used with --next-turn"),
        (3, "explain {store} --model {gguf} --server http://127.0.0.1:1 x", "no server answers"),
        (2, "explain {store} --model {gguf} --messages none.json", "none.json cannot be read"),
        (2, "explain {store} --model {gguf} --messages three.toml", "is not valid JSON"),
        (2, "warm --model {gguf} --store new", "no prompts are given"),
        (2, "warm --model {gguf} --store memory: prompts.jsonl", "memory: ends with this command"),
        (2, "warm --model none.gguf --store new p.txt", "model file not found"),
        (2, "demo --model none.gguf", "model file not found"),
        (2, "warm --model {gguf} --store new --type-k q9 three.toml", "not a value known to llama.cpp"),
        # a size or an age without a unit, or none at all
        (2, "purge {store} --older-than 30", "--older-than='30' has no unit; pass one, as in"),
        (2, "check {store} --repair --max-bytes 1000", "--max-bytes='1000' has no unit"),
        (2, "purge {store} --older-than yesterday", 'such as "30d", "12h"'),
        (2, "evict {store} --to much", 'pass one such as "20GiB"'),
        # files, to be read or written, that cannot be
        (2, "export {store} --out no/f", "cannot be written"),
        (2, "export {store} --out three.toml", "was not written by this command; choose another name"),
        (2, "report {store} --yes --out three.toml", "was not written by this command; choose another name"),
        (2, "report {store} --out no/f.html", "no/f.html cannot be written: No such file or directory; choose another"),
        (2, f"report {{store}} --out {LONG}", "File name too long"),
        (2, "init no/folder.toml", "cannot be written"),
        (2, "migrate {store}", "{store} is not a SQL database, and other locations need no migration"),
        (2, "tenants {store} --api-key-file none", "none cannot be read: No such file"),
        # places that cannot be used
        (3, "stats none", "none does not exist, so there is no store (an LMDB directory) yet; check the path"),
        (3, "clear sqlite:///none.db", "none.db does not exist, so there is no store (a SQLite file) yet"),
        (3, "report none --out f", "does not exist"),
        (3, "check .", "exists but has no store yet; choose another location"),
        (3, "stats three.toml", "is a file, and an LMDB store is a directory; for SQLite pass sqlite:///"),
        (3, "warm --model {gguf} --store three.toml three.toml", "three.toml"),
        (3, "import {store} three.toml", "not written by prefixstore"),
        (1, "purge {store} --salt mien", "there is no tenant 'mien'; prefixstore tenants lists them"),
        # a URL where something else is expected is repeated without its password
        (2, f"import lmdb:kv {SECRET}", "host"),
        (2, f"init {SOCKET}", "cannot be written"),
        (3, f"show {SECRET} ff", "valkey"),
        (2, f"stats --config {SOCKET}", "No such file"),
        (2, f"verify kv --model {SECRET}", "host"),
        (2, f"explain kv --model x --prompt-file {SOCKET}", ""),
    ],
)
def test_a_command_that_fails_says_why_and_changes_nothing(tmp_path, models, store, run, code, command, says):
    folder = tmp_path / "work"
    (folder / "three.toml").write_text('[store]\nlocation = ["a", "b", "c"]\n')
    (folder / "wrong.toml").write_text('[store]\nlocation = "kv"\nmax_bytes = "lots"\n')
    (folder / "link").symlink_to(store.removeprefix("lmdb://"))
    shutil.copytree(folder / "link", folder / "damaged")
    (folder / "damaged" / "data.mdb").write_bytes(bytes(range(256)) * 64)
    there = set(folder.iterdir())
    names = {"store": store, "gguf": models("llama")}
    found, out, err = run(*(word.format(**names) for word in command.split()))
    assert (found, out) == (code, "")
    assert says.format(**names) in " ".join(err.split())
    for word in ("Traceback", "S3CR", "ET@"):
        assert word not in err
    assert n_pages(store) == 6
    assert set(folder.iterdir()) == there


def test_a_tenant_that_is_not_there_is_not_shown_as_an_empty_one(store, run):
    for command in ("ls", "tree", "export --out f.pstore --dry-run"):
        name, *options = command.split()
        assert "there is no tenant 'mien'" in run(name, store, *options, "--salt", "mien")[2]
        assert "no tenant" not in run(name, store, *options, "--salt", "mine")[2]
