# SPDX-License-Identifier: Apache-2.0
"""The page of `vllm-segreuse explain --html` in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segreuse_tools.explain import page as pages
from tests.browser import PHONE, chromium, fits, opened
from tests.explain.reports import EXPLANATION, NASTY


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("page") / "explained.html"
    pages.write(file, EXPLANATION, f"request {NASTY}")
    return file.as_uri()


def current(page: Any) -> str:
    return str(page.evaluate("document.activeElement.getAttribute('aria-label')"))


def test_arrow_keys_go_from_stretch_to_stretch(browser: Any, url: str) -> None:
    with opened(browser) as page:
        page.goto(url)
        labels = []
        for key in ("Tab", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home"):
            page.keyboard.press(key)
            labels.append(current(page)[:2])
        assert labels == ["1.", "2.", "3.", "2.", "7.", "7.", "1."]
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body"), "one stop for all"
        page.keyboard.press("Shift+Tab")
        assert current(page)[:2] == "2.", "where it was left"


def test_what_has_the_focus_is_marked_and_described(browser: Any, url: str) -> None:
    with opened(browser) as page:
        page.goto(url)
        page.keyboard.press("Tab")
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        cursor = page.locator(".cursor")
        assert cursor.is_visible()
        assert cursor.evaluate("it => getComputedStyle(it).strokeWidth") == "4px"
        bar, marked = page.locator("a:focus rect").first.bounding_box(), cursor.bounding_box()
        assert (marked["x"], marked["width"]) == pytest.approx((bar["x"], bar["width"]), abs=3)
        detail = page.locator(".detail").text_content()
        assert detail.startswith("3. tokens 645 to 1,195: segment, moved by -539, 16%")
        assert NASTY in detail, "as text"
        assert page.locator("tr.current").get_attribute("id") == "stretch-3"
        page.keyboard.press("Enter")
        page.wait_for_url("**/explained.html#stretch-3")


def test_every_stretch_has_a_name_and_the_table_its_headers(browser: Any, url: str) -> None:
    with opened(browser) as page:
        page.goto(url)
        assert page.get_by_role("link").count() == 7
        group = page.get_by_role("group", name="The prompt, 2628 tokens in 7 stretches")
        assert group.get_by_role("link", name="5. tokens 2,237 to 2,536: new").count() == 1
        table = page.get_by_role("table", name="The stretches of the prompt")
        assert table.get_by_role("columnheader").count() == 6
        assert table.get_by_role("row").count() == 8
        assert page.fetched == [url], "it needs nothing else"


def test_a_mouse_over_a_stretch_describes_it(browser: Any, url: str) -> None:
    with opened(browser) as page:
        page.goto(url)
        page.get_by_role("link", name="4. ").hover()
        assert not page.locator(".cursor").is_visible()
        assert page.locator(".detail").text_content().startswith("4. tokens 1,196")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_sticks_out(browser: Any, url: str, scheme: str) -> None:
    with opened(browser, viewport=PHONE, color_scheme=scheme, has_touch=True) as page:
        page.goto(url)
        assert fits(page)
        page.get_by_role("link", name="3. ").tap()
        page.locator(".detail", has_text="segment, moved by -539").wait_for()


def contrast(page: Any, selector: str) -> float:
    """WCAG's ratio of an element's text to what is behind it."""
    return float(
        page.evaluate(
            """selector => {
          const rgb = text => text.match(/[0-9.]+/g).map(Number);
          const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
          let at = document.querySelector(selector);
          const ink = light(rgb(getComputedStyle(at).color));
          while (rgb(getComputedStyle(at).backgroundColor)[3] === 0) at = at.parentElement;
          const paper = light(rgb(getComputedStyle(at).backgroundColor));
          return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        }""",
            selector,
        )
    )


def test_text_can_be_read_in_light_and_dark(browser: Any, url: str) -> None:
    papers = []
    for scheme in ("light", "dark"):
        with opened(browser, color_scheme=scheme) as page:
            page.goto(url)
            for selector in ("h1", ".legend li", "td.text", "thead th", ".detail", "footer"):
                assert contrast(page, selector) >= 4.5, (scheme, selector)
            papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert papers[0] != papers[1]
