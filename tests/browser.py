# SPDX-License-Identifier: Apache-2.0
"""A real browser for tests: the distribution's Chromium, headless, driven by Playwright.

Tests that need it are skipped where no Chromium is installed (Debian: `apt install chromium`).
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP = {"width": 1100, "height": 800}
PHONE = {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Any]:
    """A Playwright browser, with a profile of its own."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=[*FLAGS])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, **options: Any) -> Iterator[Any]:
    """A page, cookies of its own; no script may fail, and nothing may be fetched from elsewhere."""
    context = browser.new_context(**{"viewport": DESKTOP} | options)
    page, wrong, fetched = context.new_page(), [], []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: line.type == "error" and wrong.append(line.text))
    page.on("request", lambda request: fetched.append(request.url))
    page.wrong, page.fetched = wrong, fetched
    yield page
    context.close()
    assert [text for text in wrong if "Failed to load resource" not in text] == []


def fits(page: Any) -> bool:
    """Whether nothing sticks out to the right."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))
