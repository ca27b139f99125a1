"""The documents say what the code does."""

from __future__ import annotations

import doctest
import json
import os
import re
import struct
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

import prefixstore
from benchmarks import readme, report
from prefixstore.backends.lmdb import environment as lmdb_environment
from prefixstore.backends.lmdb import lmdb_backend
from prefixstore.cli import main
from prefixstore.engine import policy
from prefixstore.engine.keyspace import LEAVES
from prefixstore.format import export, record
from prefixstore.format.codec import CODECS, PLANES_HEADER
from prefixstore.format.keys import SNAPSHOT, as_tokens, page_key, page_keys
from prefixstore.format.namespace import Namespace
from prefixstore.format.record import FORMAT_VERSION, Record, checksum
from tests.models.architectures import Memory, model
from tests.models.catalogue import MODELS
from tests.support import ROOT
from tests.support.untimed import untimed

FORMAT = (ROOT / "docs" / "format.md").read_text()
STRUCT_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i16": "h"}


def fields(start: str) -> list[list[str]]:
    """The fixed fields in the first table of docs/format.md that follows a text."""
    found: list[list[str]] = []
    for line in FORMAT.split(start, 1)[1].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].isdigit() and cells[1].isdigit():
            found.append(cells)
        elif found:
            break  # the tokens, and what comes after them
    return found


LAYOUTS = {
    "\n## Record\n": record.RECORD,
    "\n## Usage\n": record.USAGE,
    "\n| header |": export.HEADER,
    "\n| entry |": export.ENTRY,
    "\n| page |": export.PAGE_HEAD,
    "\n| end |": export.END_HEAD,
}


@pytest.mark.parametrize(("start", "layout"), LAYOUTS.items())
def test_the_byte_tables_match_the_structs(start, layout):
    offset, codes = 0, "<"
    for where, size, kind, _ in fields(start):
        assert int(where) == offset
        codes += STRUCT_CODES.get(kind, f"{size}s")
        offset += int(size)
    assert (offset, codes) == (layout.size, layout.format)


def test_the_worked_example_matches_what_is_written():
    example = FORMAT.split("## A worked example", 1)[1].split("\n## ", 1)[0]
    # from what the document says alone
    values: dict[str, list[bytes]] = {}
    last = ""
    for name, digits in re.findall(r"^    (.{14}) ([0-9a-f]+)$", example, re.MULTILINE):
        if name.strip():
            values.setdefault(name.strip(), []).append(bytes.fromhex(digits))
        else:
            values[last][-1] += bytes.fromhex(digits)
        last = name.strip() or last
    (settings,) = re.findall(r"^    settings +(.+)$", example, re.MULTILINE)
    assert values["namespace key"] == [blake2b(settings.encode(), digest_size=32, person=b"prefixstore name").digest()]
    kinds = {"first page": b"prefixstore page", "second page": b"prefixstore page", "snapshot": b"prefixstore snap"}
    parents = [*values["namespace key"], *values["first page"], *values["second page"]]
    tokens = [(1, 2), (3, 4), (5,)]
    for hashed, parent, own, (name, person) in zip(values["hashed"], parents, tokens, kinds.items(), strict=True):
        assert hashed == parent + np.array(own, "<i4").tobytes()
        assert values[name] == [blake2b(hashed, digest_size=32, person=person).digest()]
    # and as it is written
    namespace = Namespace(json.loads(settings))
    assert (namespace.canonical.decode(), [namespace.key]) == (settings, values["namespace key"])
    keys = page_keys(namespace.key, as_tokens([1, 2, 3, 4, 5]), 2)
    assert keys == [*values["first page"], *values["second page"]]
    assert [page_key(keys[-1], struct.pack("<i", 5), SNAPSHOT)] == values["snapshot"]
    page = Record(namespace.key, namespace.key, 0, struct.pack("<2i", 1, 2), 0, 5, 5, checksum(b"state"), 7, 1)
    assert values["record"] == [page.pack()]
    assert Record.unpack(keys[0], page.pack()) == page


def test_the_format_document_names_version_databases_and_codecs():
    assert f"version {FORMAT_VERSION}" in FORMAT.splitlines()[0]
    in_lmdb = FORMAT.split("## What is in an LMDB location", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `(\w)` \|", in_lmdb, re.MULTILINE))
    assert {name.encode() for name in named} == {lmdb_environment.META, lmdb_backend.PAYLOAD, lmdb_backend.ROW}
    assert f"u32: {lmdb_environment.LMDB_VERSION}" in in_lmdb
    assert "0 raw, 1 zstd, 2 planes" in FORMAT
    assert CODECS == {"raw": 0, "zstd": 1, "planes": 2}
    assert PLANES_HEADER.format == "<Q"


def test_the_session_in_the_documents_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(ROOT / "docs" / "howto" / "app.md"), module_relative=False)
    assert tried > 10
    assert failed == 0


def test_the_first_example_of_the_readme_hits_when_it_is_run_twice(tmp_path, models):
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "model.gguf").symlink_to(models("llama"))
    (tmp_path / "example.py").write_text(example.group(1))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    restored, computed = zip(*(run_example(tmp_path, environment) for _ in range(2)), strict=True)
    assert restored == (0, computed[0] - 1)
    assert computed[0] > 1000
    assert computed[1] == 1


def run_example(directory: Path, environment: dict[str, str]) -> tuple[int, int]:
    """What a run of the example prints, as numbers: tokens restored and tokens computed. It must print nothing else."""
    command = untimed("example.py")
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=280, cwd=directory, env=environment
    )
    assert done.stderr == ""
    line = re.fullmatch(r"([\d,]+) tokens restored, ([\d,]+) computed\n", done.stdout)
    assert line is not None, done.stdout
    restored, computed = (int(number.replace(",", "")) for number in line.groups())
    return restored, computed


def test_the_map_of_the_architecture_has_every_module_and_no_other():
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("\n## The map\n", 1)[1].split("\n## ", 1)[0]
    folder, named = Path(), set()
    for files in re.findall(r"^\| (.+?) \|", section, re.MULTILINE):
        if bold := re.fullmatch(r"\*\*`(prefixstore/)?(\w+/)?`\*\*", files):
            folder = Path(bold.group(2) or "")
        else:
            named |= {folder / name for name in re.findall(r"`([\w/]+(?:\.py|/))`", files)}
    package = ROOT / "prefixstore"
    assert {name for name in named if not (package / name).exists()} == set()
    modules = {path.relative_to(package) for path in package.rglob("*.py") if not path.name.startswith("__")}
    assert {path for path in modules if not named & {path, *path.parents}} == set()


def test_the_worked_examples_of_contributing_work(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    names = dict(vars(policy))
    for block in blocks:
        exec(compile(block, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    leaves = np.zeros(3, LEAVES)
    leaves["last_used"] = [2, 3, 1]
    assert names["newest_first"]().ranks(leaves).argsort().tolist() == [1, 0, 2]
    contract = names["TestTimed"]()
    tests = [name for name in dir(contract) if name.startswith("test_")]
    assert len(tests) >= 10
    for name in tests:
        (tmp_path / name).mkdir()
        getattr(contract, name)(tmp_path / name)
    row = re.search(r"^    (model\(.*\)),$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert eval(row.group(1), {"model": model, "Memory": Memory}) == MODELS["qwen3moe"]


DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_in_the_documents_exist(document):
    text = document.read_text()
    files = [
        path.relative_to(ROOT) for top in ("prefixstore", "tests", "benchmarks") for path in (ROOT / top).rglob("*")
    ]
    named = set(re.findall(r"`([\w/]+\.py)`", text)) - {"prefixstore_onefile.py"}  # an example of another package
    assert {name for name in named if not any(path.match(name) for path in files)} == set()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert {name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests} == set()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, heading = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if heading else []
        assert not heading or heading in {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}, (
            link
        )


def test_the_figures_are_those_of_the_results():
    """Not typed by hand: ``python -m benchmarks.readme`` writes those of README.md, ``make bench`` all of them."""
    results = json.loads((ROOT / "benchmarks" / "results" / "latest.json").read_text())
    text = (ROOT / "README.md").read_text()
    assert readme.with_figures(text, results) == text
    assert report.markdown(results) == (ROOT / "docs" / "benchmarks.md").read_text()
    with pytest.raises(ValueError, match="has no row"):
        readme.with_figures("", results)


@pytest.mark.slow
def test_the_demo_restores_and_answers_the_same(models, capfd, monkeypatch):
    real = subprocess.run

    def run(given, **more):
        python, option, *arguments = given
        assert (python, option) == (sys.executable, "-m")
        return real(untimed(*arguments), **more)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["demo", "--model", str(models("llama")), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["same_answer"]
    assert [(found[one]["computed"], found[one]["restored"]) for one in ("cold", "warm")] == [(3073, 0), (1, 3072)]


def test_the_answer_of_the_demo_is_one_line(capfd, monkeypatch):
    one = {"ttft": 1.0, "computed": 9, "restored": 0, "stored": 1, "pages": 1, "prompt": 9, "answer": "ok.\n\n\n.in\n"}
    monkeypatch.setattr(
        "prefixstore.demo.run_demo", lambda _: {"location": "lmdb:///kv", "cold": one, "warm": one, "same_answer": True}
    )
    assert main(["demo"]) == 1
    out, err = capfd.readouterr()
    assert out.endswith("The answer, from 9 tokens of prompt: ok.↵↵↵.in\n")
    assert "nothing was restored" in err


def test_the_changelog_has_the_version():
    assert f"## {prefixstore.__version__} " in (ROOT / "CHANGELOG.md").read_text()
