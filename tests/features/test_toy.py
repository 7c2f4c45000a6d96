# SPDX-License-Identifier: Apache-2.0
"""A feature is a folder, and a name in the list: nothing else of the package knows it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOYS = Path(__file__).parent / "toys"


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What a process with the feature shows: its classes are made when they are imported."""
    command = [sys.executable, "-m", "tests.features.greeted", str(TOYS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_it_has_options_of_the_server_and_of_requests(seen: dict[str, Any]) -> None:
    assert seen["server"] == {"default": 3, "given": 2}
    refused = "segreuse: toy_greetings=101 must be an integer from 0 to 100"
    assert seen["refused"] == refused
    assert seen["request"] == {"default": False, "given": True, "of_server": True}
    assert seen["unknown"].startswith("unknown option 'segreuse_toys'; allowed are ")
    assert "segreuse_toy," in seen["unknown"]


def test_it_has_a_metric_and_a_field_of_the_report(seen: dict[str, Any]) -> None:
    assert seen["greetings"] == ["hello", None, "hello", None]  # asked, not asked, asked, no more
    counted = 'vllm:segreuse_toy_greetings_total{engine="0",model_name="m"} 2.0'
    assert counted in seen["exposed"]
    assert "# HELP vllm:segreuse_toy_greetings_total Requests that were greeted." in seen["exposed"]


def test_it_has_a_route(seen: dict[str, Any]) -> None:
    assert seen["without_token"] == 401
    assert seen["route"] == {"left": 0}


def test_it_is_in_the_tables_of_the_documentation(seen: dict[str, Any]) -> None:
    assert "`toy_greetings` | an integer from 0 to 100 | `3` | Most greetings" in seen["tables"]
    assert "`toy` | true or false | `false` | Whether the request is greeted" in seen["tables"]
    assert "`vllm:segreuse_toy_greetings_total`" in seen["tables"]


def test_without_it_nothing_of_it_is_there() -> None:
    from vllm_segreuse.config import RequestOptions, SegReuseConfig
    from vllm_segreuse.config.metrics import METRICS

    names = {*SegReuseConfig.model_fields, *RequestOptions.model_fields}
    assert not any("toy" in name for name in (*names, *(row.name for row in METRICS)))
