"""The doctor: each thing that can be wrong is found, and said with the way out; what is well is not accused."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from prefixstore.config import Config
from prefixstore.counters import DAY
from prefixstore.diagnosis import doctor
from prefixstore.diagnosis.doctor import Level, examine, mount_of
from prefixstore.format.figures import NOTE, Figures, History
from prefixstore.maintenance.archive import Archive
from tests.support.models import caching, load, prompt


class Disk(NamedTuple):
    total: int
    used: int
    free: int


MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:5 / /mnt/share\\040one rw - nfs4 server:/x rw
23 21 0:6 / /dev/shm rw - tmpfs tmpfs rw
"""


@pytest.fixture
def run(run):
    return partial(run, "doctor")


@pytest.fixture(autouse=True)
def local_disk(tmp_path, monkeypatch):
    """Tests may run in a container, and on a busy machine; each is on a fast local disk with a lot of space."""
    clock = itertools.count()
    monkeypatch.setattr(doctor, "perf_counter", lambda: next(clock) * 1e-9)
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(doctor, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(1 << 42, 0, 1 << 42))


@pytest.fixture(scope="module")
def served(models, tmp_path_factory):
    location = tmp_path_factory.mktemp("served") / "kv"
    llm = load(models("llama"))
    with caching(location, llm):
        llm(prompt(600), max_tokens=1)
    llm.close()
    return models("llama"), location


def found(name, *arguments, **options):
    return next(finding for finding in examine(*map(str, arguments), **options) if finding.name == name)


def problems(*arguments, **options):
    return [finding.name for finding in examine(*map(str, arguments), **options) if finding.level is Level.PROBLEM]


def test_a_store_that_is_well_has_no_problem(served, run, tmp_path):
    model, location = served
    assert problems(location) == []
    code, out, err = run(location)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "no problems found"
    assert f"lmdb {metadata.version('lmdb')}, numpy" in out
    assert "restoring" in out
    assert " in 3 pages of 1 namespace\n" in out
    config = tmp_path / "warm.toml"
    config.write_text(f'[model]\npath = "{model}"\nn_ctx = 1024\n[store]\nlocation = "{location}"\n')
    code, out, _ = run("--config", config, "--json")
    report = json.loads(out)
    assert (code, report["problems"], report["location"]) == (0, 0, f"{location}")
    assert {one["name"]: one["value"] for one in report["findings"]}["settings"] == "3 pages for them"


def test_a_missing_store_and_a_directory_that_is_none_are_problems(tmp_path, run):
    assert "Check the path" in found("store", tmp_path / "none").advice
    code, out, err = run(tmp_path / "none")
    assert (code, err, out.splitlines()[-1]) == (1, "", "1 problem to fix")
    assert " in 0 pages" not in out
    assert not (tmp_path / "none").exists()
    (tmp_path / "other").mkdir(mode=0o755)
    (tmp_path / "other" / "file").write_text("mine")
    # nor is it said that others can read prompts in it
    assert problems(tmp_path / "other") == ["store"]
    assert problems(tmp_path / "other" / "file") == ["store"]
    assert run("nonsense://x")[0] == 2


@pytest.mark.parametrize(
    ("kind", "level", "says"),
    [
        ("nfs4", Level.PROBLEM, "use a local disk"),
        ("tmpfs", Level.NOTE, "lost when the machine restarts"),
        ("ext4", Level.GOOD, ""),
    ],
)
def test_the_file_system_is_judged(monkeypatch, tmp_path, kind, level, says):
    (tmp_path / "a disk").mkdir()
    (tmp_path / "mounts").write_text(f"{MOUNTS}24 21 0:7 / {tmp_path}/a\\040disk rw - {kind} x rw\n")
    finding = found("file system", tmp_path / "a disk" / "kv")
    assert (finding.value, finding.level) == (f"{kind} at {tmp_path}/a disk", level)
    assert says in finding.advice
    monkeypatch.setattr(doctor, "MOUNTS", tmp_path / "none")
    assert found("file system", tmp_path).value == "not known"


def test_mounts_are_read_by_their_longest_name(monkeypatch):
    monkeypatch.setattr(doctor, "existing", Path)
    assert mount_of(Path("/mnt/share one/a/b")) == ("nfs4", "/mnt/share one")
    assert mount_of(Path("/mnt/share onesided")) == ("ext4", "/")


def test_permissions(served, monkeypatch):
    _, location = served
    location.chmod(0o755)
    try:
        finding = found("permissions", location)
        assert (finding.level, f"chmod 700 {location}" in finding.advice) == (Level.PROBLEM, True)
    finally:
        location.chmod(0o700)
    # shared with a group, as docs/backends.md says
    location.chmod(0o2770)
    finding = found("permissions", location)
    assert (finding.level, "Its group" in finding.advice) == (Level.NOTE, True)
    location.chmod(0o700)
    assert found("permissions", location).level is Level.GOOD
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: not mode & doctor.os.W_OK)
    assert "read_only=True" in found("permissions", location).advice
    assert found("permissions", location, config=Config(store={"read_only": True})).level is Level.GOOD


def test_a_place_that_is_a_pipe_or_hidden_is_a_problem_and_nothing_waits_for_it(tmp_path, run):
    os.mkfifo(tmp_path / "pipe")
    for location in (
        tmp_path / "pipe",
        f"sqlite:///{tmp_path}/pipe",
        tmp_path / "pipe" / "store",
        tmp_path / ("x" * 300),
    ):
        code, out, _ = run(location)
        assert (code, "cannot be opened" in out or "none yet" in out) == (1, True), location


def test_free_space_and_budget(served, monkeypatch):
    _, location = served
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(1 << 30, 0, 1 << 30))
    assert "lower it to" in found("free space", location, max_bytes="20GiB").advice
    assert found("free space", location, max_bytes="100MiB").level is Level.GOOD
    assert problems(location, max_bytes="10KiB") == ["budget"]
    assert found("budget", location, config=Config(store={"max_bytes": "1GiB"})).value.endswith("of 1.0 GiB (0 %)")


@pytest.mark.parametrize(
    ("counts", "says", "advice"),
    [
        ((0, 12, 9, 2, 1), "missed: evicted 1, diverged 2, not found 9", "prefixstore explain says"),
        ((0, 12, 1, 1, 9), "missed: evicted 9, diverged 1, not found 1, other reasons 1", "raise max_bytes"),
        ((0, 12, 0, 1, 0), "missed: diverged 1, other reasons 11", "The log of the servers"),
        ((12, 12, 0, 12, 0), "hit rate 50 % of 24 prompts since yesterday; missed: diverged 12", ""),
    ],
)
def test_a_low_hit_rate_is_a_problem_with_its_most_frequent_cause(tmp_path, counts, says, advice):
    names = ("hits", "misses", "misses_not_found", "misses_diverged", "misses_evicted")
    figures = Figures(**dict(zip(names, counts, strict=True)))
    with Archive(tmp_path / "kv", create=True) as archive, archive.backend.update() as transaction:
        transaction.put_note(NOTE, History({(int(time.time() // DAY), "a" * 16): figures}).pack(9))
    finding = found("use", tmp_path / "kv")
    assert says in finding.value
    assert advice in finding.advice
    assert (finding.level is Level.PROBLEM) == bool(advice)


def test_pages_for_other_settings_only_are_found_and_the_setting_named(served, models, run, tmp_path):
    model, location = served
    config = tmp_path / "warm.toml"
    config.write_text(f'[model]\npath = "{model}"\nn_ctx = 1024\ntype_k = "q8_0"\n[store]\nlocation = "{location}"\n')
    code, out, _ = run("--config", config)
    assert code == 1
    assert "type_k is q8_0 here, f16 in the store" in " ".join(out.split())
    assert "1 problem to fix" in out
    config.write_text(f'[model]\npath = "{models("mamba")}"\nn_ctx = 64\n[store]\nlocation = "{location}"\n')
    # a model that is new to a store is no problem
    code, out, _ = run("--config", config)
    assert (code, "no problems found" in out) == (0, True)
    assert re.search(r"model is synthetic mamba F16 \(\w{12}\) here, synthetic llama F16 \(\w{12}\) in", out)
    config.write_text(f'[model]\npath = "{model}"\n[store]\nlocation = "{location}"\nmax_bytes = "1MiB"\n')
    code, out, _ = run("--config", config)
    assert code == 1
    assert "Set n_ctx in [model]" in out
    config.write_text(f'[model]\npath = "{tmp_path}/none.gguf"\n[store]\nlocation = "{location}"\n')
    assert "model file not found" in run("--config", config)[1]


def test_both_of_two_locations_are_examined(served, run, tmp_path):
    model, location = served
    config = tmp_path / "fleet.toml"
    near = tmp_path / "near"
    config.write_text(
        f'[model]\npath = "{model}"\nn_ctx = 1024\n'
        f'[store]\nlocation = ["{near}", "{location}"]\nfar_max_bytes = "1KiB"\n'
    )
    code, out, _ = run("--config", config, "--json")
    findings = json.loads(out)["findings"]
    assert [one["value"] for one in findings if one["name"] == "location"] == [str(near), str(location)]
    assert [one["level"] for one in findings if one["name"] == "budget"] == ["good", "problem"]
    # a new machine begins without one of its own
    assert [one["level"] for one in findings if one["name"] == "store"] == ["note"]
    # pages that only the far location has
    assert [one["value"] for one in findings if one["name"] == "settings"] == ["3 pages for them"]
    assert code == 1
