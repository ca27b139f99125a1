"""Commands, run in this process."""

from __future__ import annotations

import json
import re
import sys
from unittest.mock import Mock

import pytest

from prefixstore.cli import output
from prefixstore.maintenance.archive import Archive
from tests.support import ROOT
from tests.support.places import fill, space

# the fields of --json, by the command, as they are documented
TABLE = (ROOT / "docs" / "operations.md").read_text().split("### JSON")[1]
ROWS = re.findall(r"^\| (`[a-z].*?) \| (.*) \|$", TABLE, re.MULTILINE)
FIELDS = {name: set(re.findall(r"`(\w+)`", text)) for names, text in ROWS for name in re.findall("`(.*?)`", names)}
FIELDS["show"] |= FIELDS["tree"]
FIELDS["warm"] = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "howto" / "warming.md").read_text())) | {"dry_run"}
SEQUENCES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 10], [20, 21, 22, 23, 24])


@pytest.fixture
def as_json(run):
    """Runs a command with --json: exit code, and its output."""

    def call(*arguments):
        code, out, _ = run(*arguments, "--json")
        found = json.loads(out)
        for one in found if isinstance(found, list) else [found]:
            assert one.keys() <= FIELDS[arguments[0]]
        return code, found

    return call


@pytest.fixture
def new_user(tmp_path, monkeypatch):
    """In an empty folder, with nothing set and nothing cached."""
    monkeypatch.delenv("PREFIXSTORE_LOCATION", raising=False)
    monkeypatch.delenv("PREFIXSTORE_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def answers(monkeypatch):
    """A terminal whose user gives these answers."""

    def terminal(*given):
        monkeypatch.setattr(output, "has_terminal", lambda: True)
        monkeypatch.setattr(sys, "stdin", Mock())
        sys.stdin.readline.side_effect = given

    return terminal


def filled(path, sequences=SEQUENCES, **options):
    """A location with pages of one tenant."""
    with Archive(path, create=True) as archive:
        fill(archive.backend, space("mine"), sequences, **options)
        return archive.location


def n_pages(location):
    with Archive(location, read_only=True) as archive:
        return archive.used().entries
