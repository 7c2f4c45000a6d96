# SPDX-License-Identifier: Apache-2.0
"""The viewer in a real browser, on an engine without a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from segreuse_extras.viewer.sessions import COOKIE
from tests.browser import PHONE, chromium, fits, opened
from tests.explain.reports import NASTY, REPORT
from tests.knowledge.admin_app import TOKEN
from tests.viewer.served import BEARER, BODY, UI, handle, served, viewer_app
from vllm_segreuse.features.knowledge.schemas import PREFIX

PAGES = (
    "requests",
    "requests/1",
    "explain",
    "knowledge",
    "knowledge/handbook",
    "metrics",
    "status",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return viewer_app()


@pytest.fixture(scope="module")
def url(app: FastAPI) -> Iterator[str]:
    with served(app) as address:
        handle(app.state.admin.state.recent, "cmpl-explained")
        with httpx.Client(base_url=address + PREFIX, headers=BEARER) as client:
            client.post("/knowledge-bases", json={"name": "handbook"}).raise_for_status()
            document = {"id": "guide/a.md", "token_ids": [*range(5, 25)]}
            body = {"documents": [document], "wait": True}
            client.post("/knowledge-bases/handbook/documents", json=body).raise_for_status()
        yield address + UI


@contextmanager
def known(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page with a session."""
    with opened(browser, **options) as page:
        page.goto(url)
        page.get_by_label("Administrator's token").fill(TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_url("**/requests")
        yield page


def test_the_token_opens_the_pages_and_is_in_no_url(browser: Any, url: str) -> None:
    with opened(browser) as page:
        page.goto(url + "/status")
        page.locator("#token:focus").wait_for()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").wait_for()
        page.locator("#token:focus").wait_for()
        page.keyboard.type(TOKEN)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Requests").wait_for()
        [cookie] = page.context.cookies()
        assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"]) == (COOKIE, True, "Strict")
        assert page.evaluate("document.cookie") == "", "scripts do not see it"
        assert not [seen for seen in page.fetched if TOKEN in seen]
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("Administrator's token").wait_for()
        assert page.context.cookies() == []


def test_all_comes_from_this_server(browser: Any, url: str) -> None:
    with known(browser, url) as page:
        for name in PAGES:
            page.goto(f"{url}/{name}")
        assert {seen.split("/ui")[0] + "/ui" for seen in page.fetched} == {url}


def test_what_the_policy_forbids_is_not_done(browser: Any, url: str) -> None:
    """`opened` fails on errors in the console; here is one that is there on purpose."""
    with known(browser, url) as page:
        forbidden = "Content Security Policy"
        with page.expect_console_message(lambda line: forbidden in line.text):
            page.evaluate(
                "document.body.insertAdjacentHTML('beforeend', '<p style=\"color:red\">x</p>')"
            )
        assert any(forbidden in text for text in page.wrong)
        page.wrong.clear()


def test_requests_appear_by_themselves(browser: Any, url: str, app: FastAPI) -> None:
    with known(browser, url) as page:
        rows = page.locator("tbody tr")
        before = rows.count()
        page.get_by_role("link", name="1", exact=True).focus()
        handle(app.state.admin.state.recent, "cmpl-later")
        rows.nth(before).wait_for()
        assert page.evaluate("document.activeElement.id") == "request-1", "the focus stays"
        page.get_by_label("Update every 3 seconds").uncheck()
        handle(app.state.admin.state.recent, "cmpl-unseen")
        page.wait_for_timeout(3500)
        assert rows.count() == before + 1


def test_an_explained_request_has_its_strip(browser: Any, url: str) -> None:
    with known(browser, url) as page:
        with page.expect_navigation():  # until its scripts have run
            page.get_by_role("link", name="1", exact=True).click()
        page.get_by_role("heading", name="Request 1").wait_for()
        page.get_by_role("link", name="3. tokens 645 to 1,195").focus()
        page.keyboard.press("ArrowRight")
        detail = page.locator(".detail").text_content()
        assert detail.startswith("4. tokens 1,196 to 2,236: segment, in its place, 0% computed")
        assert page.locator("rect.heat").count() > 5


def test_a_pasted_request_is_explained(browser: Any, url: str) -> None:
    with known(browser, url) as page:
        page.goto(url + "/explain")
        page.get_by_label("Body of a completion").fill("{}")
        page.get_by_role("button", name="Explain").click()
        assert "either messages" in page.get_by_role("alert").text_content()
        page.get_by_label("Body of a completion").fill(BODY)
        page.get_by_role("button", name="Explain").click()
        page.get_by_text("is not known: the request was only observed").wait_for()
        page.get_by_label("Reuse what is found").check()
        page.get_by_role("button", name="Explain").click()
        page.get_by_text("computed again: some, more").wait_for()
        assert page.get_by_label("Body of a completion").input_value() == BODY
        assert NASTY in page.locator("#stretch-3 .text").text_content(), "as text"


def test_documents_of_a_knowledge_base_have_their_state(browser: Any, url: str) -> None:
    with known(browser, url) as page:
        page.get_by_role("link", name="Knowledge bases").click()
        page.get_by_role("link", name="handbook").click()
        row = page.get_by_role("row", name="guide/a.md")
        assert "warm" in row.text_content()


def test_the_switch_wants_to_be_confirmed_and_keys_suffice(
    browser: Any, url: str, app: FastAPI
) -> None:
    engine = app.state.admin.state.engine_client
    with known(browser, url) as page:
        page.goto(url + "/status")
        assert not page.get_by_role("button", name="Turn reuse off now").is_visible()
        page.locator("summary", has_text="Turn reuse off").focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert engine.enabled is True
        assert page.evaluate("document.activeElement.textContent") == "Turn reuse off now"
        page.keyboard.press("Enter")
        page.locator("summary", has_text="Turn reuse on").wait_for()
        assert engine.enabled is False
        page.locator("summary", has_text="Turn reuse on").click()
        page.get_by_role("button", name="Turn reuse on now").click()
        page.locator("summary", has_text="Turn reuse off").wait_for()
        assert engine.enabled is True


def test_keys_reach_everything_and_the_focus_is_seen(browser: Any, url: str) -> None:
    with known(browser, url) as page:
        page.goto(url + "/status")
        names = []
        for _ in range(9):
            page.keyboard.press("Tab")
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.evaluate(outline) == "solid"
            names.append(page.evaluate("document.activeElement.textContent.trim()"))
        tabs = ["Requests", "Explain", "Knowledge bases", "Metrics", "Status"]
        assert names == ["To the content", *tabs, "Log out", "Only observe", "Turn reuse off"]
        assert page.get_by_role("link", name="Status").get_attribute("aria-current") == "page"


@pytest.mark.parametrize("width", [PHONE["width"], 700, 960])
def test_nothing_sticks_out(browser: Any, url: str, app: FastAPI, width: int) -> None:
    bypassed = REPORT | {"bypass_reason": "prefix_cache_skipped", "reused_tokens": 0}
    handle(app.state.admin.state.recent, "cmpl-bypassed", bypassed)
    with known(browser, url, viewport={"width": width, "height": 800}) as page:
        for name in PAGES:
            page.goto(f"{url}/{name}")
            assert fits(page), name


def test_without_scripts_it_works_too(browser: Any, url: str) -> None:
    with known(browser, url, java_script_enabled=False) as page:
        page.get_by_role("link", name="1", exact=True).click()
        page.get_by_role("link", name="3. tokens 645").click()
        page.wait_for_url("**/requests/1#stretch-3")
