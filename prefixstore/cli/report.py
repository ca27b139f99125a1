"""The command that writes a location as a page: ``report``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prefixstore.cli import options
from prefixstore.cli.command import Result
from prefixstore.cli.files import STANDARD, is_replaced, writing
from prefixstore.cli.model import text_of_tokens
from prefixstore.cli.output import FAILED, may_replace, say
from prefixstore.maintenance.archive import Archive
from prefixstore.models.file import file_digest, model_parts
from prefixstore.report.content import BEGIN, content_of, html_of
from prefixstore.units import counted, format_bytes

__all__ = ["report"]


def report(
    location: str,
    *,
    out: Path = Path("report.html"),
    model: Path | None = None,
    tokenizer: Path | None = None,
    max_bytes: str | None = None,
    yes: bool = False,
) -> Result | int:
    """Write a page that shows a store: its tree and its use.

    The page is one file that needs no network. With a model or a tokenizer it shows the text where prompts diverge;
    otherwise token ids, which anyone with the model can turn into text. Only its owner can read the file. On a terminal
    it asks before it replaces a report; otherwise that needs --yes. A file that is no report is never replaced. Exit
    code 1: nothing was replaced.

    Example: prefixstore report lmdb:///var/cache/kv --out report.html --model m.gguf
    """
    if str(out) != STANDARD and is_replaced(out, (BEGIN.encode(),)) and not may_replace(out, yes=yes):
        return FAILED
    words = text_of_tokens(model, tokenizer)
    with Archive(location, read_only=True) as archive, archive.backend.view() as view:
        content = content_of(
            view,
            archive.location,
            words=words,
            is_of=partial(_is_of, model if tokenizer is None else None),
            max_bytes=options.max_bytes_of(max_bytes),
        )
    page = html_of(content).encode()
    with writing(str(out)) as file:
        file.write(page)
    held = f"{counted(content['pages'], 'page')}, {format_bytes(content['used_bytes'])}"
    runs = content.pop("runs")
    data = {"out": str(out), "bytes": len(page), "runs": len(runs["parent"])} | content
    return Result(
        data if str(out) != STANDARD else None,
        partial(say, f"{out}: {content['location']}, {held}; open it in a browser"),
    )


def _is_of(model: Path | None, digest: str) -> bool:
    """Whether a digest is that of this model. Of a tokenizer it is not known."""
    return model is None or digest == "+".join(map(file_digest, model_parts(str(model))))
