"""The file: whole, private, and harmless whatever is in it."""

from __future__ import annotations

import json
import os
import re

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.errors import LocationError
from prefixstore.report.content import content_of
from prefixstore.report.page import html_of, live_html, write_page
from tests.support.places import fill, space

EVIL = "</script><script>alert(1)</script><!--<script> & {{script}} \u2028 \ud800"


@pytest.fixture
def content(tmp_path):
    backend = open_pages(f"lmdb://{tmp_path}/kv", max_bytes=1 << 24)
    fill(backend, space(EVIL.encode("utf-8", "replace").decode(), label=EVIL.replace("\ud800", "")), ([1, 2], [3, 4]))
    with backend.view() as view:
        yield content_of(view, f"lmdb:///{EVIL}", words=lambda tokens: EVIL)
    backend.close()


def test_no_text_ends_the_element_that_it_is_in(content):
    page = html_of(content)
    page.encode()
    # our own two, and those of the frame
    assert len(re.findall(r"<script", page)) == len(re.findall(r"</script>", page)) == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    read = json.loads(data[1])
    assert read["runs"]["labels"] == content["runs"]["labels"]
    assert "</script><script>alert(1)" in read["runs"]["labels"][0]
    assert "&lt;/script&gt;" in page.split("<title>")[1].split("</title>")[0]


def test_a_page_needs_nothing_from_elsewhere_and_may_not_ask(content):
    page = html_of(content)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert "connect-src 'self'" in live_html()
    frame = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//cdn|@import|url\(", frame)


def test_scripts_set_texts_as_texts_only(content):
    page = html_of(content)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\son\w+=", page)


def test_a_page_is_written_for_its_owner_only_and_replaces_nothing_unasked(tmp_path):
    path = tmp_path / "r.html"
    write_page(path, "one")
    assert path.read_text() == "one"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(LocationError, match="pass --force"):
        write_page(path, "two")
    assert path.read_text() == "one"
    write_page(path, "two", replace=True)
    assert path.read_text() == "two"
    with pytest.raises(LocationError, match="cannot write"):
        write_page(tmp_path / "none" / "r.html", "x")
    with pytest.raises(LocationError, match="cannot write"):
        write_page(tmp_path, "x", replace=True)
    with pytest.raises(LocationError, match="cannot write"):
        write_page(tmp_path / ("x" * 300), "x")
    assert [one.name for one in tmp_path.iterdir()] == ["r.html"]


def test_what_is_no_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(LocationError, match="is not a file"):
        write_page(pipe, "text", replace=True)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


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
        write_page(path, "new", replace=replace)
    assert [one.name for one in tmp_path.iterdir()] == ["r.html"] * replace
    assert not replace or path.read_text() == "old"


def test_a_file_system_without_links_does_too(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(1, "operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    write_page(tmp_path / "r.html", "one")
    with pytest.raises(LocationError, match="pass --force"):
        write_page(tmp_path / "r.html", "two")
    assert (tmp_path / "r.html").read_text() == "one"
