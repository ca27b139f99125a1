"""A real browser without a window, for the tests of pages: Chromium, driven by Selenium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

MISSING = "no browser: apt-get install chromium chromium-driver, or set CHROMIUM and CHROMEDRIVER to their paths"
SECONDS = 120
DESKTOP = 1280, 900


def programs() -> tuple[str, str] | None:
    """Chromium and its driver."""
    names = (("CHROMIUM", "chromium", "chromium-browser", "google-chrome"), ("CHROMEDRIVER", "chromedriver"))
    found = [
        os.environ.get(variable) or next(filter(None, map(shutil.which, candidates)), None)
        for variable, *candidates in names
    ]
    return (found[0], found[1]) if found[0] and found[1] else None


class Browser:
    """One window. Pages are seen as on a screen of a given size, in a light or dark scheme."""

    def __init__(self, chromium: str, driver: str, home: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for argument in (
            "--headless=new",
            # of root, in a container
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--no-proxy-server",
            f"--user-data-dir={home}",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # the command that Selenium would look for on the network is given
        self.driver = webdriver.Chrome(options=options, service=Service(driver))
        self.driver.set_page_load_timeout(SECONDS)
        self.driver.set_script_timeout(SECONDS)

    def screen(self, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> None:
        """Have pages seen like this."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            # nothing moves: what is drawn is drawn at once
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def open(self, page: Path | str) -> None:
        self.messages()
        self.driver.get(page.as_uri() if isinstance(page, Path) else page)

    def run(self, script: str, *arguments: Any) -> Any:
        """What this JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def press(self, *keys: str) -> None:
        """Type where the focus is."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()
        self.painted()

    def painted(self) -> None:
        """Return after what was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )

    def until(self, holds: Callable[[], Any]) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, SECONDS, 0.05).until(lambda _: holds())

    def colours(self, selector: str) -> int:
        """How many colours a canvas shows."""
        return int(
            self.run(
                "const c = document.querySelector(arguments[0]);"
                "const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);"
                "return new Set(d).size",
                selector,
            )
        )

    def messages(self) -> list[str]:
        """What the console has shown since the last time."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]

    def picture(self, path: Path, *, height: int | None = None) -> None:
        """A picture of the page, as wide as the screen, and of all its height or the first part of it."""
        import base64

        size = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": min(height or size[1], size[1]), "scale": 1}
        options = {"captureBeyondViewport": True, "clip": clip}
        path.write_bytes(base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"]))

    def close(self) -> None:
        with suppress(Exception):
            self.driver.quit()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The browser of all tests of this process."""
    found = programs()
    if found is None:
        # where everything has to be tested, .ci/run says so
        if os.environ.get("PREFIXSTORE_TEST_BROWSER") == "required":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    browser = Browser(*found, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A browser with a screen of usual size; the test fails if the console has shown anything."""
    chromium.screen()
    yield chromium
    assert chromium.messages() == []
    chromium.driver.get("about:blank")
