# SPDX-License-Identifier: Apache-2.0
"""Fuzz the administrator's routes from their OpenAPI description.

    python -m tests.knowledge.fuzz [--requests 10000] [--url http://HOST:PORT --token TOKEN]

Without a URL the routes run in this process, on an engine without a model. Every request is sent
twice: with the token it must not end in 5xx (but 507: no room), without it in 401 only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from typing import Any

import httpx
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from tests.knowledge.admin_app import TOKEN, admin_app, send_case
from vllm_segreuse.knowledge.schemas import PREFIX

NO_ROOM = 507


def fuzz(client: Any, token: str, requests: int, first_seed: int = 0) -> Counter[int]:
    """Send about as many requests, spread over all operations.

    Returns:
        Number of answers by status; those without the token are counted, too.

    Raises:
        AssertionError: a request ended as it must not.
    """
    admin = {"Authorization": f"Bearer {token}"}
    description = client.get(f"{PREFIX}/openapi.json", headers=admin).json()
    operations = [o.ok() for o in schemathesis.openapi.from_dict(description).get_all_operations()]
    statuses: Counter[int] = Counter()
    each = max(1, requests // (2 * len(operations)))
    for operation in operations:
        strategies = [operation.as_strategy(generation_mode=mode) for mode in MODES]
        for strategy in strategies:
            _send_all(
                client, admin, strategy, max(1, each // len(strategies)), first_seed, statuses
            )
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Fuzz the administrator's routes.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a running server; its knowledge bases are changed")
    parser.add_argument("--token", default=TOKEN)
    options = parser.parse_args()
    client: Any = (
        httpx.Client(base_url=options.url, timeout=300)
        if options.url
        else TestClient(admin_app(), raise_server_exceptions=False)
    )
    with client:
        statuses = fuzz(client, options.token, options.requests, options.seed)
    print(json.dumps({"requests": statuses.total(), "statuses": dict(sorted(statuses.items()))}))


if __name__ == "__main__":
    main()
