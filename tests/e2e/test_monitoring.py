# SPDX-License-Identifier: Apache-2.0
"""Dashboard and rules against a running server, and with a Prometheus that scrapes it."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.server import free_port
from tests.e2e.server import Server
from tests.monitoring.expressions import RULES, expressions, panels, program, rules

TEXT = " ".join(f"word{number}" for number in range(400))


@pytest.fixture(scope="module")
def busy(shared_server: Server) -> Server:
    """A server that has reused and bypassed."""
    ask(shared_server)
    return shared_server


def ask(server: Server) -> None:
    """A prompt that is new, the same text behind another start, and one that is too short."""
    for prompt in (TEXT, f"Another start. {TEXT}", "Too short."):
        body = {"model": "m", "prompt": prompt, "max_tokens": 2, "extra_keys": "monitoring"}
        assert server.post("/v1/completions", body).status_code == 200


def series_of(server: Server) -> dict[str, set[str]]:
    """Names of all live series, and their labels; none of what has not happened yet."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for suffix in ("", "_total", "_bucket"):
            found.setdefault(family.name + suffix, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_and_label_is_there(busy: Server) -> None:
    live = series_of(busy)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for one in expressions():
        for series in one.series:
            if series.name not in recorded:
                assert series.name in live, f"{one.where} asks for {series.name}"
                if live[series.name]:
                    assert {name for name, _ in series.matchers} <= live[series.name], one.where


@pytest.fixture(scope="module")
def prometheus(busy: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus with the rules, which scrapes the server every second."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {"job_name": "vllm", "static_configs": [{"targets": [busy.url.split("//")[1]]}]}
        ],
    }
    rules_text = RULES.read_text().replace("interval: 30s", "interval: 1s")
    (folder / "rules.yaml").write_text(rules_text)
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [program("prometheus"), f"--config.file={file}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            wait_until(lambda: is_up(client), folder / "log")
            ask(busy)  # counters that have grown between two scrapes
            time.sleep(3)
            yield client
    finally:
        process.terminate()
        process.wait()


def is_up(client: httpx.Client) -> bool:
    try:
        return bool(query(client, "up == 1"))
    except httpx.TransportError:
        return False


def wait_until(holds: Any, log: Path) -> None:
    for _ in range(120):
        if holds():
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text())


def query(client: httpx.Client, promql: str) -> list[Any]:
    answer = client.get("/api/v1/query", params={"query": promql}).json()
    if answer["status"] != "success":
        return []
    found: list[Any] = answer["data"]["result"]
    return found


def test_every_panel_has_something_to_show(busy: Server, prometheus: httpx.Client) -> None:
    """Unless it is of audits, which this server does not make."""
    live, titles = series_of(busy), {panel["title"] for panel in panels()}
    asked = [one for one in expressions() if one.where in titles]
    happened = [one for one in asked if all(live[series.name] for series in one.series)]
    assert len(asked) - 6 < len(happened)
    assert {one.where for one in happened if not query(prometheus, one.concrete)} == set()


def test_every_rule_is_evaluated(prometheus: httpx.Client) -> None:
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert len(found) == len(rules())
    assert {rule["health"] for rule in found} == {"ok"}
