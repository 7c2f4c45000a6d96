# SPDX-License-Identifier: Apache-2.0
"""The rules and all PromQL of the dashboard, by Prometheus' own tool."""

import subprocess
from pathlib import Path

import yaml

from tests.monitoring.expressions import RULES, expressions, program, rules


def promtool(*arguments: str | Path) -> str:
    ended = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_rules_are_right() -> None:
    assert f"SUCCESS: {len(rules())} rules found" in promtool("check", "rules", RULES)


def test_they_record_and_alert_what_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", Path(__file__).with_name("rules_test.yaml"))


def test_every_expression_is_promql(tmp_path: Path) -> None:
    """`promtool` of the distribution checks expressions in files of rules only."""
    found = [
        {"record": f"expression:{number}", "expr": one.concrete}
        for number, one in enumerate(expressions())
    ]
    file = tmp_path / "expressions.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": found}]}))
    assert f"SUCCESS: {len(found)} rules found" in promtool("check", "rules", file)
