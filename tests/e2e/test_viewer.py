# SPDX-License-Identifier: Apache-2.0
"""The viewer of a real server, in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import passages
from segreuse_tools.commands import explain as explain_cli
from tests.browser import chromium, opened
from tests.e2e.server import ADMIN_TOKEN, Server
from tests.reports import Whole

pytestmark = pytest.mark.e2e

UI = "/plugins/segreuse/v1/ui"
DOCUMENTS = [text[:2500] for _, text in passages() if len(text) > 2500][2:4]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server(shared_server: Server) -> Server:
    for document in DOCUMENTS:
        shared_server.post("/v1/completions", completion(document)).raise_for_status()
    return shared_server


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    with opened(browser) as page:
        page.goto(server.url + UI)
        page.get_by_label("Administrator's token").fill(ADMIN_TOKEN)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Requests").wait_for()
        yield page


def completion(prompt: str, **options: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 3, "temperature": 0}
    return {**body, "extra_keys": ["viewed"], **options}


def shuffled(name: str) -> str:
    return f"Of the viewer: {name}. " + "".join(reversed(DOCUMENTS))


def test_a_request_is_listed_and_its_heat_is_what_was_computed_again(
    page: Any, server: Server
) -> None:
    body = completion(shuffled("listed"), vllm_xargs={"segreuse_explain": True})
    answer = server.post("/v1/completions", body).raise_for_status().json()
    report = Whole(answer["kv_transfer_params"]["segreuse"])
    again = [each["recomputed"] for each in report["explain"] if each["source"] == "segment"]
    tokens = sum(length for runs in again for _, length in runs)
    assert 0 < tokens == report["recomputed_tokens"] < report["reused_tokens"]
    page.reload()  # the list does so every three seconds; this request is the latest
    page.locator("tbody tr", has_text="explained").first.get_by_role("link").click()
    page.get_by_role("heading", name=re.compile(r"^Request \d")).wait_for()
    assert page.locator("rect.heat").count() > 3
    assert f"{report['recomputed_tokens']:,} of these computed again" in page.content()
    assert "".join(DOCUMENTS)[:20] not in page.content(), "no text, unless it is asked for"


def test_a_streamed_request_is_listed_too(page: Any, server: Server) -> None:
    first = page.locator("tbody tr").first
    before = int(first.get_by_role("link").text_content())
    server.post("/v1/completions", completion(shuffled("streamed"), stream=True))
    page.locator(f"#request-{before + 1}").wait_for()
    first.get_by_text("finished").wait_for()
    assert "focus" in first.text_content()


def test_a_pasted_request_is_explained_with_its_text(page: Any, server: Server) -> None:
    page.get_by_role("link", name="Explain").click()
    page.get_by_label("Body of a completion").fill(json.dumps(completion(shuffled("pasted"))))
    page.get_by_role("button", name="Explain").click()
    page.get_by_text("would be reused with focus").wait_for()
    assert "Of the viewer: pasted" in page.locator("#stretch-1 .text").text_content()
    assert page.get_by_role("row", name="segment, moved by").count() >= 2
    page.get_by_label("Body of a completion").fill(json.dumps(completion(shuffled("again"))))
    page.get_by_label("Reuse what is found").check()
    page.get_by_role("button", name="Explain").click()
    page.get_by_text("were reused with focus").wait_for()
    assert page.locator("rect.heat").count() > 3


def test_metrics_and_the_switch(page: Any, server: Server) -> None:
    page.get_by_role("link", name="Metrics").click()
    reused = page.locator("dl.tiles div", has_text="requests that reused").locator("dd")
    assert int(reused.text_content().replace(",", "")) > 0
    page.get_by_text("makes no audit").wait_for()
    page.get_by_role("link", name="Status").click()
    try:
        page.locator("summary", has_text="Only observe").click()
        page.get_by_role("button", name="Only observe now").click()
        page.get_by_text("observed only").wait_for()
        status = "/plugins/segreuse/v1/status"
        bearer = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        assert server.get(status, headers=bearer).json()["enabled"] == "observe"
    finally:
        page.locator("summary", has_text="Turn reuse on").click()
        page.get_by_role("button", name="Turn reuse on now").click()
        page.locator("summary", has_text="Turn reuse off").wait_for()


def test_the_command_writes_a_page_that_needs_no_server(
    browser: Any, server: Server, tmp_path: Path
) -> None:
    file, shown = tmp_path / "request.json", tmp_path / "explained.html"
    file.write_text(json.dumps(completion(shuffled("written"))))
    assert explain_cli.main([str(file), "--url", server.url, "--reuse", "--html", str(shown)]) == 0
    with opened(browser, offline=True) as page:
        page.goto(shown.as_uri())
        page.keyboard.press("Tab")
        assert "Of the viewer: written" in page.locator(".detail").text_content()
        assert page.locator("rect.heat").count() > 3
