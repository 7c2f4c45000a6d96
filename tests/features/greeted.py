# SPDX-License-Identifier: Apache-2.0
"""Shows what a server with the feature of `toys/` does: `python -m tests.features.greeted TOYS`."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_segreuse import features

sys.path.append(sys.argv[1])
features.FEATURES = (*features.FEATURES, "toy")

from fastapi.testclient import TestClient  # noqa: E402
from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402

from tests.knowledge import admin_app  # noqa: E402
from tests.test_metrics import prom_metrics  # noqa: E402
from tests.test_scheduler import OPTIONS, PROMPT, World  # noqa: E402
from vllm_segreuse.config import SegReuseConfig  # noqa: E402
from vllm_segreuse.features.knowledge.schemas import PREFIX  # noqa: E402
from vllm_segreuse.options.parsing import RequestError, parse_request  # noqa: E402
from vllm_segreuse.options.server import ConfigError  # noqa: E402


def greeted() -> dict[str, Any]:
    """Everything that there is to see of it."""
    world = World(toy_greetings=2)
    asking = {**OPTIONS, "segreuse_toy": True}
    reports = []
    for asked in (asking, OPTIONS, asking, asking):
        request = world.add(PROMPT, asked)
        world.run(request)
        reports.append(world.report(request))
    return {
        **options(),
        "greetings": [report.get("greeting") for report in reports],
        "exposed": exposed(world.stats.data),
        **route(world.side),
        "tables": tables(),
    }


def options() -> dict[str, Any]:
    """What the server, and a request, may say."""
    plain, always = SegReuseConfig(), SegReuseConfig(toy=True)
    given = {"extra_keys": "a", "segreuse_toy": 1}
    return {
        "server": {
            "default": plain.toy_greetings,
            "given": SegReuseConfig.from_options({"toy_greetings": 2}).toy_greetings,
        },
        "refused": refused(lambda: SegReuseConfig.from_options({"toy_greetings": 101})),
        "request": {
            "default": parse_request({"extra_keys": "a"}, plain).options.toy,
            "given": parse_request(given, plain).options.toy,
            "of_server": parse_request({"extra_keys": "a"}, always).options.toy,
        },
        "unknown": refused(lambda: parse_request({"segreuse_toys": 1}, plain)),
    }


def refused(ask: Any) -> str:
    """Why."""
    try:
        ask()
    except (ConfigError, RequestError) as error:
        return str(error)
    raise AssertionError("it is not refused")


def exposed(data: dict[str, Any]) -> str:
    """What `/metrics` shows."""
    registry = CollectorRegistry()
    prom_metrics(registry).observe(data)
    return generate_latest(registry).decode()


def route(side: Any) -> dict[str, Any]:
    """What the administrator's route answers."""

    async def call(self: Any, method: str, *args: Any) -> Any:
        assert method == "segreuse_call"
        await asyncio.sleep(0)
        return side.call(*args)

    admin_app.SwitchableEngine.call_utility_async = call  # type: ignore[method-assign]
    with TestClient(admin_app.admin_app()) as client:
        return {
            "without_token": client.get(f"{PREFIX}/toy").status_code,
            "route": client.get(
                f"{PREFIX}/toy", headers={"Authorization": f"Bearer {admin_app.TOKEN}"}
            ).json(),
        }


def tables() -> str:
    """The tables of options and metrics."""
    sys.path.insert(0, str(Path(__file__).parent.parent.parent / "docs"))
    import generate

    with tempfile.TemporaryDirectory() as folder:
        generate.main(Path(folder))
        names = ("server_options", "request_options", "metrics")
        return "\n".join((Path(folder) / f"{name}.md").read_text() for name in names)


if __name__ == "__main__":
    print(json.dumps(greeted()))
