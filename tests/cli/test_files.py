"""Files that commands write."""

from __future__ import annotations

import os

import pytest

from prefixstore.cli.named_files import is_replaced, writing
from prefixstore.errors import InvalidParameterError


def write(path, text, *, replace=False):
    with writing(str(path), replace=replace) as file:
        file.write(text.encode())


def test_what_is_no_file_or_is_of_another_command_is_not_replaced(tmp_path):
    pipe, other = tmp_path / "pipe", tmp_path / "other"
    os.mkfifo(pipe)
    other.write_text("mine")
    for path in (pipe, tmp_path):
        with pytest.raises(InvalidParameterError, match="is not a file"):
            write(path, "text", replace=True)
    assert pipe.is_fifo()
    assert is_replaced(other, (b"ours", b"mine"))
    (tmp_path / "link").symlink_to("nowhere")
    assert [is_replaced(tmp_path / name) for name in ("none", "link")] == [False, True]


@pytest.mark.parametrize("fault", [OSError(28, "no space left on device"), KeyboardInterrupt()])
def test_what_cannot_be_written_as_a_whole_leaves_what_was_there(tmp_path, monkeypatch, fault):
    path = tmp_path / "r.html"

    def fail(_):
        raise fault

    monkeypatch.setattr(os, "fsync", fail)
    for there in ([], ["r.html"]):
        with pytest.raises((InvalidParameterError, KeyboardInterrupt)):
            write(path, "new", replace=bool(there))
        assert [one.name for one in tmp_path.iterdir()] == there
        path.write_text("old")
    assert path.read_text() == "old"
