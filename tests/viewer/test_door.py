# SPDX-License-Identifier: Apache-2.0
"""Pages want the token or a session; forms want to be ours; every answer has strict headers."""

import re
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Counter, Histogram
from vllm.v1.metrics import prometheus

from segreuse_extras.viewer.sessions import COOKIE
from tests.explain.reports import REPORT
from tests.knowledge.admin_app import TOKEN
from tests.viewer.served import BEARER, BODY, UI, handle, viewer_app

PAGES = ("requests", "explain", "knowledge", "metrics", "status")
HTML = {"Accept": "text/html,application/xhtml+xml"}


@pytest.fixture
def app() -> FastAPI:
    return viewer_app()


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, follow_redirects=False) as client:
        yield client


@pytest.fixture
def known(client: TestClient) -> TestClient:
    """A browser with a session."""
    assert client.post(f"{UI}/login", data={"token": TOKEN}).status_code == 303
    return client


def form_key(client: TestClient) -> str:
    found = re.search(r'name="form_key" value="(\w+)"', client.get(f"{UI}/status").text)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("page", ["", "/", *(f"/{page}" for page in PAGES), "/nothing"])
def test_who_is_not_known_gets_a_form_or_an_error(client: TestClient, page: str) -> None:
    asked = client.get(UI + page, headers=HTML)
    assert asked.status_code == 401
    assert "<form" in asked.text
    assert 'type="password"' in asked.text
    program = client.get(UI + page)
    assert (program.status_code, program.json()["error"]["type"]) == (401, "unauthorized")
    wrong = client.get(UI + page, headers=HTML | {"Authorization": "Bearer wrong"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (403, "forbidden")


@pytest.mark.parametrize("path", ["viewer.css", "viewer.js", "live.js", "pages.css"])
def test_files_want_a_session_too(client: TestClient, path: str) -> None:
    assert client.get(f"{UI}/static/{path}").status_code == 401
    assert client.get(f"{UI}/static/{path}", headers=BEARER).status_code == 200


def test_files_have_their_type_and_are_asked_for_anew(known: TestClient) -> None:
    for name, kind in (("viewer.css", "text/css"), ("live.js", "text/javascript")):
        answer = known.get(f"{UI}/static/{name}")
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
    assert known.get(f"{UI}/requests").headers["cache-control"] == "no-store"


def test_only_files_of_pages_are_served(known: TestClient) -> None:
    for path in ("nothing.css", "../templates/base.html", "..%2Fsessions.py", "x.py"):
        assert known.get(f"{UI}/static/{path}").status_code == 404


def test_the_cookie_is_for_the_pages_only(client: TestClient) -> None:
    answer = client.post(f"{UI}/login", data={"token": TOKEN})
    assert answer.status_code == 303
    assert answer.headers["location"] == f"{UI}/requests"
    # Eight hours.
    parts = set(answer.headers["set-cookie"].lower().split("; "))
    assert {"httponly", "samesite=strict", f"path={UI}", "max-age=28800"} <= parts
    assert "secure" not in parts
    assert TOKEN not in answer.headers["set-cookie"]
    cookie = {"Cookie": f"{COOKIE}={client.cookies[COOKIE]}"}
    for path in ("status", "knowledge-bases", "openapi.json", "uix"):
        assert client.get(f"/plugins/segreuse/v1/{path}", headers=cookie).status_code == 401
    assert client.get(f"{UI}/requests").status_code == 200


def test_over_https_the_cookie_is_for_https_only(app: FastAPI) -> None:
    with TestClient(app, "https://server", follow_redirects=False) as client:
        answer = client.post(f"{UI}/login", data={"token": TOKEN})
    assert "secure" in answer.headers["set-cookie"].lower()


def test_behind_a_proxy_with_a_path_links_and_cookie_have_it(app: FastAPI) -> None:
    with TestClient(app, root_path="/llm", follow_redirects=False) as client:
        answer = client.post(f"/llm{UI}/login", data={"token": TOKEN})
        assert answer.headers["location"] == f"/llm{UI}/requests"
        assert f"path=/llm{UI}" in answer.headers["set-cookie"].lower()
        shown = client.get(f"/llm{UI}/requests")
        assert shown.status_code == 200
        assert f'href="/llm{UI}/static/viewer.css"' in shown.text


def test_spaces_around_the_token_do_not_matter(client: TestClient) -> None:
    assert client.post(f"{UI}/login", data={"token": f"\t{TOKEN} \n"}).status_code == 303


@pytest.mark.parametrize("token", ["wrong", "", TOKEN + "x"])
def test_a_wrong_token_opens_nothing(client: TestClient, token: str) -> None:
    answer = client.post(f"{UI}/login", data={"token": token})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    assert 'role="alert"' in answer.text
    assert client.get(f"{UI}/requests").status_code == 401


def test_the_token_is_not_taken_from_a_url(client: TestClient) -> None:
    assert client.get(f"{UI}/requests", params={"token": TOKEN}).status_code == 401
    assert client.get(f"{UI}/login", params={"token": TOKEN}).status_code == 401
    assert client.post(f"{UI}/login", params={"token": TOKEN}).status_code == 403


def test_who_is_not_known_cannot_send_much(client: TestClient) -> None:
    for count, status in ((4096, 403), (4097, 413)):
        content = b"token=".ljust(count, b"x")
        assert client.post(f"{UI}/login", content=content).status_code == status


@pytest.mark.parametrize("cookie", ["", "x", "1.2.3", "9999999999.aa.bb", "é"])
def test_a_forged_cookie_opens_nothing(client: TestClient, cookie: str) -> None:
    headers = {"Cookie": f"{COOKIE}={cookie}".encode()}
    assert client.get(f"{UI}/status", headers=headers).status_code == 401


def test_logging_out_ends_the_session_in_the_browser(known: TestClient) -> None:
    key = form_key(known)
    answer = known.post(f"{UI}/logout", data={"form_key": key})
    assert answer.status_code == 303
    assert "max-age=0" in answer.headers["set-cookie"].lower()
    assert known.get(f"{UI}/requests").status_code == 401


@pytest.mark.parametrize(
    ("path", "fields"), [("switch", {"to": "off"}), ("explain", {"body": BODY}), ("logout", {})]
)
def test_a_form_of_another_site_does_nothing(
    known: TestClient, app: FastAPI, path: str, fields: dict[str, str]
) -> None:
    for key in ({}, {"form_key": ""}, {"form_key": "0" * 64}):
        answer = known.post(f"{UI}/{path}", data=fields | key)
        assert answer.status_code == 403
        assert "not of your session" in answer.text
    sent = {"form_key": form_key(known)} | fields
    elsewhere = known.post(f"{UI}/{path}", data=sent, headers={"Sec-Fetch-Site": "same-site"})
    assert elsewhere.status_code == 401
    assert app.state.admin.state.engine_client.enabled is True
    assert app.state.sent == []
    assert known.post(f"{UI}/{path}", data=sent).status_code in (200, 303)


def test_the_switch_has_three_positions(known: TestClient, app: FastAPI) -> None:
    key = form_key(known)
    for name, value in (("off", False), ("observe", "observe"), ("on", True)):
        assert known.post(f"{UI}/switch", data={"to": name, "form_key": key}).status_code == 303
        assert app.state.admin.state.engine_client.enabled == value
        assert f"switch-{name}" in known.get(f"{UI}/status").text
    assert known.post(f"{UI}/switch", data={"to": "x", "form_key": key}).status_code == 400
    assert known.get(f"{UI}/switch").status_code == 405


def test_programs_may_come_with_the_token(client: TestClient, app: FastAPI) -> None:
    assert client.get(f"{UI}/requests", headers=BEARER).status_code == 200
    assert client.post(f"{UI}/switch", data={"to": "off"}, headers=BEARER).status_code == 303
    assert app.state.admin.state.engine_client.enabled is False


def test_every_answer_has_strict_headers(known: TestClient) -> None:
    answers = [known.get(f"{UI}/{page}") for page in (*PAGES, "nothing", "static/viewer.js", "")]
    known.cookies.clear()
    answers += [known.get(UI, headers=HTML), known.post(f"{UI}/login", data={"token": "x"})]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] in ("no-store", "no-cache")
        assert not re.search(r'\s(?:style|on\w+)="', answer.text), "the policy forbids them"


def test_errors_are_pages(known: TestClient) -> None:
    wrong = {"nothing": 404, "requests/99": 404, "requests/abc": 400, "knowledge/none": 404}
    for path, status in wrong.items():
        answer = known.get(f"{UI}/{path}")
        assert answer.status_code == status
        assert '<p class="error" role="alert">' in answer.text


def test_without_the_option_no_text_is_shown(known: TestClient, app: FastAPI) -> None:
    handle(app.state.admin.state.recent, "one")
    assert "text of 0 and more" not in known.get(f"{UI}/requests/1").text


def test_with_the_option_texts_begin_the_stretches() -> None:
    app = viewer_app(keeps_text=True)
    with TestClient(app) as client:
        handle(app.state.admin.state.recent, "one")
        shown = client.get(f"{UI}/requests/1", headers=BEARER).text
        assert "text of 645 and more" in shown
        assert "text of 2627 and more" in shown


def test_texts_are_the_beginnings_of_stretches() -> None:
    app = viewer_app(keeps_text=True)
    with TestClient(app) as client:
        handle(app.state.admin.state.recent, "one")
        engine = app.state.admin.state.engine_client
        decoded: list[list[int]] = []
        engine.tokenizer.decode = lambda ids: decoded.append(ids) or ""
        client.get(f"{UI}/requests/1", headers=BEARER)
        expected = [(0, 24), (640, 5), (645, 24), (1196, 24), (2237, 24), (2537, 24), (2627, 1)]
        assert decoded == [[*range(start, start + count)] for start, count in expected]
        engine.tokenizer = None
        assert client.get(f"{UI}/requests/1", headers=BEARER).status_code == 200


def test_a_request_that_was_not_explained_has_its_report(known: TestClient, app: FastAPI) -> None:
    recent = app.state.admin.state.recent
    plain = {name: it for name, it in REPORT.items() if name != "explain"}
    seen = handle(recent, "cmpl-plain", plain)
    seen.began_s, seen.total_s, seen.first_token_s = 1_700_000_000.9, 1.234, 0.4321
    shown = known.get(f"{UI}/requests/1").text
    assert "cmpl-plain, began 11-14 22:13:20 UTC, finished after 1.23 s." in shown
    assert "1,682 of 2,628 tokens (64%) were reused with focus" in shown
    assert "This request was not explained." in shown
    assert "<dt>recomputed_tokens</dt><dd>178</dd>" in shown
    listed = known.get(f"{UI}/requests").text
    for cell in ("11-14 22:13:20", "2,628", "1,682", "31%", "1.25", "432 ms"):
        assert f">{cell}</td>" in listed
    seen.report = None
    assert "were reused" not in known.get(f"{UI}/requests/1").text
    assert "it has no report" in known.get(f"{UI}/requests").text


def test_an_id_that_is_half_a_character_breaks_no_page(known: TestClient, app: FastAPI) -> None:
    """JSON may hold one, and vLLM takes it as the id of a request."""
    handle(app.state.admin.state.recent, "a\ud800b")
    shown = known.get(f"{UI}/requests/1")
    assert shown.status_code == 200
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert "a?b, began" in shown.text


def test_a_hundred_knowledge_bases_are_on_a_page(known: TestClient) -> None:
    admin = UI.removesuffix("/ui")
    for number in range(101):
        body = {"name": f"base-{number:03}"}
        made = known.post(f"{admin}/knowledge-bases", json=body, headers=BEARER)
        assert made.status_code == 201, made.text
    first = known.get(f"{UI}/knowledge").text
    assert "base-099" in first
    assert "base-100" not in first
    after = re.search(r'href="(\?after=[^"]+)"', first)
    assert after is not None
    second = known.get(f"{UI}/knowledge{after[1]}").text
    assert "base-100" in second
    assert "base-099" not in second
    assert "?after=" not in second


def test_with_several_api_servers_pages_say_what_they_show() -> None:
    app = viewer_app(servers=3)
    with TestClient(app) as client:
        assert "3 share the port" in client.get(f"{UI}/requests", headers=BEARER).text
        assert "3; this page is from process" in client.get(f"{UI}/status", headers=BEARER).text


def test_a_pasted_request_goes_in_as_a_clients_would(known: TestClient, app: FastAPI) -> None:
    key = form_key(known)
    sent = {"form_key": key, "body": BODY, "api_key": "client's"}
    shown = known.post(f"{UI}/explain", data=sent)
    assert "would be reused" in shown.text
    [(headers, body)] = app.state.sent
    assert headers["authorization"] == "Bearer client's"
    assert "cookie" not in headers
    assert body["vllm_xargs"] == {"segreuse_explain": True, "segreuse_observe": True}
    assert body["max_tokens"] == 1
    assert "client's" not in shown.text.replace("&#39;", "'")
    known.post(f"{UI}/explain", data={"form_key": key, "body": BODY, "reuse": "on"})
    reusing = {"segreuse_explain": True, "segreuse_observe": False}
    assert app.state.sent[1][1]["vllm_xargs"] == reusing
    assert "authorization" not in app.state.sent[1][0]


@pytest.mark.parametrize(
    ("body", "message"),
    [("{", "is no JSON"), ('{"prompt": "x"}', "no extra_keys"), ("", "is no JSON")],
)
def test_a_bad_body_is_shown_again_with_what_is_wrong(
    known: TestClient, body: str, message: str
) -> None:
    answer = known.post(f"{UI}/explain", data={"form_key": form_key(known), "body": body})
    assert answer.status_code == 400
    assert message in answer.text
    assert "<textarea" in answer.text


def test_what_the_server_refuses_is_shown_escaped(known: TestClient) -> None:
    body = BODY.replace("a prompt", "refused")
    answer = known.post(f"{UI}/explain", data={"form_key": form_key(known), "body": body})
    assert answer.status_code == 400
    assert "no &lt;model&gt; m" in answer.text


def test_the_audits_curve_is_shown_once_there_is_one(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    monkeypatch.setattr(prometheus, "get_prometheus_registry", lambda: registry)
    Counter("vllm:segreuse_audit_log_errors_total", "Errors.", registry=registry).inc(12345678)
    kl = Histogram("vllm:segreuse_audit_kl", "KL.", ["policy"], registry=registry)
    shown = client.get(f"{UI}/metrics", headers=BEARER).text
    assert "makes no audit" in shown
    assert ">12,345,678</td>" in shown
    kl.labels("focus").observe(0.02)
    shown = client.get(f"{UI}/metrics", headers=BEARER).text
    assert "makes no audit" not in shown
    assert 'aria-label="vllm:segreuse_audit_kl policy focus"' in shown
    assert "1 observation, mean 0.02" in shown


def test_without_knowledge_bases_their_page_says_why(known: TestClient, app: FastAPI) -> None:
    app.state.admin.state.service = None
    answer = known.get(f"{UI}/knowledge")
    assert answer.status_code == 503
    assert "one API server" in answer.text
