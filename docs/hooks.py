"""What MkDocs needs to make a site of README.md and docs/, where GitHub's links stay as they are."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from prefixstore import PrefixStore
from prefixstore.cli.app import app
from prefixstore.cli.init import TEXT as EXAMPLE
from prefixstore.config import MODEL_SETTINGS, WARM_SETTINGS
from prefixstore.metrics.requests import COUNTERS, HISTOGRAMS
from prefixstore.metrics.stores import METRICS

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/prefixstore/prefixstore/blob/main"
COLUMNS = 100
LINK = re.compile(r"(!?\[[^\]]*\]\()((?!https?:|mailto:|#)[^)\s]+)(\))")
WARM = {
    "prompts": "Files, folders and patterns, as on the command line.",
    "pin": "Keep the prompts from eviction.",
    "generation_prompt": "End messages where the assistant answers, not where the next user turn begins.",
}


# -- events of MkDocs -------------------------------------------------------------------------------------------------


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files in docs/."""
    for uri, content in generated().items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links that lead out of docs/ work on the site."""
    return with_links_of_the_site(markdown, page.file.src_uri)


# -- pages from the program -------------------------------------------------------------------------------------------


def generated() -> dict[str, str]:
    """The generated pages, by their paths."""
    return {
        "index.md": (ROOT / "README.md").read_text("utf-8"),
        "reference/commands.md": commands(),
        "reference/configuration.md": configuration(),
        "reference/metrics.md": metrics(),
    }


def commands() -> str:
    """The help of every command."""
    lines = ["# Commands", "", "What each command says with `--help`. How to use them: [operations](../operations.md)."]
    for name, text in _helps(typer.main.get_command(app), "prefixstore", None):
        lines += ["", f"## {name}", "", "```text", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _helps(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    settings = {"help_option_names": ["-h", "--help"], "terminal_width": COLUMNS, "max_content_width": COLUMNS}
    context = type(command).context_class(command, info_name=name.rsplit(maxsplit=1)[-1], parent=parent, **settings)
    yield name, command.get_help(context)
    for part in getattr(command, "commands", ()):
        yield from _helps(command.commands[part], f"{name} {part}", context)


def configuration() -> str:
    """Every setting of a configuration file."""
    signature = inspect.signature(PrefixStore)
    meanings = _parameters(inspect.getdoc(PrefixStore) or "")
    example = EXAMPLE.format(
        name="prefixstore.toml",
        model='"model.gguf"',
        n_ctx=4096,
        location='"lmdb:///var/cache/kv"',
        max_bytes='"10GiB"',
        far_max_bytes="",
        prompts='"prompts.jsonl"',
    )
    lines = [
        "# Configuration",
        "",
        "One TOML file for servers, warming jobs and all commands: `prefixstore.load(FILE)`, `--config FILE`, or the",
        "variable `PREFIXSTORE_CONFIG`. `prefixstore init` writes this one:",
        "",
        f"```toml\n{example.rstrip()}\n```",
        "",
        "Options of a command override the file. The location is the argument of a command, then",
        "`PREFIXSTORE_LOCATION`, then that of the file, then `prefixstore/kv` in the user's cache directory.",
        "",
        "## [model]",
        "",
        "`path` is the GGUF file. All others are parameters of `llama_cpp.Llama`; types and scalings may be names,",
        'such as `"q8_0"`:',
        "",
        ", ".join(f"`{name}`" for name in sorted(MODEL_SETTINGS)) + ".",
        "",
        "## [store]",
        "",
        "The parameters of [`PrefixStore`](api.md).",
        "",
        "| setting | default | meaning |",
        "| --- | --- | --- |",
    ]
    for name, parameter in signature.parameters.items():
        if name != "llm":
            default = "" if parameter.default is None else f"`{parameter.default!r}`"
            lines.append(f"| `{name}` | {default} | {meanings.get(name, '')} |")
    lines += ["", "## [warm]", "", "| setting | meaning |", "| --- | --- |"]
    lines += [f"| `{name}` | {WARM[name]} |" for name in sorted(WARM_SETTINGS)]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Every metric, as its help says it."""
    of_stores = [
        (f"{name}_total" if each.kind == "Counter" else name, each.text, *filter(None, [each.label]))
        for name, each in METRICS.items()
    ]
    of_requests = [(f"{name}_total", text, "endpoint", *more) for name, (text, *more) in COUNTERS.items()]
    of_requests += [(name, text, "endpoint") for name, text in HISTOGRAMS.items()]
    lines = ["# List of metrics", "", "What each metric says of itself. How to use them: [metrics](../metrics.md)."]
    for title, rows in (("Stores", of_stores), ("Requests", of_requests)):
        lines += ["", f"## {title}", "", "| metric | labels | meaning |", "| --- | --- | --- |"]
        lines += [
            f"| `prefixstore_{name}` | {', '.join(f'`{label}`' for label in labels)} | {text} |"
            for name, text, *labels in rows
        ]
    return "\n".join(lines) + "\n"


def _parameters(docstring: str) -> dict[str, str]:
    """The parameters in a docstring in NumPy style, as one line of Markdown each."""
    section = docstring.split("\nParameters\n----------\n", 1)[1].split("\n\n", 1)[0]
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if not line.startswith(" "):
            names = [name.strip() for name in line.split(":")[0].split(",")]
        else:
            for name in names:
                found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return {name: text.replace("``", "`").replace("|", "\\|") for name, text in found.items()}


# -- links ------------------------------------------------------------------------------------------------------------


def with_links_of_the_site(markdown: str, uri: str) -> str:
    """The text of a page, with links as they are on the site.

    Parameters
    ----------
    markdown
        The text, with links as on GitHub.
    uri
        The path of the page on the site, relative to docs/.
    """
    # README.md is the first page
    place = ROOT if uri == "index.md" else (ROOT / "docs" / uri).parent
    folder = PurePosixPath(uri).parent

    def changed(found: re.Match[str]) -> str:
        name, mark, anchor = found[2].partition("#")
        target = Path(os.path.normpath(place / name))
        if target.is_relative_to(ROOT / "docs"):
            name = target.relative_to(ROOT / "docs").as_posix()
        elif target == ROOT / "README.md":
            name = "index.md"
        else:
            return f"{found[1]}{REPOSITORY}/{target.relative_to(ROOT).as_posix()}{mark}{anchor}{found[3]}"
        return f"{found[1]}{os.path.relpath(name, folder)}{mark}{anchor}{found[3]}"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.lstrip().startswith("```") else LINK.sub(changed, part) for part in parts)
