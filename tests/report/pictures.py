"""The pictures of a report in docs/report.md: ``python -m tests.report.pictures``."""

from __future__ import annotations

import math
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from prefixstore.engine.pages import open_pages
from prefixstore.report.content import Content, content_of, html_of
from tests.report.test_in_browser import ENTER, ESCAPE
from tests.support import ROOT
from tests.support.browser import DESKTOP, MISSING, Browser, programs
from tests.support.forest import DAY, lived_in

TO = ROOT / "docs" / "pictures"
# 22 November 2026
NOW = 1_795_340_000


def content(folder: Path) -> Content:
    """Of a store that never was, with a vocabulary of half words."""
    numbers: dict[str, int] = {}

    def tokens_of(text: str) -> list[int]:
        return [numbers.setdefault(piece, len(numbers)) for piece in re.findall(r"\s*\S{1,3}|\s+", text)]

    def text_of(tokens: Sequence[int]) -> str:
        pieces = list(numbers)
        return "".join(pieces[token] for token in tokens)

    backend = open_pages(f"lmdb://{folder}/kv", max_bytes=1 << 28)
    lived_in(backend, tokens_of, now=NOW)
    with backend.view() as view:
        made = content_of(view, "lmdb:///var/cache/kv", words=text_of, max_bytes=40 << 30, clock=lambda: NOW * 10**9)
    backend.close()
    made["used_bytes"] = made["stored_bytes"]
    rng = random.Random(2)

    def asked(began: int, prompts: float) -> tuple[int, ...]:
        n, rate = round(prompts * (0.9 + 0.2 * rng.random())), 0.72 + 0.15 * rng.random()
        return (began, round(n * rate), n - round(n * rate), 900 * n, round(700 * n * rate), round(500 * n), n // 60)

    today = NOW // DAY * DAY
    made["days"] = [asked(today - i * DAY, 760 + 200 * math.sin(i)) for i in range(30, -1, -1)]
    return made


def take() -> None:
    """Take all pictures."""
    found = programs()
    if found is None:
        raise SystemExit(MISSING)
    TO.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = folder / "report.html"
        page.write_text(html_of(content(folder)))
        browser = Browser(*found, folder / "chromium")
        try:
            browser.screen(DESKTOP)
            browser.open(page)
            browser.painted()
            browser.picture(TO / "report-light.png", height=1100)
            browser.screen(DESKTOP, dark=True)
            browser.press("/", "everything", ENTER, ESCAPE, ESCAPE)
            browser.picture(TO / "report-dark.png", height=720)
        finally:
            browser.close()
    for picture in sorted(TO.glob("report-*.png")):
        with Image.open(picture) as image:
            small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
        small.save(picture, optimize=True)
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    take()
