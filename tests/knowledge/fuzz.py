# SPDX-License-Identifier: Apache-2.0
"""Fuzz the administrator's routes from their OpenAPI description.

    python -m tests.knowledge.fuzz [--requests 10000] [--engine] [--json FILE]

Over a socket: the real server on a small model with `--engine`; without it the same routes behind
uvicorn, on an engine without a model. Every request is sent twice: with the token it must not end
in 5xx (but 507: no room), without it in 401 only.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from bench import harness
from bench.shapes import make_model
from segreuse_tools.knowledge.client import KnowledgeClient
from tests.e2e.server import Server
from tests.knowledge.admin_app import TOKEN, send_case
from tests.knowledge.served import served
from vllm_segreuse.features.knowledge.schemas import PREFIX

NO_ROOM = 507


def fuzz(
    client: Any,
    token: str,
    requests: int,
    first_seed: int = 0,
    statuses: Counter[int] | None = None,
) -> Counter[int]:
    """Send at least as many requests, spread over all operations.

    Args:
        statuses: what is returned; whoever passes it sees it in spite of an error, too.

    Returns:
        Number of answers by status; those without the token are counted, too.

    Raises:
        AssertionError: a request ended as it must not.
    """
    admin = {"Authorization": f"Bearer {token}"}
    description = client.get(f"{PREFIX}/openapi.json", headers=admin).json()
    operations = [o.ok() for o in schemathesis.openapi.from_dict(description).get_all_operations()]
    statuses = Counter() if statuses is None else statuses
    strategies = [o.as_strategy(generation_mode=mode) for o in operations for mode in MODES]
    # Some operations have few requests to vary: the others are then given more.
    while (left := requests - statuses.total()) > 0:
        for strategy in strategies:
            each = max(1, left // (2 * len(strategies)))
            _send_all(client, admin, strategy, each, first_seed, statuses)
        first_seed += 1
    return statuses


MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


def _send_all(
    client: Any,
    admin: dict[str, str],
    strategy: Any,
    examples: int,
    first_seed: int,
    statuses: Counter[int],
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
    def send(case: Any) -> None:
        answer = send_case(client, case, admin)
        refused = send_case(client, case, {})
        statuses.update((answer.status_code, refused.status_code))
        assert answer.status_code < 500 or answer.status_code == NO_ROOM, (case, answer.text)
        assert refused.status_code == 401, (case, refused.text)

    with contextlib.suppress(Unsatisfiable):  # it has nothing that could be wrong
        send()


@contextlib.contextmanager
def served_by(engine: bool) -> Iterator[str]:
    """URL of a server whose token is `TOKEN`, with an engine behind it or without."""
    if not engine:
        with served(limit_blocks=500) as server:
            yield server.url
        return
    env = {"VLLM_SEGREUSE_ADMIN_TOKEN": TOKEN}
    args = ["--max-model-len", "2048", "--num-gpu-blocks-override", "1001"]
    with Server(make_model("qwen3"), args, env) as real:
        yield real.url
        assert real.is_healthy(), "the engine died"
        left = KnowledgeClient(real.url, TOKEN).stats().blocks
        assert left.free + left.frozen == left.total, f"blocks leak: {left}"


def main() -> int:
    """Command line; exit status 1 at a finding."""
    parser = argparse.ArgumentParser(description="Fuzz the administrator's routes over a socket.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", action="store_true", help="the real server on a small model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    options = parser.parse_args()
    where, started = harness.environment(), time.monotonic()
    findings = []
    statuses: Counter[int] = Counter()
    try:
        with (
            served_by(options.engine) as url,
            httpx.Client(base_url=url, timeout=300) as client,
        ):
            fuzz(client, TOKEN, options.requests, options.seed, statuses)
    except AssertionError as error:
        findings.append(str(error))
    where["seconds"] = round(time.monotonic() - started, 1)
    print(*(f"{status}: {count}" for status, count in sorted(statuses.items())), sep="\n")
    print(f"requests: {statuses.total()}; findings: {findings}; {where['seconds']:.0f} s")
    if options.json:
        found = result(statuses, findings, options.seed, options.engine)
        harness.write_json(options.json, "kb-fuzz", where, found)
    return int(bool(findings))


def result(
    statuses: Counter[int], findings: list[str], first_seed: int, engine: bool
) -> harness.SuiteResult:
    """Answers by status, half of them to requests without the token; what ended as it must not."""
    return {
        "rows": [{"status": status, "answers": n} for status, n in sorted(statuses.items())],
        "summary": {
            "requests": statuses.total(),
            "findings": len(findings),
            "first_finding": findings[0] if findings else "",
            "seed": first_seed,
            "behind": "the real server" if engine else "no model",
        },
    }


if __name__ == "__main__":
    sys.exit(main())
