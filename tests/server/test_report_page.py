"""The report that ``prefixstore serve`` shows: a page without content, and its content behind the key."""

from __future__ import annotations

import re

import pytest

from tests.support.served import Serve, prompt

KEY = "not-for-everybody"


def content_of(served, **options):
    answer = served.get("/prefixstore/report.json", **options)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


@pytest.mark.slow
def test_the_page_is_public_and_says_nothing_and_the_content_needs_the_key(serve: Serve, browser):
    served = serve("--api-key", KEY, headers={"Authorization": f"Bearer {KEY}"})
    served.complete(prompt(31))
    status = served.saved()
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert served.get("/prefixstore/report.json", headers=headers).status_code == 401
    page = served.get("/prefixstore/", headers={})
    assert page.status_code == 200
    assert page.headers["x-frame-options"] == "DENY"
    assert 'id="data"></script>' in page.text
    assert served.get("/prefixstore", headers={}).headers["location"] == "prefixstore/"
    assert served.post("/prefixstore/report.json").status_code == 405
    content = content_of(served)
    assert content["pages"] == status["store"]["entries"] > 0
    assert content["labels"] == "tokens"
    assert all(re.fullmatch(r"[\d ]+…?", label) for label in content["runs"]["labels"])
    # the same, unless it has just been made again
    plain = {**served.headers, "accept-encoding": "identity"}
    served.until(lambda _: content_of(served, headers=plain) == content_of(served))
    # in a browser: it asks for the key, refuses a wrong one, and opens with the right one
    browser.open(f"{served.url}/prefixstore/")
    browser.until(lambda: browser.find("#key").is_displayed())
    for key in ("wrong", KEY):
        browser.find("#key").clear()
        browser.find("#key").send_keys(key)
        browser.find("#ask button").click()
        if key == "wrong":
            browser.until(lambda: "refuses" in browser.text("#refused"))
    browser.until(lambda: browser.find("#tree").is_displayed())
    browser.painted()
    assert browser.colours("#tree") > 10
    browser.find("#refresh").click()
    browser.until(lambda: browser.run("return getComputedStyle(document.getElementById('message')).display") == "none")
    # what listened to the first one does not any more
    browser.find("#tree").click()
    browser.press("\ue011", "\ue015", "\ue007")
    assert browser.run("return document.querySelectorAll('#path button').length") == 2
    # the browser itself tells of answers without content, and of nothing else
    assert all("401" in message and "report.json" in message for message in browser.messages())
