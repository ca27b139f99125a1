"""Files that commands write."""

from __future__ import annotations

import os

import pytest

from prefixstore.cli.files import writing
from prefixstore.errors import LocationError


def write(path, text, *, replace=False):
    with writing(str(path), replace=replace) as file:
        file.write(text.encode())


def test_a_file_is_written_for_its_owner_only_and_replaces_nothing_unasked(tmp_path):
    path = tmp_path / "r.html"
    write(path, "one")
    assert path.read_text() == "one"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(LocationError, match="File exists; choose another name"):
        write(path, "two")
    assert path.read_text() == "one"
    write(path, "two", replace=True)
    assert path.read_text() == "two"
    for wrong in (tmp_path / "none" / "r.html", tmp_path / ("x" * 300)):
        with pytest.raises(LocationError, match="cannot be written"):
            write(wrong, "x")
    assert [one.name for one in tmp_path.iterdir()] == ["r.html"]


@pytest.mark.parametrize("fault", [OSError(28, "no space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("replace", [True, False])
def test_what_cannot_be_written_as_a_whole_leaves_nothing(tmp_path, monkeypatch, fault, replace):
    path = tmp_path / "r.html"
    if replace:
        path.write_text("old")

    def fail(_):
        raise fault

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((LocationError, KeyboardInterrupt)):
        write(path, "new", replace=replace)
    assert [one.name for one in tmp_path.iterdir()] == ["r.html"] * replace
    assert not replace or path.read_text() == "old"
