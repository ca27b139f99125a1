"""The file: whole, private, and harmless whatever is in it."""

from __future__ import annotations

import json
import re

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.report.content import content_of, html_of
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
    frame = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//cdn|@import|url\(", frame)


def test_scripts_set_texts_as_texts_only(content):
    page = html_of(content)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\son\w+=", page)
