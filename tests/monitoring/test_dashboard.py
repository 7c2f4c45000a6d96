# SPDX-License-Identifier: Apache-2.0
"""The dashboard: what Grafana needs of its JSON, and that everything it asks for is measured."""

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.monitoring.expressions import (
    REPOSITORY,
    Expression,
    dashboard,
    expressions,
    panels,
    rules,
)
from vllm_segreuse.config.metrics import SegReusePromMetrics

ALL = list(expressions())
OURS = "vllm:segreuse_"


UNITS = {"short", "percentunit", "reqps", "s", "bytes"}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, set[str]]]:
    """Of our metrics, as `/metrics` has them: name of each series, its labels, their values."""
    registry = CollectorRegistry()
    engine_labels = ["model_name", "engine"]

    def bound(kind: type, made: list[Any]) -> Any:
        def make(**options: Any) -> Any:
            made.append((kind(**options, registry=registry), options["labelnames"]))
            return made[-1][0]

        return make

    made: list[Any] = []
    SegReusePromMetrics(
        SimpleNamespace(kv_transfer_config=None),  # type: ignore[arg-type]
        {kind: bound(kind, made) for kind in (Gauge, Counter, Histogram)},
        engine_labels,
        {0: ["m", "0"]},
    )
    for metric, names in made:
        if names[:2] == engine_labels and len(names) > 2:
            metric.labels("m", "0", *(["?"] * (len(names) - 2)))  # those that are not known before
    found: dict[str, dict[str, set[str]]] = {}
    for sample in itertools.chain.from_iterable(one.samples for one in registry.collect()):
        labels = found.setdefault(sample.name, {})
        for name, value in sample.labels.items():
            labels.setdefault(name, set()).add(value)
    return found


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


@pytest.mark.parametrize("expression", ALL, ids=lambda it: it.where)
def test_what_it_asks_for_is_measured(
    expression: Expression, measured: dict[str, dict[str, set[str]]]
) -> None:
    assert expression.series, expression
    carried = {"model_name", "engine"}
    for series in expression.series:
        if not series.name.startswith(OURS):
            assert series.name in recorded() or series.name.startswith("vllm:"), series
            carried |= {"reason"} if series.name in recorded() else set()
            carried |= {"le"} if series.name.endswith("_bucket") else set()
            continue
        labels = measured[series.name]
        carried |= labels.keys()
        assert {name for name, _ in series.matchers} <= labels.keys()
        for name, value in series.matchers:
            if name == "kind":
                assert set(value.split("|")) <= labels[name]
    assert expression.labels <= carried


def test_reasons_and_outcomes_are_those_of_the_documentation() -> None:
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    reasons = set(re.findall(r"^\| `(\w+)` \|", text.partition("\n## Why")[0], re.MULTILINE))
    matchers = [matcher for one in ALL for series in one.series for matcher in series.matchers]
    assert {v for name, value in matchers if name == "reason" for v in value.split("|")} <= reasons
    assert {value for name, value in matchers if name == "outcome"} <= {"reused", "bypassed"}


def test_panels_have_what_grafana_needs() -> None:
    kinds = {"timeseries", "stat", "heatmap"}
    for panel in panels():
        assert panel["type"] in kinds, panel["title"]
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        source = {"type": "prometheus", "uid": "${datasource}"}
        assert panel["datasource"] == source
        assert [target["datasource"] for target in panel["targets"]] == [source] * len(
            panel["targets"]
        )
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == list("ABCDEFGH"[: len(letters)])
        assert len({target["legendFormat"] for target in panel["targets"]}) == len(letters)
        formats = {target.get("format") for target in panel["targets"]}
        assert formats == ({"heatmap"} if panel["type"] == "heatmap" else {None})


def test_ids_differ_and_panels_do_not_overlap() -> None:
    found = dashboard()["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    cells: set[tuple[int, int]] = set()
    for panel in found:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        mine = set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        )
        assert not mine & cells, panel["title"]
        cells |= mine


def test_it_can_be_imported_anywhere() -> None:
    found = dashboard()
    assert "id" not in found, "of one Grafana"
    assert found["uid"] == "vllm-segreuse"
    assert found["schemaVersion"] >= 38
    variables = {variable["name"]: variable["type"] for variable in found["templating"]["list"]}
    assert variables == {"datasource": "datasource", "model": "query"}
    assert all('model_name=~"$model"' in one.promql for one in ALL[: len(targets())])


def targets() -> list[Any]:
    return [target for panel in panels() for target in panel["targets"]]


def test_alerts_on_shares_and_quantiles_want_traffic() -> None:
    """One request of a quiet hour is a share of 100 %."""
    alerts = {rule["alert"]: rule["expr"] for rule in rules() if "alert" in rule}
    found = {name: expr for name, expr in alerts.items() if re.search("_share:|:p90_", expr)}
    assert len(found) >= 4
    traffic = re.compile(r"(reusing_requests:increase1h|requests:rate1h) > 20|tokens:rate1h > 1\b")
    assert all(traffic.search(expr) for expr in found.values()), found


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 7
    for alert in alerts:
        assert alert["alert"].startswith("SegReuse")
        assert alert["labels"]["severity"] in {"info", "warning", "critical"}
        assert alert["annotations"]["summary"].startswith("{{ $labels.model_name }}")
        assert len(alert["annotations"]["description"]) > 20
