"""The page in a real browser: drawn, clicked, searched, by keyboard, in the dark, on a phone."""

from __future__ import annotations

import re

import pytest

from prefixstore.engine.pages import open_pages
from prefixstore.report.content import content_of, html_of
from tests.report.test_page import EVIL
from tests.support.forest import DAY, lived_in
from tests.support.places import fill, space

# keys as WebDriver names them
LEFT, UP, RIGHT, DOWN, ENTER, ESCAPE = "\ue012", "\ue013", "\ue014", "\ue015", "\ue007", "\ue00c"


def written(path, make, **options):
    """A page about a new location."""
    backend = open_pages(f"lmdb://{path}/kv", max_bytes=1 << 30)
    made = make(backend)
    with backend.view() as view:
        content = content_of(view, "lmdb:///var/cache/kv", **options)
    backend.close()
    return content, made


def saved(path, content):
    path.write_text(html_of(content))
    return path


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """Of a store with a vocabulary of characters."""
    path = tmp_path_factory.mktemp("lived_in")
    found, _ = written(
        path,
        lambda backend: lived_in(backend, lambda text: [ord(one) for one in text]),
        words=lambda tokens: "".join(map(chr, tokens)),
        max_bytes=40 << 30,
    )
    return found


@pytest.fixture(scope="module")
def page(content, tmp_path_factory):
    return saved(tmp_path_factory.mktemp("page") / "report.html", content)


def trail(browser):
    """Where the tree is zoomed to."""
    return browser.run("return [...document.querySelectorAll('#path button')].map((one) => one.textContent)")


def click(browser, x, row):
    """Click into the canvas: at a share of its width, in a row."""
    from selenium.webdriver import ActionChains

    canvas = browser.find("#tree")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    box = canvas.rect
    left, top = round((x - 0.5) * box["width"]), round(row * 27 + 13 - box["height"] / 2)
    ActionChains(browser.driver).move_to_element_with_offset(canvas, left, top).click().perform()
    browser.painted()


def test_the_tree_is_drawn_and_all_panels_are_filled(browser, page):
    browser.open(page)
    browser.painted()
    assert browser.colours("#tree") > 20
    assert browser.run("return [...document.querySelectorAll('h2')].map((one) => one.textContent)") == [
        *("Stored prefixes", "Hit rate", "Models and tenants"),
        *("Stale branches", "Reuse", "Age"),
    ]
    text = browser.text("#panels")
    assert "No prompt was looked up in the last 31 days" in text
    assert "coder-32B" in text
    assert "research" in text
    assert re.search(r"prefixstore purge lmdb:///var/cache/kv --older-than 7d", text)
    assert "% of 40.0 GiB" in browser.text("#facts")


@pytest.mark.slow
def test_a_click_zooms_in_and_the_path_leads_back(browser, page):
    browser.open(page)
    assert trail(browser) == ["All"]
    click(browser, 0.1, 2)
    assert len(trail(browser)) == 3
    assert "You are" in trail(browser)[-1]
    assert "You are" in browser.text("#selected")
    before = browser.run("return document.getElementById('tree').toDataURL()")
    browser.find("#path button").click()
    browser.painted()
    assert trail(browser) == ["All"]
    assert browser.run("return document.getElementById('tree').toDataURL()") != before


@pytest.mark.slow
def test_keys_move_zoom_and_search(browser, page):
    browser.open(page)
    browser.press("/")
    assert browser.run("return document.activeElement.id") == "search"
    browser.press("cancel my order")
    assert re.match(r"\d+ match", browser.text("#count"))
    browser.press(ENTER)
    assert "Can you cancel my order" in trail(browser)[-1]
    browser.press(ESCAPE)
    assert browser.run("return document.activeElement.id") == "tree"
    assert browser.run("return document.getElementById('matches').hidden")
    depth = len(trail(browser))
    browser.press(ESCAPE)
    assert len(trail(browser)) == depth - 1
    while len(trail(browser)) > 1:
        browser.press(ESCAPE)
    browser.press(DOWN, DOWN)
    first = browser.text("#selected .label")
    browser.press(DOWN, RIGHT)
    second = browser.text("#selected .label")
    assert second != first
    browser.press(LEFT, UP)
    assert browser.text("#selected .label") == first
    browser.press(ENTER)
    assert trail(browser)[-1] == first


@pytest.mark.parametrize("dark", [False, True])
def test_texts_can_be_read_on_what_they_stand_on(browser, page, dark):
    browser.screen(dark=dark)
    browser.open(page)
    ratios = browser.run(
        """
        const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(name).trim();
        const light = (colour) => {
          const [r, g, b] = [1, 3, 5].map((at) => parseInt((colour.length === 4
            ? '#' + [...colour.slice(1)].map((one) => one + one).join('') : colour).slice(at, at + 2), 16) / 255)
            .map((v) => v <= .04 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
          return .2126 * r + .7152 * g + .0722 * b;
        };
        const ratio = (a, b) => (Math.max(light(a), light(b)) + .05) / (Math.min(light(a), light(b)) + .05);
        const inks = [0, 1, 2, 3, 4, 5, 6].map((i) => get(`--b${i}`)).map((fill) =>
          Math.max(ratio('#10151d', fill), ratio('#f5f8fc', fill)));
        return [ratio(get('--ink'), get('--panel')), ratio(get('--soft'), get('--panel')),
                ratio(get('--soft'), get('--back')), ratio(get('--accent'), get('--panel')), ...inks];
        """
    )
    assert min(ratios) >= 4.4


def test_history_is_drawn_if_there_is_any(browser, content, tmp_path):
    today = content["made"] // DAY * DAY
    days = [(today - i * DAY, 900, 300, 9000, 7000, 2000, 7) for i in range(30, -1, -1)]
    browser.open(saved(tmp_path / "r.html", content | {"days": days}))
    assert re.search(r"\d\d % of [\d,]+ prompts found something", browser.text("#panels"))
    assert browser.run("return document.querySelectorAll('.chart .hit').length") == 31
    assert "Hit rate, 31 days" in browser.text("#facts")


def test_hostile_texts_are_shown_and_do_nothing(browser, tmp_path):
    def make(backend):
        fill(backend, space("<img src=x onerror=alert(1)>", label=EVIL.replace("\ud800", "")), ([1, 2], [3, 4]))

    content, _ = written(tmp_path, make, words=lambda _: EVIL)
    browser.open(saved(tmp_path / "r.html", content))
    browser.painted()
    assert "</script><script>alert(1)</script>" in browser.text("#panels")
    assert browser.run("return document.querySelectorAll('img, script').length") == 2
    browser.press("/", "alert", ENTER)
    assert "<img src=x onerror=alert(1)>" in "".join(trail(browser))


def test_an_empty_store_says_so(browser, tmp_path):
    content, _ = written(tmp_path, lambda _: None)
    browser.open(saved(tmp_path / "r.html", content))
    browser.painted()
    assert browser.text("#message") == "Nothing is stored yet."
