# SPDX-License-Identifier: Apache-2.0
"""A session's cookie is signed, ends, and is of one token; other sites send nothing."""

import hmac

import pytest
from starlette.datastructures import Headers

from segreuse_extras.viewer.sessions import LIFETIME_S, Sessions, is_foreign

SESSIONS = Sessions("tökén")
NOW = 1_700_000_000.5


def test_only_the_token_opens() -> None:
    assert SESSIONS.opens("tökén")
    for wrong in ("", "token", "tökén ", "\ud800", "x" * 10_000):
        assert not SESSIONS.opens(wrong)


def test_a_session_ends() -> None:
    cookie = SESSIONS.begin(NOW)
    assert SESSIONS.is_alive(cookie, NOW)
    assert SESSIONS.is_alive(cookie, NOW + LIFETIME_S - 1)
    assert not SESSIONS.is_alive(cookie, NOW + LIFETIME_S)


def test_every_api_server_of_the_token_accepts_it_and_no_other() -> None:
    cookie = SESSIONS.begin(NOW)
    assert Sessions("tökén").is_alive(cookie, NOW)
    assert not Sessions("token").is_alive(cookie, NOW)
    assert cookie != SESSIONS.begin(NOW)
    assert "tökén" not in cookie


@pytest.mark.parametrize("at", range(3))
def test_no_part_of_it_can_be_changed(at: int) -> None:
    parts = SESSIONS.begin(NOW).split(".")
    for wrong in ("", "0", str(int(NOW) + 2 * LIFETIME_S), parts[at][:-1], parts[at] + "0", "é"):
        changed = ".".join([*parts[:at], wrong, *parts[at + 1 :]])
        assert not SESSIONS.is_alive(changed, NOW)
    assert not SESSIONS.is_alive("", NOW)


def test_a_form_key_is_of_one_session() -> None:
    one, other = SESSIONS.begin(NOW), SESSIONS.begin(NOW)
    assert SESSIONS.is_form_key(one, SESSIONS.form_key(one))
    for wrong in (SESSIONS.form_key(other), "", one, one.rpartition(".")[2], "\ud800"):
        assert not SESSIONS.is_form_key(one, wrong)


def test_everything_secret_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cookie, key = SESSIONS.begin(NOW), SESSIONS.form_key("c")
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert SESSIONS.opens("tökén")
    assert SESSIONS.is_alive(cookie, NOW)
    assert SESSIONS.is_form_key("c", key)
    assert len(compared) == 3


@pytest.mark.parametrize(
    ("method", "headers", "foreign"),
    [
        ("GET", {}, False),
        ("POST", {}, False),  # no browser
        ("POST", {"sec-fetch-site": "same-origin"}, False),
        ("GET", {"sec-fetch-site": "none"}, False),
        ("POST", {"sec-fetch-site": "same-site"}, True),  # another port of this host
        ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, True),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, True),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"}, False),
        ("POST", {"origin": "http://host:8000", "host": "host:8000"}, False),
        ("POST", {"origin": "https://host", "host": "host"}, False),
        ("POST", {"origin": "http://host:3000", "host": "host:8000"}, True),
        ("POST", {"origin": "http://[", "host": "host:8000"}, True),
        ("POST", {"origin": "", "host": ""}, True),
        ("POST", {"origin": "null", "host": "host:8000"}, True),
    ],
)
def test_what_other_sites_send_is_foreign(
    method: str, headers: dict[str, str], foreign: bool
) -> None:
    assert is_foreign(method, Headers(headers)) is foreign
