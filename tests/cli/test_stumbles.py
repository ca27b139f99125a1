"""What new users stumbled over: a test for each."""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from prefixstore import PrefixStore, load
from prefixstore.cli import warm
from prefixstore.config import load_config
from prefixstore.maintenance.archive import Archive
from prefixstore.warming.job import Progress
from tests.cli.conftest import SEQUENCES, filled, n_pages
from tests.support.models import prompt
from tests.support.places import fill, space
from tests.support.warming import write_jsonl

pytestmark = pytest.mark.usefixtures("new_user")


@pytest.fixture
def store(tmp_path):
    return filled(tmp_path / "kv")


def test_a_tenant_can_be_exported_and_copied_and_a_copy_be_tried(tmp_path, run, as_json):
    both = filled(tmp_path / "both")
    with Archive(both) as archive:
        fill(archive.backend, space("yours"), SEQUENCES[:1])
    n_yours = as_json("export", both, "--out", "f.pstore", "--salt", "yours")[1]["pages"]
    assert 0 < n_yours < n_pages(both)
    code, planned = as_json("copy", both, "other", "--salt", "yours", "--dry-run")
    assert (code, planned["pages"], planned["dry_run"]) == (0, n_yours, True)
    assert not Path("other").exists()
    assert as_json("copy", both, "other", "--salt", "yours")[1]["pages"] == n_yours
    assert "there is no tenant 'nobody'" in run("copy", both, "third", "--salt", "nobody")[2]


@pytest.mark.parametrize(
    "command", [["report", "--out", "r.html"], ["export", "--out", "f.pstore"], ["init", "f.toml", "--store"]]
)
def test_a_file_is_replaced_after_asking_or_with_yes(store, run, answers, command):
    name, *arguments = command
    arguments = [*arguments, store] if name == "init" else [store, *arguments]
    assert run(name, *arguments)[0] == 0
    code, _, err = run(name, *arguments)
    assert (code, "exists; replace it? Without a terminal to ask on, that needs --yes" in err) == (1, True)
    assert run(name, *arguments, "--yes")[0] == 0
    assert not list(Path().glob(".*"))
    answers("\n", "", KeyboardInterrupt, "y\n")
    found = [run(name, *arguments) for _ in range(4)]
    assert [one[0] for one in found] == [1, 1, 130, 0]
    # Ctrl-D and Ctrl-C leave the cursor in the line, which is ended for them
    assert [one[2].count("[y/N] \n") for one in found] == [0, 1, 1, 0]


# -- one default location ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_location_is_that_of_the_environment_then_of_the_config_then_the_cache(tmp_path, run, monkeypatch):
    cached = filled(tmp_path / "cache" / "prefixstore" / "kv")
    configured, given, named = (filled(tmp_path / name) for name in ("configured", "given", "named"))
    config = tmp_path / "prefixstore.toml"
    config.write_text('[store]\nlocation = "configured"\n')
    for expected, arguments, environment in (
        (cached, [], None),
        (configured, ["--config", config], None),
        (given, ["--config", config], given),
        (given, [], given),
        (named, [named, "--config", config], given),
    ):
        if environment is not None:
            monkeypatch.setenv("PREFIXSTORE_LOCATION", environment)
        code, out, _ = run("check", *arguments)
        assert (code, out.startswith(f"{expected}: ")) == (0, True)
    assert PrefixStore(namespace="n").location == load_config(config).locations[0] == given
    monkeypatch.delenv("PREFIXSTORE_LOCATION")
    assert PrefixStore(namespace="n").location == cached
    monkeypatch.setenv("PREFIXSTORE_CONFIG", str(config))
    assert run("check")[1].startswith(f"{configured}: ")


@pytest.mark.slow
def test_every_command_takes_the_config_and_does_without_a_location(tmp_path, run, as_json, models):
    filled(tmp_path / "configured")
    config = tmp_path / "prefixstore.toml"
    config.write_text(f'[model]\npath = "{models("llama")}"\n[store]\nlocation = "configured"\nmax_bytes = {1 << 30}\n')
    given = ["--config", config]
    page = as_json("tree", *given)[1][0]["page"]
    for name, *arguments in (
        ("stats",),
        ("ls",),
        ("tree",),
        ("show", page[:9]),
        ("check",),
        ("pin", page[:9]),
        ("unpin", page[:9]),
        ("evict", "--to", "80%"),
        ("compact",),
        ("export", "--out", "f.pstore"),
        ("copy", tmp_path / "other"),
        ("purge", "--page", page),
        ("clear",),
    ):
        code, out, err = run(name, *arguments, *given)
        assert (code, f"lmdb://{tmp_path}/configured" in out) == (0, True), (name, err)
    assert run("import", "f.pstore", *given)[0] == 0
    # a location that was left out by mistake is not taken for something else
    assert run("purge", "", "--everything")[0] == 2


def test_of_two_locations_in_a_config_commands_take_the_nearer_one_and_say_so(tmp_path, run, as_json, monkeypatch):
    # the folder of a test may be longer than a terminal is wide
    monkeypatch.setenv("COLUMNS", "400")
    near, far = (filled(tmp_path / name) for name in ("near", "far"))
    config = tmp_path / "fleet.toml"
    config.write_text('[store]\nlocation = ["near", "far"]\nmax_bytes = "1GiB"\nfar_max_bytes = "2GiB"\n')
    for name, *arguments in (("stats",), ("ls",), ("top",), ("check",), ("copy", tmp_path / "other"), ("clear",)):
        code, out, err = run(name, *arguments, "--config", config)
        assert (code, near in out) == (0, True), (name, err)
        assert f"note: this is about {tmp_path}/near alone; for {tmp_path}/far, pass that as STORE" in err
    assert (n_pages(near), n_pages(far) > 0) == (0, True)
    served = []
    monkeypatch.setattr(
        "prefixstore.server.serving.serve_child", lambda settings, _: served.append([settings.location])
    )
    for arguments in ([], ["--far", "memory:"]):
        assert run("serve", "--config", config, *arguments, "--", "llama-server")[0] == 0
    assert served == [[[f"{tmp_path}/near", f"{tmp_path}/far"]], [[f"{tmp_path}/near", "memory:"]]]
    config.write_text('[store]\nlocation = ["a", "b", "c"]\n')
    assert run("ls", "--config", config)[0] == 2


def test_init_writes_a_config_that_everything_accepts(tmp_path, run, models, as_json):
    model = os.path.relpath(models("llama"))
    code, out, err = run("init", "--model", model, "--store", "kv", "--n-ctx", 512)
    assert (code, err, "prefixstore warm --config prefixstore.toml" in out) == (0, "", True)
    settings = load_config("prefixstore.toml")
    assert (settings.locations, settings.model["n_ctx"]) == ([str(tmp_path / "work" / "kv")], 512)
    write_jsonl(tmp_path / "work" / "prompts.jsonl", [{"tokens": prompt(300)}])
    code, found = as_json("warm", "--config", "prefixstore.toml")
    assert (code, found["evaluated_tokens"]) == (0, 300)
    findings = as_json("doctor", "--config", "prefixstore.toml")[1]["findings"]
    assert {one["name"]: one["value"] for one in findings}["settings"].endswith(" for them")
    _, opened = load("prefixstore.toml")
    assert opened.match(prompt(300)).n_tokens == 300
    opened.close()
    # every commented line is a setting, too
    text = (tmp_path / "work" / "prefixstore.toml").read_text()
    (tmp_path / "all.toml").write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert load_config(tmp_path / "all.toml").warm["pin"]


def test_serve_says_which_settings_it_ignores(tmp_path, run, monkeypatch):
    monkeypatch.setattr("prefixstore.server.serving.serve_child", lambda *_: None)
    config = tmp_path / "all.toml"
    config.write_text('[model]\npath = "m.gguf"\n[store]\nlocation = "kv"\nmax_bytes = "1GiB"\n')
    assert run("serve", "--config", config, "--", "llama-server") == (0, "", "")
    with config.open("a") as file:
        file.write('ttl = "30d"\nsalt = "tenant-7"\nnamespace = "chat"\n')
    code, _, err = run("serve", "--config", config, "--", "llama-server")
    assert (code, "serve ignores namespace, salt in [store]" in " ".join(err.split())) == (0, True)


def test_init_writes_two_locations(tmp_path, run):
    far = "valkey://:secret@cache/0"
    code, out, _ = run("init", "fleet.toml", "--store", "kv", "--store", far)
    assert (code, "secret" in out) == (0, False)
    assert f"the store is {tmp_path / 'work' / 'kv'}, in front of valkey://:***@cache/0" in out
    assert load_config("fleet.toml").locations == [str(tmp_path / "work" / "kv"), far]
    assert (tmp_path / "work" / "fleet.toml").stat().st_mode & 0o777 == 0o600
    assert run("init", "more.toml", "--store", "a", "--store", "b", "--store", "c")[0] == 2
    assert not (tmp_path / "work" / "more.toml").exists()


# -- deleting and replacing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["valkey", "lmdb"])
def test_a_purge_does_not_claim_to_overwrite_what_a_server_keeps(run, tmp_path, request, kind):
    location = request.getfixturevalue("new_valkey")() if kind == "valkey" else tmp_path / "kv"
    with Archive(location, create=True):
        pass
    code, out, err = run("purge", location, "--everything")
    assert (code, "0 pages deleted" in out) == (0, True)
    is_local = kind == "lmdb"
    assert ("overwritten" in out, "what the server keeps of them is not overwritten" in err) == (is_local, not is_local)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["purge", "--everything"], ["purge", "--salt", "mine"], ["evict", "--to", "1B"], ["clear"]]
)
def test_what_deletes_asks_on_a_terminal_and_has_a_dry_run(store, run, answers, command):
    name, *arguments = command
    before = n_pages(store)
    code, out, _ = run(name, store, *arguments, "--dry-run")
    assert (code, f"{before} pages" in out, "would be" in out) == (0 if name != "evict" else code, True, True)
    answers("n\n", "yes\n")
    code, out, err = run(name, store, *arguments)
    assert (code, out, n_pages(store)) == (1, "", before)
    assert "nothing was changed" in err
    assert f"{before} pages" in err
    assert run(name, store, *arguments)[0] in (0, 1)
    assert n_pages(store) == 0
    filled(store.removeprefix("lmdb://"))
    run(name, store, *arguments, "--yes")
    assert n_pages(store) == 0


@pytest.mark.slow
def test_a_script_does_not_delete_from_the_default_location_by_mistake(store, run, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFIXSTORE_LOCATION", store)
    before = n_pages(store)
    for command in (["purge", "--everything"], ["evict", "--to", "1B"], ["clear"]):
        code, _, err = run(*command)
        assert (code, f"no STORE is given; pass one, or --yes for {store}" in err) == (2, True)
        assert run(*command, "--dry-run")[0] in (0, 1)
    assert n_pages(store) == before
    # nor does a variable that names a file name the location
    config = tmp_path / "p.toml"
    config.write_text(f'[store]\nlocation = "{store}"\n')
    monkeypatch.delenv("PREFIXSTORE_LOCATION")
    monkeypatch.setenv("PREFIXSTORE_CONFIG", str(config))
    assert run("clear")[0] == 2
    assert n_pages(store) == before
    assert run("clear", "--yes")[0] == 0
    assert n_pages(store) == 0


# -- looking ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lists_are_sorted_limited_and_filtered(tmp_path, run, as_json):
    path = tmp_path / "many"
    with Archive(path, create=True) as archive:
        for i in range(5):
            fill(archive.backend, space(f"tenant-{i}"), [list(range(4 * (i + 1)))], last_used=i)
    assert [one["pages"] for one in as_json("ls", path, "--sort", "pages", "--limit", 2)[1]] == [5, 4]
    assert [one["pages"] for one in as_json("ls", path, "--salt", "tenant-2")[1]] == [3]
    assert "5 namespaces, 2 shown" in run("ls", path, "--limit", 2)[1]
    assert len(as_json("tree", path, "--limit", 3)[1]) == 3
    assert len(as_json("tree", path, "--salt", "tenant-4")[1]) == 5


@pytest.mark.parametrize("width", [40, 140])
def test_progress_is_one_line_in_every_terminal(monkeypatch, width):
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=width, legacy_windows=False)
    monkeypatch.setattr(warm, "Console", lambda **_: terminal)
    with warm.progress_shown() as show:
        show(Progress("evaluating", 5, 2_000_000, 1_000_000, 600_000, 500, 4000, 1 << 34, 2400.0))
        time.sleep(0.3)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", written.getvalue())]
    line = next(line for line in lines if "evaluating" in line)
    assert len(line.rstrip()) <= width
    assert "27 min left" in line
    assert ("600,000 of 1,000,000 tokens" in line) == (width == 140)
