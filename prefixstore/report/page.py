"""The report as an HTML page: one self-contained file, or a shell that asks a server for its content."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from prefixstore.backends.files import sync_path
from prefixstore.errors import LocationError
from prefixstore.report.content import Content

__all__ = ["html_of", "live_html", "write_page"]

PARTS = Path(__file__).with_name("page")
SCRIPTS = ("tree.js", "icicle.js", "panels.js", "main.js")
# in JSON they can only be in texts; so no text can end the element that it is in
ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


@lru_cache(maxsize=1)
def _parts() -> tuple[str, str, str]:
    """The frame, the style and the script."""
    script = "".join((PARTS / name).read_text("utf-8") for name in SCRIPTS)
    # one scope: nothing of it is global
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    return (PARTS / "page.html").read_text("utf-8"), (PARTS / "page.css").read_text("utf-8"), script


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def html_of(content: Content) -> str:
    """The page with its content: it runs no script but its own, and cannot connect to anything."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character, escaped in ESCAPED.items():
        data = data.replace(character, escaped)
    return _filled(f"prefixstore: {content['location']}", data, "'none'")


def live_html() -> str:
    """The page without content, which it asks the server for, from ``report.json`` beside it."""
    return _filled("prefixstore", "", "'self'")


def _filled(title: str, data: str, connect: str) -> str:
    frame, style, script = _parts()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    values = {"title": html.escape(title), "policy": policy, "style": style, "data": data, "script": script}
    # in one pass: what is filled in is not searched
    pieces = frame.split("{{")
    done = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("}}", 1)
        done += [values[name], rest]
    return "".join(done)


def write_page(path: Path, text: str, *, replace: bool = False) -> None:
    """Write a file that only its owner can read, whole or not at all.

    Raises
    ------
    LocationError
        If it cannot be written, or exists and shall not be replaced.
    """
    try:
        if path.exists() and not path.is_file():
            # a device, or a pipe
            raise LocationError(f"cannot write {path}: it exists and is not a file; pass another --out")
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise LocationError(f"cannot write {path}: {error.strerror or error}; pass another --out") from error
    new = Path(name)
    try:
        with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123 - it is open
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            new.replace(path)
        else:
            _name(new, path)
        sync_path(path.parent)
    except FileExistsError:
        raise LocationError(f"{path} exists; pass --force to replace it, or another --out") from None
    except OSError as error:
        raise LocationError(f"cannot write {path}: {error.strerror or error}; pass another --out") from error
    finally:
        with suppress(FileNotFoundError):
            new.unlink()


def _name(new: Path, path: Path) -> None:
    """Give a file its name, unless another has it. Raises `FileExistsError`."""
    try:
        os.link(new, path)
    except FileExistsError:
        raise
    except OSError:
        # a file system without links
        if path.exists():
            raise FileExistsError(path) from None
        new.rename(path)
