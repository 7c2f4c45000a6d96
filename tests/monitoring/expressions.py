# SPDX-License-Identifier: Apache-2.0
"""What the dashboard and the rules ask Prometheus for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
RULES = REPOSITORY / "configs" / "monitoring" / "rules.yaml"
DASHBOARD = REPOSITORY / "configs" / "monitoring" / "dashboard.json"

_SERIES = re.compile(r"\b((?:vllm|segreuse):[\w:]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|without|group_left|group_right) \(([^)]*)\)")
_SHOWN = re.compile(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}")


class Series(NamedTuple):
    """A selector: name of the metric, and each label with the value it is compared with."""

    name: str
    matchers: list[tuple[str, str]]


class Expression(NamedTuple):
    """PromQL, where it stands, and the labels that are shown of its result."""

    where: str
    promql: str
    shown: list[str]

    @property
    def concrete(self) -> str:
        """As Grafana sends it for all models."""
        text = self.promql.replace("$model", ".*").replace("$__rate_interval", "5m")
        assert "$" not in text, self
        return text

    @property
    def series(self) -> list[Series]:
        """Its selectors."""
        return [Series(name, _MATCHER.findall(within)) for name, within in self._selectors()]

    @property
    def labels(self) -> set[str]:
        """Labels that it groups by, or that are shown of it."""
        grouped = {name for names in _GROUPED.findall(self.promql) for name in names.split(", ")}
        return (grouped | set(self.shown)) - {""}

    def _selectors(self) -> list[tuple[str, str]]:
        return _SERIES.findall(self.promql)


def dashboard() -> dict[str, Any]:
    """Grafana's JSON."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    """Of the dashboard, without its rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    """Of all groups."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[Expression]:
    """All of both files."""
    for panel in panels():
        for target in panel["targets"]:
            shown = _SHOWN.findall(target["legendFormat"])
            yield Expression(panel["title"], target["expr"], shown)
    for rule in rules():
        text = " ".join(rule.get("annotations", {}).values())
        shown = _SHOWN.findall(text)
        yield Expression(rule.get("record") or rule["alert"], rule["expr"], shown)


def program(name: str) -> str:
    """Prometheus or its tool; a test without it is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: the distribution's package is `prometheus`")
    return found
