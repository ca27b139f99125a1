"""``prefixstore stats`` and ``prefixstore top``: what they say of a store that has served prompts, at any width."""

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
from prefixstore.cli.output import grid
from prefixstore.cli.top import Screen, hottest, lines
from prefixstore.format.figures import NOTE, Figures, History
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.verify import verify
from prefixstore.models.file import model_title
from prefixstore.stats import DAY, short
from tests.support import ROOT
from tests.support.models import answer, load, prompt
from tests.support.places import fill, space

WIDTHS = (60, 80, 200)


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


# -- what is counted --------------------------------------------------------------------------------------------------


def test_the_history_of_a_store_is_what_its_stats_say(models, tmp_path):
    llm = load(models("llama"))
    with PrefixStore(tmp_path / "kv", llm, salt="mine") as store:
        llm.set_cache(store)
        for _ in range(2):
            answer(llm, prompt(700), 8)
            llm.reset()
        answer(llm, prompt(20, 5), 8)
        stats, history = store.stats(), store.history()
        figures = history.total()
        assert (figures.hits, figures.misses) == (stats.hits, sum(stats.misses.values()))
        assert figures.prompt_tokens == stats.prompt_tokens
        assert (figures.tokens_restored, figures.tokens_computed) == (stats.tokens_restored, stats.tokens_computed)
        assert figures.seconds_saved == pytest.approx(stats.seconds_saved, abs=1e-4)
        namespace = store.namespace
    with Archive(tmp_path / "kv", read_only=True) as archive:
        kept = archive.history()
    assert {name for _, name in kept.days} == {short(namespace.key)}
    assert kept.total()._replace(allocations=0, bytes_written=0) == figures._replace(allocations=0, bytes_written=0)
    assert kept.total().allocations == stats.entries + stats.pending_pages
    title = model_title(namespace.settings, kept.models)
    assert title.startswith(llm.metadata["general.name"])
    assert "KV" not in title


@pytest.mark.slow
def test_warming_and_verifying_are_no_hits(used, models, tmp_path):
    location = str(tmp_path / "kv")
    llm = load(models("llama"))
    with PrefixStore(location) as store:
        for _ in range(2):
            prefixstore.warm(llm, store, [prompt(600) + prompt(100, seed) for seed in range(4)])
    with Archive(location) as archive, PrefixStore(location, llm) as store:
        assert [one.restored > 0 for one in verify(llm, store, archive, 2)] == [True, True]
    with Archive(location, read_only=True) as archive:
        history = archive.history()
        uses = sum(page.hits for page in archive.pages())
    assert (history.total().lookups, history.total().prompt_tokens) == (0, 0)
    assert history.total().allocations > 0
    assert uses > 0
    assert used


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


# -- stats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", WIDTHS)
def test_stats_fit_the_terminal(used, run, columns, monkeypatch):
    monkeypatch.setattr(output, "terminal_width", lambda _: columns)
    code, out, err = run("stats", used[0])
    assert (code, err) == (0, "")
    # a location cannot be shortened
    shown = out.splitlines()[1:]
    assert max(map(len, shown)) <= columns
    for words in ("hit rate", "tokens restored", "time saved", "today", "last 7 days", "1.0 GiB used"):
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


def test_stats_for_prometheus_have_the_budget_and_the_kept_figures(used, run):
    code, out, _ = run("stats", used[0], "--prometheus")
    assert code == 0
    assert 'prefixstore_budget_bytes{tier="location"} 1.073741824e+09' in out
    assert 'prefixstore_kept_hits{window="day"} 4.0' in out
    assert "tenant" not in out


# -- top --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", WIDTHS)
def test_top_is_printed_once_without_a_terminal(used, run, columns, monkeypatch):
    monkeypatch.setattr(output, "terminal_width", lambda _: columns)
    for arguments in ((), ("--once",)):
        code, out, _ = run("top", used[0], *arguments)
        assert code == 0
        assert max(map(len, out.splitlines())) <= columns
        for words in ("lookups", "hit rate", "31 days", "busiest today", "hottest prefixes"):
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


def test_the_screen_of_top_is_cut_to_the_terminal():
    history, counted = History(max_bytes=10 << 30), Figures(30, 10, 40_000, 30_000, 12_000, 95_000_000, 7, 7000, 2)
    today = int(history.at // DAY)
    history.days = {(today, name * 16): counted for name in "abcdefghijkl"} | {(today - 9, "a" * 16): counted}
    earlier, now = history.total()._replace(hits=350), history.total()
    screen = Screen("lmdb:///kv", history, totals=[(history.at - 60, earlier), (history.at, now)])
    screen.titles = {"a" * 16: "a tenant, a model"}
    for columns in (40, 60, 80, 200):
        for rows in (5, 12, 24, 50):
            shown = lines(screen, columns, rows)
            assert len(shown) <= rows
            assert max(map(len, shown)) <= columns
            assert shown[-1] == "Ctrl-C ends this"
    text = "\n".join(lines(screen, 80, None))
    assert re.search(r"last 60 s +today +31 days", text)
    assert re.search(r"^lookups +40 +480 +520$", text, re.MULTILINE)
    assert re.search(r"^hit rate +100 % +75 % +75 %$", text, re.MULTILINE)
    assert "a tenant, a model" in text


def test_the_hottest_prefixes_are_as_long_as_they_are_used(used):
    with Archive(used[0], read_only=True) as archive, archive.view() as view:
        found = hottest(view, 100)
        pages = {page.key.hex(): page for page in archive.pages()}
    assert [one["hits"] for one in found] == sorted((one["hits"] for one in found), reverse=True)
    for one in found:
        page = pages[one["key"].tobytes().hex()]
        assert (one["hits"], one["start"] + one["n_tokens"]) == (page.hits, page.end)
        assert not [child for child in page.children if child.hits == page.hits]


# -- parts ------------------------------------------------------------------------------------------------------------


def test_names_of_tenants_do_not_command_a_terminal(tmp_path, run):
    name = "\x1b]0;a title\x07\x9b2Jtenant"
    assert grid([[name, "1"]], 80, ["", ""]) == ["·]0;a title··2Jtenant  1"]
    with Archive(tmp_path / "kv", create=True) as archive:
        ((*_, key),) = fill(archive.backend, space(name), [[1, 2, 3, 4]])
    for command in (["ls"], ["stats"], ["top", "--once"], ["show"]):
        code, out, _ = run(command[0], tmp_path / "kv", *command[1:], *([key.hex()] * (command == ["show"])))
        assert (code, "tenant" in out or command[0] == "top") == (0, True)
        assert not {"\x1b", "\x9b", "\x07"} & set(out)
    screen = Screen("lmdb:///kv", fault=name)
    assert "\x1b" not in "".join(lines(screen, 80, None))


def test_what_has_no_tenant_is_shared_and_purged_by_its_namespace(tmp_path, run):
    with Archive(tmp_path / "kv", create=True) as archive:
        for tenant in ("ann", None):
            fill(archive.backend, space(tenant), [[1, 2, 3, 4]])
    _, out, _ = run("tenants", tmp_path / "kv")
    assert "(shared)" in out
    assert "1 tenant;" in out
    key = out.split("--namespace ")[1].split()[0]
    assert run("purge", tmp_path / "kv", "--namespace", key, "--yes")[0] == 0
    _, out, _ = run("tenants", tmp_path / "kv")
    assert ("ann" in out, "(shared)" in out) == (True, False)


def test_names_of_models_that_are_not_text_are_told(tmp_path, run):
    figures = History(models={"a" * 12: "\ud800\x1b[31m"})
    with Archive(tmp_path / "kv", create=True) as archive:
        fill(archive.backend, space("t", model="a" * 64), [[1, 2, 3, 4]])
        with archive.backend.update() as transaction:
            transaction.put_note(NOTE, figures.pack(9))
    for command in (["ls"], ["stats"], ["top", "--once"], ["tree"]):
        code, out, _ = run(command[0], tmp_path / "kv", *command[1:])
        assert (code, "\x1b" in out) == (0, False)


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
