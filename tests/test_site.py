"""The documents as a site, and what is written in them to be typed."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from prefixstore.cli.app import app
from prefixstore.config import Config, load_config
from tests.support import ROOT

pytest.importorskip("mkdocs", reason='needs the extra "docs"')

from docs import hooks

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", *(DOCS / page for page in PAGES)]
HOW_TO = sorted((DOCS / "howto").glob("*.md"))
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (prefixstore .*)$", re.MULTILINE)
NAMES = "|".join(typer.main.get_command(app).commands)


def blocks(text, *languages):
    """The code blocks in these languages, in order."""
    for indent, language, code in FENCED.findall(text):
        if language in languages:
            yield language, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_site_builds_with_every_link_and_anchor_found(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=1100, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    made = {path.relative_to(tmp_path / "site").parent.as_posix() for path in (tmp_path / "site").rglob("index.html")}
    assert made >= {page.removesuffix(".md") for page in PAGES}
    api = (tmp_path / "site" / "reference" / "api" / "index.html").read_text()
    assert "A persistent prefix cache for llama-cpp-python" in api
    assert "http" not in re.sub(
        r'href="[^"]*"', "", (tmp_path / "site" / "index.html").read_text().split("<body", 1)[0]
    )


def test_every_document_is_in_the_navigation():
    named = set(re.findall(r"^ +- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {*PAGES, *hooks.generated()}


# -- what is written to be typed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_written_as_python_json_or_toml_is_that(document, tmp_path):
    for language, code in blocks(document.read_text(), "python", "toml", "json"):
        if language == "python":
            source = (
                "\n".join(line[4:] for line in code.splitlines() if line.startswith((">>> ", "... ")))
                if ">>> " in code
                else code
            )
            compile(source, str(document), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif language == "json":
            json.loads(code)
        else:
            (tmp_path / "c.toml").write_text(code)
            if "[project" not in code:
                assert isinstance(load_config(tmp_path / "c.toml"), Config)


def commands_in(text):
    """The lines with a command of prefixstore, without what a shell does with them."""
    lines = INDENTED.findall(text) + re.findall(rf"`(prefixstore (?:{NAMES})\b[^`]*)`", text)
    for _, code in blocks(text, "", "console", "ini", "yaml"):
        joined = re.sub(r"\\\n\s*", "", code)
        lines += re.findall(r"(?:^|\$ |=|/)(prefixstore [\w-].*)$", joined, re.MULTILINE)
    for line in lines:
        command = line.split("  #")[0]
        if "…" not in command and "FILE" not in command and not command.startswith(("prefixstore:", "prefixstore_")):
            words = shlex.split(command.split(" >")[0].split(" |")[0].split(" &")[0])
            yield words[1:]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_the_documents_exist_with_their_options(document):
    program = typer.main.get_command(app)
    for words in commands_in(document.read_text()):
        command, given = program, words
        context = type(program).context_class(program, info_name="prefixstore")
        while given and given[0] in getattr(command, "commands", {}):
            command, given = command.commands[given[0]], given[1:]
            context = type(command).context_class(command, info_name=command.name, parent=context)
        assert command is not program, words
        assert not hasattr(command, "commands") or not given, words
        command.make_parser(context).parse_args(list(given))  # raises for an unknown option


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("document", HOW_TO, ids=lambda path: path.name)
def test_the_how_to_pages_do_what_they_say(document, tmp_path, models):
    """From top to bottom, in an empty folder: commands in a shell, Python in a process for each block."""
    environment = prepared(tmp_path, models)
    if document.name in {"deletion.md", "moving.md", "upgrade.md"}:  # begin with a store
        fill = next(code for _, code in blocks((DOCS / "howto" / "sharing.md").read_text(), "python"))
        run([sys.executable, "-c", fill], tmp_path / "work", environment)
    for language, code in blocks(document.read_text(), "python", "console"):
        if language == "python":
            if "write_model" not in code:  # a session: tests/test_docs.py runs it
                run([sys.executable, "-c", code], tmp_path / "work", environment)
        else:
            for line in code.splitlines():
                assert line.startswith("$ ")
                run(["sh", "-c", line.removeprefix("$ ")], tmp_path / "work", environment)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_of_the_runbook_run(tmp_path, models):
    """Each of them on a store, in order; 1 says that something was found, or not."""
    environment, work = prepared(tmp_path, models), tmp_path / "work"
    fill = next(code for _, code in blocks((DOCS / "howto" / "sharing.md").read_text(), "python"))
    run([sys.executable, "-c", fill], work, environment | {"PREFIXSTORE_TRACE": "trace.jsonl"})
    run(["sh", "-c", "prefixstore init --model model.gguf --store kv --n-ctx 2048"], work, environment)
    (page, *_) = json.loads(run(["sh", "-c", "prefixstore tree kv --json"], work, environment))
    runbook = (DOCS / "operations.md").read_text().split("\n## Runbook\n", 1)[1].split("\n## ", 1)[0]
    lines = [*INDENTED.findall(runbook), *re.findall(r"`(prefixstore [^`]* STORE[^`]*)`", runbook)]
    assert len(lines) > 15
    named = {"STORE": "kv", "HASH": page["page"], "TENANT": "tenant-7"}
    named |= {"--namespace HASH": f"--namespace {page['namespace']}"}
    places = re.compile("|".join(sorted(named, key=len, reverse=True)))
    shutil.move(work / "kv", work / "kept")
    for line in lines:
        shutil.copytree(work / "kept", work / "kv")
        run(["sh", "-c", places.sub(lambda one: named[one[0]], line)], work, environment, codes=(0, 1))
        shutil.rmtree(work / "kv")


def prepared(tmp_path, models):
    """A folder with the command and a model, and one to work in; and the environment in which they are found."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "prefixstore"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m prefixstore "$@"\n')
    program.chmod(0o755)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "model.gguf").symlink_to(models("llama"))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    return {name: value for name, value in environment.items() if not name.startswith("PREFIXSTORE_")}


def run(command, folder: Path, environment, codes=(0,)):
    """What a command prints."""
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode in codes, (command, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, (command, done.stderr)
    return done.stdout
