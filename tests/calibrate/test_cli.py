# SPDX-License-Identifier: Apache-2.0
"""The command on an engine of few lines: what is asked of it, and what is made of its answers."""

import json
import math
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest
import yaml

from vllm_segreuse.calibrate import cli
from vllm_segreuse.calibrate.search import CANDIDATES

COUNT = 120


class Model:
    """Answers token 1; under bad settings, or where it is told to, token 2.

    Attributes:
        bad: policies that change answers.
        bad_prompts: {policy: last tokens of prompts whose answer it changes}.
        asked: (last token of the prompt, extra_args) in order; None for a reset.
    """

    def __init__(self) -> None:
        self.bad = {"shift"}
        self.bad_prompts: dict[str, set[int]] = {}
        self.asked: list[Any] = []
        self.llm_engine = Of(model_config=Of(get_vocab_size=lambda: 3))

    def get_tokenizer(self) -> Any:
        def encode(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [0] * add_special_tokens + [ord(char) for char in text]}

        return encode

    def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        [prompt] = prompts
        last, options = prompt["prompt_token_ids"][-1], sampling.extra_args or {}
        self.asked.append((last, sampling.extra_args))
        assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (1, 0.0, 3)
        policy = options.get("segreuse_policy")
        is_bad = policy in self.bad or last in self.bad_prompts.get(policy, ())
        shares = {1: 0.1, 2: 0.9} if is_bad else {1: 0.9, 2: 0.1}
        logprobs = {token: Of(logprob=math.log(share)) for token, share in shares.items()}
        share = options.get("segreuse_recompute_ratio", 0) + options.get("segreuse_dense_layers", 0)
        report = {"segreuse": {"computed_share": 0.1 + share}} if options else None
        return [Of(outputs=[Of(logprobs=[logprobs])], kv_transfer_params=report)]

    def reset_prefix_cache(self) -> None:
        self.asked.append(None)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()
    monkeypatch.setattr(cli, "_engine", lambda given, arguments: model)
    return model


def run(tmp_path: Path, *options: str, count: int = COUNT) -> tuple[int, Path]:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.yaml"
    lines = [{"segments": ["ab", "cd"], "suffix": chr(1000 + number)} for number in range(count)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    return cli.main(["MODEL", "--prompts", str(prompts), "--out", str(out), *options]), out


def test_the_cheapest_setting_that_keeps_the_answers_is_written(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run(tmp_path)
    assert status == 0
    assert yaml.safe_load(out.read_text()) == {"policy": "focus", "recompute_ratio": 0.01}
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("*")] == [
        "* policy focus, recompute_ratio 0.01: work 0.110, divergence 0.0000 (at most 0.0000), "
        f"agreement 1.000 (at least {0.05 ** (1 / COUNT):.3f})"
    ]
    assert f"(at least {0.05 ** (2 / COUNT):.3f})" in out.read_text(), "of each half by itself"


def test_a_setting_that_only_suits_the_half_that_chose_it_is_not_written(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.bad_prompts = {"focus": {*range(1000 + COUNT // 2, 1000 + COUNT)}}
    status, out = run(tmp_path)
    assert (status, out.exists()) == (1, False)
    captured = capsys.readouterr()
    assert "agreement 0.000" in captured.out
    assert "half that it was not chosen by" in captured.err


def test_a_setting_that_does_not_suit_the_choosing_half_is_passed_over(
    model: Model, tmp_path: Path
) -> None:
    model.bad_prompts = {"focus": {*range(1000, 1000 + COUNT // 2)}}
    status, out = run(tmp_path)
    assert status == 0
    assert yaml.safe_load(out.read_text())["policy"] == "prophet"


def test_few_prompts_prove_nothing(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run(tmp_path, count=20)  # 10 of 10 agree: at least 0.741
    assert (status, out.exists()) == (1, False)
    assert "on 10 prompts; more prompts narrow the bounds" in capsys.readouterr().err
    assert run(tmp_path, "--min-agreement", "0.74", count=20)[0] == 0
    assert run(tmp_path, "--min-agreement", "0.742", count=20)[0] == 1


def test_each_prompt_is_asked_alone_under_every_setting_and_in_full_last(
    model: Model, tmp_path: Path
) -> None:
    run(tmp_path, count=2)
    first = model.asked[: model.asked.index(None)]
    namespace = {"extra_keys": ["calibration 0"]}
    assert [args for _, args in first[:2]] == [namespace, namespace]
    assert [args for _, args in first[2:-1]] == [
        namespace | {f"segreuse_{key}": value for key, value in options.items()}
        for options in CANDIDATES
    ]
    assert first[-1] == (1000, None)
    assert model.asked.count(None) == 2, "nothing of one prompt is left for the next"
    assert model.asked[model.asked.index(None) + 1][1] == {"extra_keys": ["calibration 1"]}


@pytest.mark.parametrize(
    "options",
    [("--max-kl", "nan"), ("--max-kl", "-1"), ("--min-agreement", "1.1"), ("--max-kl", "x")],
)
def test_limits_that_are_none_are_refused(
    model: Model, tmp_path: Path, options: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, *options)
    assert ended.value.code == 2
    assert model.asked == []


def test_a_file_that_cannot_be_read_or_written_is_a_sentence(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["MODEL", "--prompts", str(tmp_path / "missing")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert run(tmp_path, "--out", str(tmp_path / "missing" / "out.yaml"))[0] == 2
    assert "cannot write" in capsys.readouterr().err
