"""The report as an HTML page: one self-contained file, or a shell that asks a server for its content."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import lru_cache
from pathlib import Path
from string import Template

from prefixstore.report.content import Content

__all__ = ["BEGIN", "html_of", "live_html"]

PARTS = Path(__file__).with_name("page")
# of a page, and of no other file
BEGIN = "<!doctype html>\n<!-- a report of prefixstore -->\n"
SCRIPTS = ("tree.js", "icicle.js", "panels.js", "main.js")
# in JSON they can only be in texts; so no text can end the element that it is in
ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


@lru_cache(maxsize=1)
def _parts() -> tuple[str, str, str]:
    """The frame, the style and the script."""
    script = "".join((PARTS / name).read_text("utf-8") for name in SCRIPTS)
    # one scope: nothing of it is global
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    return BEGIN + (PARTS / "page.html").read_text("utf-8"), (PARTS / "page.css").read_text("utf-8"), script


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
    # in one pass: what is filled in is not searched
    return Template(frame).substitute(title=html.escape(title), policy=policy, style=style, data=data, script=script)
