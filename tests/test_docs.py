"""What the documents say is what the code does."""

from __future__ import annotations

import doctest
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import prefixstore
from prefixstore import stats
from prefixstore.backends.lmdb import environment as lmdb_environment
from prefixstore.format import record
from prefixstore.format.codec import CODECS, PLANES_HEADER
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import FORMAT_VERSION, Record, Usage, checksum
from prefixstore.llama import whole_state

ROOT = Path(__file__).parent.parent
FORMAT = (ROOT / "docs" / "format.md").read_text()
STRUCT_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i16": "h"}


def table(title: str) -> list[list[str]]:
    """The rows of the table in a section of docs/format.md."""
    section = FORMAT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return rows[2:]


@pytest.mark.parametrize(
    ("title", "layout"), [("Record", record.RECORD), ("Usage", record.USAGE), ("A whole state", whole_state.HEADER)]
)
def test_the_byte_tables_are_the_structs(title, layout):
    offset, codes = 0, "<"
    for where, size, kind, _ in table(title):
        if not where.isdigit() or not size.isdigit():
            break  # the tokens, and what comes behind them
        assert int(where) == offset
        codes += STRUCT_CODES.get(kind, f"{size}s")
        offset += int(size)
    assert offset == layout.size
    written = re.sub(r"(\d+)x", r"\1s", layout.format)
    assert struct.calcsize(codes) == layout.size
    assert codes == written


def test_the_worked_example_is_what_is_written():
    example = FORMAT.split("## A worked example", 1)[1].split("\n## ", 1)[0]
    namespace = Namespace({"label": "example", "page_tokens": 2, "salt": None})
    assert namespace.canonical.decode() in example
    page = Record(namespace.key, namespace.key, 0, struct.pack("<2i", 1, 2), 0, 5, 5, checksum(b"state"), 7, 1)
    digits = "".join(re.findall(r"[0-9a-f]{16,}", example))
    assert digits == namespace.key.hex() + page.key.hex() + page.pack().hex()
    assert Record.unpack(page.key, page.pack()) == page


def test_the_format_document_names_version_databases_and_codecs():
    assert f"version {FORMAT_VERSION}" in FORMAT.splitlines()[0]
    in_lmdb = FORMAT.split("## What is in an LMDB location", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `(\w+)` \|", in_lmdb, re.MULTILINE))
    assert named == {name.decode() for name in lmdb_environment.DATABASES}
    assert "0 raw, 1 zstd, 2 planes" in FORMAT
    assert CODECS == {"raw": 0, "zstd": 1, "planes": 2}
    assert PLANES_HEADER.format == "<Q"
    usage = Usage(3, 4, pinned=True, priority=-5, expires=6)
    assert Usage.unpack(usage.pack()) == usage


def test_the_examples_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert tried > 10
    assert failed == 0


def test_every_make_target_and_file_that_the_readme_names_is_there():
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", readme):
        assert f"\n{target}:" in makefile
    for name in re.findall(r"\]\((docs/\w+\.md)\)", readme):
        assert (ROOT / name).is_file()


def test_the_reasons_that_are_counted_are_documented():
    source = "\n".join(path.read_text() for path in (ROOT / "prefixstore").rglob("*.py"))
    groups = "miss|dropped|unreadable"
    counted = set(re.findall(rf'"(?:{groups}):(\w+)"', source))
    assert {"not_found", "corrupt", "error"} <= counted
    missing = {reason for reason in counted if f'"{reason}"' not in stats.Stats.__doc__}
    assert not missing


def test_the_demo_restores_and_answers_the_same(models):
    command = [sys.executable, "-m", "prefixstore", "demo", "--model", str(models("llama"))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"same answer +yes", done.stdout)
    assert re.search(r"tokens restored +0 +3,072", done.stdout)
    assert re.search(r"tokens computed +3,073 +1\b", done.stdout)


def test_the_demo_says_what_is_wrong_with_a_model(tmp_path):
    command = [sys.executable, "-m", "prefixstore", "demo", "--model", str(tmp_path / "none.gguf")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1
    assert "is no file; give MODEL=path.gguf" in done.stderr


def test_the_changelog_has_the_version():
    assert f"## {prefixstore.__version__} " in (ROOT / "CHANGELOG.md").read_text()
