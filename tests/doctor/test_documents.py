# SPDX-License-Identifier: Apache-2.0
"""The doctor says how prompts of a model trained on isolated documents are laid out, and refuses
what start-up refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import _write_tokenizer
from segreuse_extras.trained.anchors import AnchorNames
from segreuse_extras.trained.layout import Names
from segreuse_tools.commands import doctor as cli
from tests.doctor.test_families import FAMILIES
from tests.e2e.isolated_models import names


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Writes a configuration with a layout, and perhaps a tokenizer with these tokens."""

    def write(tokens: tuple[str, ...] | None = None, **changes: Any) -> str:
        config = FAMILIES["qwen3-8b"]["config"] | {"segreuse": names(2) | changes}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if tokens is not None:
            _write_tokenizer(tmp_path, tokens)
        return str(tmp_path)

    return write


def special() -> tuple[str, ...]:
    found = Names.of_config(names(2))
    assert found is not None
    return found.texts


LAYOUT = (
    "at most 4 in a prompt, each computed alone between <|kv_start|> and <|kv_end|>, with 2 link "
    "tokens behind it, <|link_1_1|> to <|link_4_2|>"
)


def test_the_layout_and_the_policy_are_named(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([model(special()), "--block-size", "32"]) == 0
    printed = capsys.readouterr().out
    assert f"documents {LAYOUT}\n" in printed
    assert "policy    link, no reused token is recomputed\n" in printed


def test_anchors_are_named(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = AnchorNames(16, 8)._asdict()
    folder = model(anchors=said)
    assert cli.main([folder, "--block-size", "32"]) == 0
    wanted = f"documents {LAYOUT}; 8 anchors stand for 16 tokens of its text; the folder has no tok"
    assert wanted in capsys.readouterr().out
    assert cli.main([folder, "--block-size", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"]["anchors"] == said


def test_without_a_tokenizer_that_is_left_to_start_up(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([model(), "--block-size", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["documents"]
    assert found["tokens"] == list(special())
    assert (found["link_tokens"], found["max_documents"]) == (2, 4)
    assert "no tokenizer" in found["tokenizer"]


@pytest.mark.parametrize(
    ("lacking", "changes", "options", "reason"),
    [
        (1, {}, "", "promises the token '<|link_4_2|>'"),
        (0, {"link_tokens": -1}, "", "segreuse.link_tokens=-1"),
        (0, {}, "policy: shift\n", "policy cannot be combined"),
        (0, {}, "tier: {codec: int8}\n", "tier.codec cannot be combined"),
    ],
)
def test_what_start_up_refuses_is_refused(
    model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lacking: int,
    changes: dict[str, Any],
    options: str,
    reason: str,
) -> None:
    tokens = special()
    folder = model(tokens[: len(tokens) - lacking], **changes)
    file = tmp_path / "reuse.yaml"
    file.write_text(options)
    assert cli.main([folder, "--block-size", "32", "--config", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "refused" in printed
    assert reason in printed
