"""``prefixstore stats`` and ``prefixstore top``: what they say of a store that has served prompts."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time

import pytest

import prefixstore
from prefixstore import PrefixStore
from prefixstore.cli import output
from prefixstore.cli.stats import hottest
from prefixstore.format.figures import NOTE, History
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.holdings import read_facts
from tests.support import ROOT
from tests.support.models import answer, load, prompt
from tests.support.newer import make_corrupt
from tests.support.places import fill, space


@pytest.fixture(scope="module")
def used(models, tmp_path_factory):
    """A location that two tenants have used, and a job has warmed; and its model."""
    location = str(tmp_path_factory.mktemp("used") / "kv")
    llm = load(models("llama"))
    for tenant, seeds in (("a tenant with a long name", (1, 2)), ("b", (3,))):
        with PrefixStore(location, llm, salt=tenant, max_bytes="1GiB") as store:
            llm.set_cache(store)
            for seed in (*seeds, *seeds):
                answer(llm, prompt(600) + prompt(100, seed), 8)
                llm.reset()
    with PrefixStore(location, salt="b", max_bytes="1GiB") as store:
        prefixstore.warm(llm, store, [prompt(600), prompt(900, 7)])
    return location, llm


# -- stats ------------------------------------------------------------------------------------------------------------


def test_a_purged_tenant_is_not_named_any_more(models, tmp_path, run):
    location, llm = str(tmp_path / "kv"), load(models("llama"))
    for tenant in ("one", "two"):
        with PrefixStore(location, llm, salt=tenant) as store:
            llm.set_cache(store)
            answer(llm, prompt(600), 8)
            llm.reset()
    with Archive(location) as archive:
        archive.purge(salt="one")
        assert archive.history().total().lookups == 2
    found = json.loads(run("stats", location, "--json")[1])
    assert {one["tenant"]: one["misses"] for one in found["by_tenant"]} == {"two": 1, "(gone)": 1}
    with Archive(location) as archive:
        archive.purge(everything=True)
        assert archive.history().total().lookups == 0


def test_stats_say_what_was_restored_and_for_whom(used, run):
    code, out, err = run("stats", used[0])
    assert (code, err) == (0, "")
    for words in ("hit rate", "tokens restored", "time saved", "today", "last 7 days", "of 1.0 GiB ("):
        assert words in out, words
    assert re.search(r"^hit rate +67 % +67 % +67 %$", out, re.MULTILINE)
    assert re.search(r"^hits +4 +4 +4$", out, re.MULTILINE)
    assert re.search(r"^a tenant .* 75 % +3 ", out, re.MULTILINE)
    for internal in ("compute us", "<namespace>", "None", "page_uses"):
        assert internal not in out, internal


def test_stats_as_json_are_complete(used, run):
    code, out, _ = run("stats", used[0], "--json")
    found = json.loads(out)
    assert (code, found["hits"], found["capacity_bytes"], found["tenants"]) == (0, 4, 1 << 30, 2)
    assert found["page_uses"] > 3
    assert found["today"]["hit_rate"] == 0.6667
    assert found["today"] == found["last_7_days"] == found["last_31_days"]
    assert found["today"]["bytes_written"] > found["today"]["allocations"] > 3
    assert {one["tenant"]: one["hits"] for one in found["by_tenant"]} == {"a tenant with a long name": 3, "b": 1}
    assert [one["hits"] for one in found["by_model"]] == [4]


def test_stats_of_a_store_that_no_one_has_asked(tmp_path, run):
    with Archive(tmp_path / "kv", create=True):
        pass
    code, out, _ = run("stats", tmp_path / "kv")
    assert code == 0
    assert "no prompt has been looked up yet" in out
    assert "hit rate" not in out
    assert json.loads(run("stats", tmp_path / "kv", "--json")[1])["today"]["hit_rate"] is None


def test_damaged_records_are_no_pages(tmp_path, run):
    with Archive(tmp_path / "kv", create=True) as archive:
        _, (key,) = fill(archive.backend, space("ann"), [[1, 2, 3, 4], [5, 6, 7, 8]])
        make_corrupt(archive.backend, key)
    found = json.loads(run("stats", tmp_path / "kv", "--json")[1])
    assert (found["pages"], found["damaged_pages"]) == (1, 1)
    assert "in 1 page, 4 tokens, 1 damaged" in " ".join(run("stats", tmp_path / "kv")[1].split())


def test_stats_of_a_shared_location_say_where_prompts_are_counted(new_valkey, models, tmp_path, run):
    far = new_valkey()
    llm = load(models("llama"))
    with PrefixStore([tmp_path / "kv", far], llm) as store:
        llm.set_cache(store)
        llm(prompt(300), max_tokens=1)
    note = "note: prompts of processes that use this as a far location are counted in their nearer location"
    assert note in run("stats", far)[2]
    code, out, err = run("stats", tmp_path / "kv")
    assert (code, "hit rate" in out, note in err) == (0, True, False)


# -- top --------------------------------------------------------------------------------------------------------------


def test_top_is_printed_once_without_a_terminal(used, run):
    for arguments in ((), ("--once",)):
        code, out, _ = run("top", used[0], *arguments)
        assert code == 0
        for words in ("hits", "hit rate", "31 days", "busiest today", "hottest prefixes"):
            assert words in out, words


@pytest.mark.slow
def test_top_in_a_terminal_refreshes_itself_until_it_is_interrupted(used):
    location, llm = used
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONUTF8": "1"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execvpe(
            sys.executable, [sys.executable, "-m", "prefixstore", "top", location, "--seconds", "0.2"], environment
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    seen = b""

    def read_until(words):
        nonlocal seen
        until = time.monotonic() + 180
        while words not in seen:
            assert time.monotonic() < until, seen[-4000:].decode(errors="replace")
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 1 << 16)

    try:
        read_until(b"hottest prefixes")
        assert b"Ctrl-C ends this" in seen
        assert b"\x1b[?1049h" in seen  # the screen is another one, and the shell's comes back
        seen = b""
        # another process serves a prompt meanwhile
        with PrefixStore(location, llm, salt="later", max_bytes="1GiB") as store:
            llm.set_cache(store)
            answer(llm, prompt(777, 9), 4)
        read_until(b"later")
        read_until(b"777")
        os.write(terminal, b"\x03")
        read_until(b"\x1b[?1049l")
        assert os.waitpid(child, 0)[1] == 0
        child = None
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(terminal)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (60, ["name                    pages", "a name of some length  12,345"]),
        (24, ["name               pages", "a name of some    12,345", "length"]),
        (20, ["name   a name of", "       some length", "pages  12,345", ""]),
    ],
)
def test_a_table_fits_the_terminal(monkeypatch, capsys, columns, shown):
    monkeypatch.setattr(output, "terminal_width", lambda: columns)
    output.table(["name", "label", "pages>"], [["a name of some length", "", "12,345"]])
    assert capsys.readouterr().out.splitlines() == shown


def test_the_hottest_prefixes_are_as_long_as_they_are_used(used):
    with Archive(used[0], read_only=True) as archive, archive.view() as view:
        found = hottest(read_facts(view), 100)
        pages = {page.key.hex(): page for page in archive.pages()}
    assert [one["hits"] for one in found] == sorted((one["hits"] for one in found), reverse=True)
    for one in found:
        page = pages[one["key"].tobytes().hex()]
        assert (one["hits"], one["start"] + one["n_tokens"]) == (page.hits, page.end)
        assert not [child for child in page.children if child.hits == page.hits]


# -- parts ------------------------------------------------------------------------------------------------------------


def test_names_of_tenants_do_not_command_a_terminal(tmp_path, run):
    name = "\x1b]0;a title\x07\x9b2Jtenant"
    with Archive(tmp_path / "kv", create=True) as archive:
        ((*_, key),) = fill(archive.backend, space(name, model="a" * 64), [[1, 2, 3, 4]])
        with archive.backend.update() as transaction:
            transaction.put_note(NOTE, History(models={"a" * 12: "\ud800\x1b[31m"}).pack(9))
    for command in (["ls"], ["stats"], ["top", "--once"], ["tree"], ["show", key.hex()]):
        code, out, _ = run(command[0], tmp_path / "kv", *command[1:])
        assert (code, "tenant" in out or command[0] == "top") == (0, True)
        assert not {"\x1b", "\x9b", "\x07"} & set(out)


def test_what_has_no_tenant_is_shared_and_purged_by_its_namespace(tmp_path, run):
    with Archive(tmp_path / "kv", create=True) as archive:
        for tenant in ("ann", None):
            fill(archive.backend, space(tenant), [[1, 2, 3, 4]])
    assert all("(shared)" in run(name, tmp_path / "kv")[1] for name in ("stats", "tenants"))
    _, out, _ = run("tenants", tmp_path / "kv")
    assert f"1 tenant; prefixstore purge lmdb://{tmp_path / 'kv'} --salt TENANT deletes one" in out
    key = out.split("--namespace ")[1].split()[0]
    assert run("purge", tmp_path / "kv", "--namespace", key, "--yes")[0] == 0
    _, out, _ = run("tenants", tmp_path / "kv")
    assert ("ann" in out, "(shared)" in out) == (True, False)


# the last one that uses what `used` has
def test_pages_that_a_command_evicts_are_counted_and_its_budget_is_not_that_of_the_stores(used, run):
    before = json.loads(run("stats", used[0], "--json")[1])
    with Archive(used[0], read_only=True) as archive:
        n_pages, size = len(archive.pages()), archive.used().bytes
    assert run("evict", used[0], "--to", f"{size - 200_000}B", "--dry-run")[0] == 0
    assert run("evict", used[0], "--to", f"{size - 200_000}B")[0] == 0
    with Archive(used[0], read_only=True) as archive:
        n_left, history = len(archive.pages()), archive.history()
    assert history.total().evictions - before["today"]["evictions"] == n_pages - n_left > 0
    assert history.max_bytes == before["capacity_bytes"] == 1 << 30
