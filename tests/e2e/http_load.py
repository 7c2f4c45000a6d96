# SPDX-License-Identifier: Apache-2.0
"""Sound requests of every kind, side by side, whose answers are checked (beside `http_fuzz`)."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx

CLIENTS = 2
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


class Load:
    """Clients in threads, from entering until leaving.

    Attributes:
        counts: requests by kind, as they ended well, and "reused" of them.
        findings: what did not.
    """

    def __init__(self, base_url: str, prompts: list[str]) -> None:
        self._base_url = base_url
        self._prompts = prompts
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(CLIENTS)]
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        dice = random.Random(number)
        # No connection is used twice: a huge body beside may occupy the server for seconds, who
        # then takes connections for idle, and closes them before reading what they have sent.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=self._base_url, timeout=120, limits=limits) as client:
            for turn in itertools.count(number):
                if self._end.is_set():
                    return
                kind = KINDS[turn % len(KINDS)]
                prompt = f"Client {number}, turn {turn}. " + dice.choice(self._prompts)
                try:
                    reused = kind(client, prompt)
                except Exception as error:
                    self.findings.append(f"{kind.__name__}: {error!r}")
                else:
                    self.counts[kind.__name__] += 1
                    self.counts["reused"] += reused


def stream(client: httpx.Client, prompt: str) -> bool:
    body = _body(prompt, stream=True, max_tokens=20)
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    return _has_reused(json.loads(lines[-2].removeprefix("data: ")))


def killed_while_streaming(client: httpx.Client, prompt: str) -> bool:
    """A client that goes away behind its first token."""
    body = _body(prompt, stream=True, max_tokens=400, ignore_eos=True)
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert next(response.iter_lines()).startswith("data: {"), response.status_code
    return False


def killed_before_the_first_token(client: httpx.Client, prompt: str) -> bool:
    """A client that goes away without reading anything."""
    url = client.base_url
    body = json.dumps(_body(prompt, max_tokens=400, ignore_eos=True))
    headers = {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection(url.host, url.port)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body, headers)
        time.sleep(0.02)  # most are with the engine by then
    return False


def three_choices(client: httpx.Client, prompt: str) -> bool:
    answer = _ask(client, "/v1/completions", _body(prompt, n=3, temperature=1.0, seed=1))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2], answer
    return _has_reused(answer)


def beam_search(client: httpx.Client, prompt: str) -> bool:
    answer = _ask(client, "/v1/completions", _body(prompt, n=2, use_beam_search=True))
    assert len(answer["choices"]) == 2, answer
    return False


def structured_output(client: httpx.Client, prompt: str) -> bool:
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = _ask(client, "/v1/completions", _body(prompt, max_tokens=10, **choice))
    assert answer["choices"][0]["text"] in ("yes", "no"), answer
    return _has_reused(answer)


def tool(client: httpx.Client, prompt: str) -> bool:
    body = _body(prompt, tools=[TOOL], max_tokens=40, ignore_eos=True)
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    body["tool_choice"] = "auto"
    answer = _ask(client, "/v1/chat/completions", body)
    # A model of random weights never calls it: its schema in the prompt is what is tried here.
    assert answer["usage"]["completion_tokens"] == 40, answer
    return _has_reused(answer)


KINDS: tuple[Callable[[httpx.Client, str], bool], ...] = (
    stream,
    killed_while_streaming,
    three_choices,
    beam_search,
    structured_output,
    tool,
    killed_before_the_first_token,
)
"""Each asks about a prompt, checks the answer, and says whether it reused anything."""


def _body(prompt: str, **options: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return {**body, "extra_keys": ["docs"], **options}


def _ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, (answer.status_code, answer.text[:500])
    return answer.json()


def _has_reused(answer: Any) -> bool:
    report = (answer.get("kv_transfer_params") or {}).get("segreuse") or {}
    return bool(report.get("reused_tokens"))
