# SPDX-License-Identifier: Apache-2.0
"""Fuzz the inference routes of a server with segment reuse, while others use it as they should.

    python -m tests.e2e.http_fuzz --requests 5000 --json http-fuzz.json

Three generators, all of hypothesis: bodies that the server's own OpenAPI description allows or
forbids (schemathesis); sound bodies with anything at all for `extra_keys`, our options and what
vLLM has beside them; and malformed ones (`http_malformed`). Beside them runs the load of
`http_load`, whose answers are checked. No answer may be 5xx, unless vLLM without the plugin gives
it, too; at the end the same processes must run, hold no request and no block, and no more memory
than they did after the first third.

With `--stock` vLLM alone is asked, to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from bench import harness
from bench.shapes import make_model, passages
from tests.e2e.http_bodies import MOST_TOKENS, SOUND, bodies
from tests.e2e.http_load import Load
from tests.e2e.http_malformed import Sent, fixed, malformed
from tests.e2e.server import EVERYTHING, Server

ROUTES = {*SOUND, "/tokenize", "/detokenize"}
ROUTES |= {"/v1/completions/render", "/v1/chat/completions/render"}
"""What is fuzzed from the server's description."""
MALFORMED = ROUTES | {"/invocations"}
"""What gets malformed bodies: it parses them itself."""
LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
"""How bodies name the length of an answer."""
NO_ANSWER = 0
"""Stands for the status where there was none."""
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
        sent: the request.
        why: the status, or the error of the connection.
    """

    sent: Sent
    why: str

    def __str__(self) -> str:
        """What was sent, and what became of it."""
        return f"{self.why}: {self.sent}"


@dataclass
class Outcome:
    """Of a whole run.

    Attributes:
        statuses: number of answers by route and status.
        beside: requests of the load beside it by kind, and how many of them reused anything.
        memory_mb: of the processes that are judged, together, after each part.
        findings: what may not be.
        alone: 5xx that vLLM without the plugin gives, too.
    """

    statuses: dict[str, Counter[int]]
    beside: Counter[str]
    memory_mb: list[float]
    findings: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """All that were sent, those without an answer included."""
        return sum(counts.total() for counts in self.statuses.values())

    @property
    def grown_mb(self) -> float:
        """Memory behind the first third of the run."""
        return self.memory_mb[-1] - self.memory_mb[PARTS // 3 - 1]

    def as_result(self) -> harness.SuiteResult:
        """One row per route; the figures that matter."""
        seen = sorted({status for counts in self.statuses.values() for status in counts})
        rows: list[harness.Row] = [
            {"route": path, "requests": counts.total()}
            | {str(status): counts[status] for status in seen}
            for path, counts in sorted(self.statuses.items())
        ]
        summary: dict[str, float | str] = {
            "requests": self.requests,
            "findings": len(self.findings),
            "same_without_the_plugin": len(self.alone),
            "memory_growth_mb": round(self.grown_mb, 1),
            "requests_beside": self.beside.total() - self.beside["reused"],
            "reused_beside": self.beside["reused"],
        }
        return {"rows": rows, "summary": summary}


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

    @property
    def total(self) -> int:
        """Requests so far."""
        return sum(counts.total() for counts in self.statuses.values())

    def ours(self, requests: int, first_seed: int) -> None:
        """As many sound bodies with odd options."""

        def send(case: tuple[str, dict[str, Any]]) -> None:
            self._send_json(*case)

        _generate(bodies(self._prompts), requests, first_seed, send)

    def fixed(self) -> None:
        """Every fixed malformed body once: none is left to chance, and memory has seen its peak."""
        for sent in fixed():
            self._send(sent)

    def malformed(self, requests: int, first_seed: int) -> None:
        """As many bodies that are no proper requests."""
        _generate(malformed(sorted(MALFORMED)), requests, first_seed, self._send)

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
            body = case.body
            self._send_json(case.path, bounded(case.path, body) if isinstance(body, dict) else body)

        for operation in operations[part::PARTS]:
            for mode in modes:
                with contextlib.suppress(Unsatisfiable):  # nothing could be wrong with it
                    strategy = operation.as_strategy(generation_mode=mode)
                    _generate(strategy, each, first_seed, send)

    def _send_json(self, path: str, body: Any) -> None:
        try:
            content = json.dumps(body).encode()
        except TypeError:
            return  # schemathesis stands for "no body" and for files with objects of its own
        self._send(Sent(path, content))

    def _send(self, sent: Sent) -> None:
        status, failed = ask(self._server, sent)
        self.statuses.setdefault(sent.path, Counter())[status] += 1
        if failed:
            self.failed.append(failed)


def ask(server: Server, sent: Sent) -> tuple[int, Failed | None]:
    """The status of the answer, or `NO_ANSWER`, and what is wrong with that."""
    try:
        answer = server.post(sent.path, content=sent.content, headers=sent.headers)
    except httpx.TransportError as error:
        return NO_ANSWER, Failed(sent, repr(error))
    if answer.status_code >= 500 and answer.status_code != NOT_OFFERED:
        return answer.status_code, Failed(sent, str(answer.status_code))
    return answer.status_code, None


def ours_alone(failed: Sequence[Failed]) -> tuple[list[str], list[str]]:
    """What does not fail if vLLM without the plugin is asked the same, and what does."""
    ours: list[str] = []
    alone: list[str] = []
    if failed:
        with Server(make_model("llama"), EVERYTHING, stock=True) as server:
            for one in failed:
                _, other = ask(server, one.sent)
                (alone if other else ours).append(str(one))
    return ours, alone


def bounded(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The model there is, and few tokens: else most requests would be 404, or take minutes.

    Most routes let an answer fill the context where the body gives no limit, and each reads its
    own name for it in its own place: that of its sound body.
    """
    return _limited({**body, "model": "m"}, SOUND[path]("") if path in SOUND else {})


def _limited(body: dict[str, Any], sound: dict[str, Any]) -> dict[str, Any]:
    limited = {name: sound[name] for name in LIMITS & sound.keys()}
    for name, value in body.items():
        if name in LIMITS and isinstance(value, int | float):
            limited[name] = min(value, MOST_TOKENS)
        elif name == "sampling_params" and isinstance(value, dict):
            limited[name] = _limited(value, sound.get(name, {}))
        elif value is not None or name not in limited:
            limited[name] = value
    return limited


def _generate(
    strategy: st.SearchStrategy[Any], examples: int, first_seed: int, send: Callable[[Any], None]
) -> None:
    if examples < 1:
        return

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
    server: Server, prompts: list[str], requests: int, first_seed: int, *, pool_fills: bool = False
) -> Outcome:
    """Send as many requests: half malformed, an eighth after the description, the rest sound but
    for what they say to us.

    Args:
        pool_fills: the KV cache is so large that its pages are still touched for the first time
            during the run: only the API server's memory is judged.
    """
    watched, one = Watched(server), Fuzz(server, prompts)
    with Load(server.url, prompts) as load:
        one.fixed()
        for part in range(PARTS):
            part_seed = first_seed * PARTS + part
            one.malformed(requests // 2 // PARTS, part_seed)
            one.described(requests // 8 // PARTS, part_seed, part)
            # The others may have had less to say than they were asked for.
            one.ours(requests * (part + 1) // PARTS - one.total, part_seed)
            watched.note()
    memory_mb = [now[0] if pool_fills else sum(now) for now in watched.memory_mb]
    outcome = Outcome(one.statuses, load.counts, memory_mb)
    ours, outcome.alone = ours_alone(one.failed)
    outcome.findings = [*ours, *load.findings, *watched.at_rest(), *growth(memory_mb, requests)]
    return outcome


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
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.http_fuzz")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", action="store_true", help="ask vLLM without the plugin")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write the outcome to")
    options = parser.parse_args()
    where = harness.environment()
    began = time.monotonic()
    flags = (*EVERYTHING, *SMALL_POOL)
    with Server(make_model("llama"), flags, stock=options.stock) as server:
        outcome = fuzz(server, make_prompts(), options.requests, options.seed)
    result = outcome.as_result()
    result["summary"] = {
        "command": f"python -m tests.e2e.http_fuzz {' '.join(sys.argv[1:])}",
        **result["summary"],
        "seconds": round(time.monotonic() - began),
    }
    harness.report("http_fuzz", where, result)
    for line in outcome.alone:
        print(f"vLLM alone fails, too: {line}")
    for line in outcome.findings:
        print(f"FINDING {line}")
    if options.json:
        harness.write_json(options.json, "http_fuzz", where, result)
    return int(bool(outcome.findings))


if __name__ == "__main__":
    sys.exit(main())
