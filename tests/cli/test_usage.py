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
from prefixstore.cli.top import Screen, lines
from prefixstore.maintenance.archive import Archive
from prefixstore.maintenance.verify import verify
from prefixstore.stats import short
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
        assert (figures.hits, figures.live_hits, figures.misses) == (stats.hits, stats.live_hits, stats.misses)
        assert figures.prompt_tokens == stats.prompt_tokens
        assert (figures.tokens_restored, figures.tokens_computed) == (stats.tokens_restored, stats.tokens_computed)
        assert figures.seconds_saved == pytest.approx(stats.seconds_saved, abs=1e-4)
        key = short(store.namespace.key)
    with Archive(tmp_path / "kv", read_only=True) as archive:
        kept = archive.history()
    assert kept.total() == figures
    assert [one.source for one in kept.requests] == ["not_found", "store", "not_found"]
    assert {one.namespace for one in kept.days} == {key}
    known = kept.describe(key)
    assert (known.tenant, known.type_k, known.type_v) == ("mine", "f16", "f16")
    assert known.title == f"{llm.metadata['general.name']} {known.quantization}"


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
    assert history.total().lookups == 0
    assert history.total(purpose="warming").lookups > 0
    assert history.total(purpose="maintenance").hits == 2
    assert uses > 0
    assert used


def test_a_purged_tenant_is_not_named_any_more(models, tmp_path):
    location, llm = str(tmp_path / "kv"), load(models("llama"))
    for tenant in ("one", "two"):
        with PrefixStore(location, llm, salt=tenant) as store:
            llm.set_cache(store)
            answer(llm, prompt(600), 8)
            llm.reset()
    with Archive(location) as archive:
        archive.purge(salt="one")
        assert {one.tenant for one in archive.history().described.values()} == {"two"}
        assert archive.history().total().lookups == 2
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
    for words in ("hit rate", "tokens restored", "time saved", "last hour", "last day", "1.0 GiB used", "not found 2"):
        assert words in out, words
    assert re.search(r"^hit rate +67 % +67 % +67 %$", out, re.MULTILINE)
    assert re.search(r"^hits +4 +4 +4$", out, re.MULTILINE)
    assert re.search(r"^a tenant .* 75 % +3 ", out, re.MULTILINE)
    assert re.search(r"^warming: .* tokens computed", out, re.MULTILINE)
    for internal in ("compute us", "<namespace>", "None", "evicted", "page_uses"):
        assert internal not in out, internal


def test_stats_as_json_are_complete(used, run):
    code, out, _ = run("stats", used[0], "--json")
    found = json.loads(out)
    assert (code, found["hits"], found["capacity_bytes"], found["tenants"]) == (0, 4, 1 << 30, 2)
    assert found["page_uses"] > 3
    assert found["serving"]["all"]["hit_rate"] == 0.6667
    assert found["serving"]["last_hour"] == found["serving"]["last_day"] == found["serving"]["all"]
    assert found["warming"]["all"]["tokens_computed"] > 0
    assert {one["tenant"]: one["hits"] for one in found["by_tenant"]} == {"a tenant with a long name": 3, "b": 1}
    assert [one["hits"] for one in found["by_model"]] == [4]
    assert len(found["requests"]) >= 6


def test_stats_for_prometheus_have_the_budget_and_the_kept_figures(used, run):
    code, out, _ = run("stats", used[0], "--prometheus")
    assert code == 0
    assert 'prefixstore_budget_bytes{tier="location"} 1.073741824e+09' in out
    assert 'prefixstore_kept_lookups{purpose="serving",source="store",window="day"} 4.0' in out
    assert "tenant" not in out


# -- top --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", WIDTHS)
def test_top_is_printed_once_without_a_terminal(used, run, columns, monkeypatch):
    monkeypatch.setattr(output, "terminal_width", lambda _: columns)
    for arguments in ((), ("--once",)):
        code, out, _ = run("top", used[0], *arguments)
        assert code == 0
        assert max(map(len, out.splitlines())) <= columns
        for words in ("requests a minute", "hit rate", "latest prompts", "hottest prefixes", "warming: b"):
            assert words in out, words


@pytest.mark.slow
def test_top_in_a_terminal_refreshes_itself_until_q_is_pressed(used):
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
        assert b"q quits" in seen
        assert b"\x1b[?1049h" in seen  # the screen is another one, and the shell's comes back
        seen = b""
        # another process serves a prompt meanwhile
        with PrefixStore(location, llm, salt="later", max_bytes="1GiB") as store:
            llm.set_cache(store)
            answer(llm, prompt(777, 9), 4)
        read_until(b"later")
        read_until(b"777")
        os.write(terminal, b"x")
        os.write(terminal, b"q")
        read_until(b"\x1b[?1049l")
        assert os.waitpid(child, 0)[1] == 0
        child = None
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(terminal)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_names_of_tenants_do_not_command_a_terminal(tmp_path, run):
    name = "\x1b]0;a title\x07\x9b2Jtenant"
    assert grid([[name, "1"]], 80) == ["·]0;a title··2Jtenant  1"]
    with Archive(tmp_path / "kv", create=True) as archive:
        ((*_, key),) = fill(archive.backend, space(name), [[1, 2, 3, 4]])
    for command in (["ls"], ["stats"], ["top", "--once"], ["show"]):
        code, out, _ = run(command[0], tmp_path / "kv", *command[1:], *([key.hex()] * (command == ["show"])))
        assert (code, "tenant" in out or command[0] == "top") == (0, True)
        assert not {"\x1b", "\x9b", "\x07"} & set(out)
    screen = Screen("lmdb:///kv", fault=name)
    assert "\x1b" not in "".join(lines(screen, 80, None))
