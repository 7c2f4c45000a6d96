# SPDX-License-Identifier: Apache-2.0
"""Fuzz the inference routes of a server with segment reuse, while others use it as they should.

    python -m tests.e2e.http_fuzz --requests 5000 --log http-fuzz.txt

Two generators, both of hypothesis: bodies that the server's own OpenAPI description allows or
forbids (schemathesis), and sound bodies with anything at all for `extra_keys`, our options and what
vLLM has beside them. Beside them runs the load of `http_load`, whose answers are checked. No answer
may be 5xx, unless vLLM without the plugin gives it, too; at the end the same processes must run,
hold no request and no block, and no more memory than they did after the first third.

With `--stock` vLLM alone is asked, to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from bench.shapes import make_model, passages
from tests.e2e.http_bodies import MOST_TOKENS, SOUND, bodies
from tests.e2e.http_load import Load
from tests.e2e.server import EVERYTHING, Server

ROUTES = {*SOUND, "/tokenize", "/detokenize"}
ROUTES |= {"/v1/completions/render", "/v1/chat/completions/render"}
"""What is fuzzed from the server's description."""
NOT_OFFERED = 501
SMALL_POOL = ("--num-gpu-blocks-override", "1024")
"""So few blocks that all are used before memory is first noted: tables of blocks grow with use."""
PARTS = 6
SLACK_MB = 40.0
SLOPE_MB_PER_1K = 10.0


@dataclass(frozen=True)
class Failed:
    """A request that got no answer, or one that may not be.

    Attributes:
        path: its route.
        text: its body.
        why: the status, or the error of the connection.
    """

    path: str
    text: str
    why: str

    def __str__(self) -> str:
        """What was sent, and what became of it."""
        return f"{self.path} {self.why}: {self.text[:2000]}"


class Fuzz:
    """Sends what is generated, and keeps the books.

    Attributes:
        statuses: number of answers by route and status.
        failed: what may not be.
    """

    def __init__(self, server: Server, prompts: list[str]) -> None:
        self._server = server
        self._prompts = prompts
        self.statuses: dict[str, Counter[int]] = {}
        self.failed: list[Failed] = []

    def ours(self, requests: int, first_seed: int) -> None:
        """As many sound bodies with odd options."""

        def send(case: tuple[str, dict[str, Any]]) -> None:
            self._send(*case)

        _generate(bodies(self._prompts), requests, first_seed, send)

    def described(self, requests: int, first_seed: int, part: int) -> None:
        """About as many bodies after the server's description of `ROUTES`, a share of these in
        each of `PARTS` parts."""
        description = self._server.get("/openapi.json").json()
        found = [
            one.ok() for one in schemathesis.openapi.from_dict(description).get_all_operations()
        ]
        operations = [o for o in found if o.path in ROUTES and o.method.upper() == "POST"]
        assert {o.path for o in operations} >= SOUND.keys(), operations
        modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
        each = requests * PARTS // (len(operations) * len(modes))
        if not each:  # so few requests: one of every operation, in either mode by turns
            each, modes = 1, modes[part % 2 :][:1]

        def send(case: Any) -> None:
            self._send(case.path, _bounded(case.body) if isinstance(case.body, dict) else case.body)

        for operation in operations[part::PARTS]:
            for mode in modes:
                with contextlib.suppress(Unsatisfiable):  # nothing could be wrong with it
                    strategy = operation.as_strategy(generation_mode=mode)
                    _generate(strategy, each, first_seed, send)

    def _send(self, path: str, body: Any) -> None:
        try:
            text = json.dumps(body)
        except TypeError:
            return  # schemathesis stands for "no body" and for files with objects of its own
        status, failed = ask(self._server, path, text)
        self.statuses.setdefault(path, Counter())[status] += 1
        if failed:
            self.failed.append(failed)


def ask(server: Server, path: str, text: str) -> tuple[int, Failed | None]:
    """The status of the answer (0: there was none), and what is wrong with that."""
    headers = {"Content-Type": "application/json"}
    try:
        status = server.post(path, content=text, headers=headers).status_code
    except httpx.TransportError as error:
        return 0, Failed(path, text, repr(error))
    if status >= 500 and status != NOT_OFFERED:
        return status, Failed(path, text, str(status))
    return status, None


def ours_alone(failed: Sequence[Failed], say: Callable[[str], None]) -> list[str]:
    """What does not fail if vLLM without the plugin is asked the same."""
    if not failed:
        return []
    found = []
    with Server(make_model("llama"), EVERYTHING, stock=True) as server:
        for one in failed:
            _, other = ask(server, one.path, one.text)
            if other:
                say(f"  vLLM alone fails, too: {other}")
            else:
                found.append(str(one))
    return found


def _bounded(body: dict[str, Any]) -> dict[str, Any]:
    """The model there is, and few tokens: else most requests would be 404, or take minutes."""
    body = dict(body, model="m")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], MOST_TOKENS)
    return body


def _generate(
    strategy: st.SearchStrategy[Any], examples: int, first_seed: int, send: Callable[[Any], None]
) -> None:
    @seed(first_seed)
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
        database=None,
    )
    @given(case=strategy)
    def each(case: Any) -> None:
        send(case)

    each()


class Watched:
    """The server's processes: that they stay the same, come to rest, and do not grow."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._pids = self.pids()
        self.memory_mb: list[list[float]] = []

    def pids(self) -> list[int]:
        """Of the server and of all that it started."""
        found = [self._server.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    def note(self) -> None:
        """Memory at this moment that no file backs, by process."""
        now = []
        for pid in self._pids:
            status = Path(f"/proc/{pid}/status").read_text()
            now.append(int(status.partition("RssAnon:")[2].split()[0]) / 1024)
        self.memory_mb.append(now)

    def at_rest(self) -> list[str]:
        """What is not as it should be once all requests have ended."""
        wrong = []
        if not self._server.is_healthy():
            wrong.append("the server is not healthy")
        if self.pids() != self._pids:
            wrong.append(f"processes were {self._pids} and are {self.pids()}")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            if left := self._settled(f"vllm:{name}{{"):
                wrong.append(f"{name} is {left} though nobody waits for an answer")
        if "segment reuse failed" in self._server.log_text():
            wrong.append("an error of ours was contained; see the server's log")
        return wrong

    def _settled(self, name: str) -> float:
        """A gauge once it is 0, or what it was after a while."""
        for _ in range(40):
            # Gauges are set by steps of the engine: there must be one behind the last abort.
            self._server.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})
            lines = self._server.get("/metrics").text.splitlines()
            value = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
            if not value:
                break
            time.sleep(0.25)
        return value


def fuzz(
    server: Server, prompts: list[str], requests: int, first_seed: int, say: Callable[[str], None]
) -> list[str]:
    """Send about as many requests, a quarter after the description; returns the findings."""
    watched, one = Watched(server), Fuzz(server, prompts)
    with Load(server.url, prompts) as load:
        for part in range(PARTS):
            one.ours(requests * 3 // 4 // PARTS, first_seed + part)
            one.described(requests // 4 // PARTS, first_seed + part, part)
            watched.note()
    findings = load.findings + watched.at_rest()
    for path, statuses in sorted(one.statuses.items()):
        say(f"  {path:28} {statuses.total():6} {dict(sorted(statuses.items()))}")
    say(f"  beside them: {dict(sorted(load.counts.items()))}")
    memory_mb = [sum(now) for now in watched.memory_mb]
    say(f"  memory after each part, MB: {', '.join(f'{mb:.0f}' for mb in memory_mb)}")
    by_process = zip(watched.memory_mb[PARTS // 3 - 1], watched.memory_mb[-1], strict=True)
    grown = ", ".join(f"{last - first:.1f}" for first, last in by_process)
    say(f"  grown behind the first third, MB, by process: {grown}")
    return ours_alone(one.failed, say) + findings + growth(memory_mb, requests)


def growth(memory_mb: list[float], requests: int) -> list[str]:
    """A finding if memory grew behind the first third by more than allocators keep."""
    grown = memory_mb[-1] - memory_mb[PARTS // 3 - 1]
    allowed = SLACK_MB + SLOPE_MB_PER_1K * requests / 1000
    return [f"memory grew by {grown:.0f} MB, allowed {allowed:.0f}"] if grown > allowed else []


def make_prompts() -> list[str]:
    """Documents to be reused, whole, in any order, and too short ones."""
    one, two = [text[:1500] for _, text in passages() if len(text) > 1500][:2]
    return [one, two, one + two, "And " + two + one, "Short.", ""]


def main() -> int:
    """Command line; exit status 1 at a finding."""
    import vllm

    import vllm_segreuse

    parser = argparse.ArgumentParser(prog="python -m tests.e2e.http_fuzz")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", action="store_true", help="ask vLLM without the plugin")
    parser.add_argument("--log", type=Path, help="file to write what is printed to, as well")
    options = parser.parse_args()
    log = options.log.open("w") if options.log else None

    def say(line: str) -> None:
        print(line, flush=True)
        if log is not None:
            print(line, file=log, flush=True)

    versions = f"vllm-segreuse {vllm_segreuse.__version__}, vLLM {vllm.__version__}"
    say(f"{versions}, {platform.platform()}")
    say(f"python -m tests.e2e.http_fuzz {' '.join(sys.argv[1:])}")
    began = time.monotonic()
    flags = (*EVERYTHING, *SMALL_POOL)
    with Server(make_model("llama"), flags, stock=options.stock) as server:
        findings = fuzz(server, make_prompts(), options.requests, options.seed, say)
    for finding in findings:
        say(f"FINDING {finding}")
    say(f"findings: {len(findings)}; {time.monotonic() - began:.0f} s")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
