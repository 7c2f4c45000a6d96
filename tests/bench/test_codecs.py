# SPDX-License-Identifier: Apache-2.0
"""`bench codecs`: how a run ends."""

import json
from pathlib import Path

import pytest

from bench import harness
from bench.codecs import command


@pytest.mark.parametrize(("interrupted", "status"), [(True, 130), (False, 0)])
def test_a_run_that_was_interrupted_says_so(
    interrupted: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed: harness.SuiteResult = {"rows": [{"part": "speed"}], "summary": {"speed": 1.0}}
    quality: harness.SuiteResult = {
        "rows": [{"part": "quality"}],
        "summary": {"quality": 2.0},
        "interrupted": interrupted,
    }
    monkeypatch.setattr(command.speed, "measure", lambda quick: speed)
    monkeypatch.setattr(command, "_quality", lambda *_: quality)
    file = tmp_path / "codecs.json"
    assert command.main(["--model", str(tmp_path), "--json", str(file)]) == status
    content = json.loads(file.read_text())
    assert content["environment"]["interrupted"] is interrupted
    assert content["summary"] == {"speed": 1.0, "quality": 2.0}
