# SPDX-License-Identifier: Apache-2.0
"""The command on an engine of few lines: what is asked of it, and what is made of its answers."""

import json
import math
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest
import yaml
from vllm.engine.arg_utils import EngineArgs

from segreuse_tools.calibrate import by_policy, loaded_model, trials
from segreuse_tools.calibrate.bounds import share_at_least
from segreuse_tools.calibrate.search import CANDIDATES, Options, too_few
from segreuse_tools.calibrate.verdict_table import header
from segreuse_tools.commands import calibrate as cli
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.server import ConfigError
from vllm_segreuse.options.values import MAX_TOKENS

COUNT = 120


class Model:
    """Answers token 1; under bad settings, or where it is told to, token 2.

    Attributes:
        bad: policies that change answers.
        bad_prompts: {policy: last tokens of prompts whose answer it changes}.
        saves_nothing: settings that are computed in full; what comes after them finds that, until a
            reset.
        drifts: whether `focus` reports drift: 2 where it changes an answer, less than 1 elsewhere.
        asked: (last token of the prompt, extra_args) in order; None for a reset.
    """

    def __init__(self) -> None:
        self.bad = {"shift"}
        self.bad_prompts: dict[str, set[int]] = {}
        self.saves_nothing: list[Options] = []
        self.drifts = False
        self.asked: list[Any] = []
        self._has_whole_prompt = False
        self.llm_engine = Of(model_config=Of(get_vocab_size=lambda: 3, max_model_len=8))

    def get_tokenizer(self) -> Any:
        def encode(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [0] * add_special_tokens + [ord(char) for char in text]}

        return encode

    def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        [prompt] = prompts
        assert len(prompt["prompt_token_ids"]) < self.llm_engine.model_config.max_model_len
        last, options = prompt["prompt_token_ids"][-1], sampling.extra_args or {}
        self.asked.append((last, sampling.extra_args))
        policy = options.get("segreuse_policy")
        is_context = options and policy is None
        most = 1 if is_context else trials.ANSWER_TOKENS
        assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (most, 0.0, 3)
        setting = {key.removeprefix("segreuse_"): value for key, value in options.items()}
        setting.pop("extra_keys", None)
        is_full = self._has_whole_prompt or setting in self.saves_nothing
        self._has_whole_prompt |= is_full and policy is not None
        is_bad = policy in self.bad or last in self.bad_prompts.get(policy, ())
        is_bad &= not is_full
        shares = {1: 0.1, 2: 0.9} if is_bad else {1: 0.9, 2: 0.1}
        logprobs = {token: Of(logprob=math.log(share)) for token, share in shares.items()}
        share = options.get("segreuse_recompute_ratio", 0) + options.get("segreuse_dense_layers", 0)
        share += 0.25 * (policy == "focus" and "segreuse_recompute_ratio" not in options)
        report: dict[str, Any] = {"computed_share": 0.1 + share, "bypass_reason": None}
        if is_full:
            report = {"computed_share": 1.0, "bypass_reason": "nothing_saved"}
        if self.drifts and policy == "focus":
            report["drift"] = 2.0 if is_bad else 0.5 + last % 7 / 100
        said = Of(logprobs=[logprobs] * most, token_ids=[2 if is_bad else 1] + [7] * (most - 1))
        return [Of(outputs=[said], kv_transfer_params={"segreuse": report} if options else None)]

    def reset_prefix_cache(self) -> None:
        self.asked.append(None)
        self._has_whole_prompt = False


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()
    monkeypatch.setattr(by_policy, "_start", lambda name, arguments: model)
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
        f"* {'focus recompute_ratio=0.01':48}"
        "  0.110  0.0000   0.0000  0.0000  0.0000  1.000"
        f"     {0.05 ** (1 / COUNT):.3f}   1.000"
    ]
    assert f"  {header()}" in shown
    assert f" {0.05 ** (2 / COUNT):.3f} " in out.read_text(), "of each half by itself"


def test_names_of_files_need_be_no_utf_8(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has been measured for hours is not lost over them."""
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    status, out = run(folder)
    assert status == 0
    text = out.read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {"policy": "focus", "recompute_ratio": 0.01}
    assert r"caf\udce9/prompts.jsonl (120 prompts), model MODEL." in text
    assert r"caf\udce9/out.yaml: vllm-segreuse serve MODEL" in capsys.readouterr().out


def test_a_setting_that_only_suits_the_half_that_chose_it_is_not_written(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.bad_prompts = {"focus": {*range(1000 + COUNT // 2, 1000 + COUNT)}}
    status, out = run(tmp_path)
    assert (status, out.exists()) == (1, False)
    captured = capsys.readouterr()
    (unseen,) = [line for line in captured.out.splitlines() if "not chosen by" in line]
    assert unseen.split()[-3:] == ["0.000", "0.000", "0.000"]
    assert "half that it was not chosen by" in captured.err


def test_what_is_written_says_by_what(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = run(tmp_path)
    of_half = f"  0.110  0.0000   0.0000  0.0000  0.0000  1.000     {0.05 ** (1 / 60):.3f}   1.000"
    assert out.read_text().splitlines() == [
        f"# By vllm-segreuse calibrate on {tmp_path}/prompts.jsonl (120 prompts), model MODEL.",
        f"# {'setting':48}   work      KL  at most  median     p90  first  at least  tokens",
        f"# {'on the half it was chosen by':48}{of_half}",
        f"# {'on the other half':48}{of_half}",
        "policy: focus",
        "recompute_ratio: 0.01",
    ]
    assert capsys.readouterr().out.splitlines()[-3:] == [
        f"  {'on the prompts it was not chosen by':48}{of_half}",
        "drift is not measured by this policy",
        f"written to {out}: vllm-segreuse serve MODEL --segreuse-config {out}",
    ]


def test_why_nothing_is_written_is_said_with_the_bounds(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    way_out = (
        "more prompts narrow the bounds, --max-kl and --min-agreement move them, and --max-drift "
        "computes in full what is far off\n"
    )
    run(tmp_path, count=21)
    assert capsys.readouterr().err == (
        f"vllm-segreuse calibrate: {too_few(21, 0.9)}\n"
        "no setting kept the divergence at most 0.05 and the agreement at least 0.9 on the 10 "
        f"prompts that it is chosen by (the table is of all); {way_out}"
    )
    model.bad_prompts = {"focus": {*range(1000 + COUNT // 2, 1000 + COUNT)}}
    run(tmp_path)
    assert capsys.readouterr().err == (
        "the setting did not keep the bounds on the half that it was not chosen by, and is not "
        f"written; {way_out}"
    )


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
    assert "more prompts narrow the bounds" in capsys.readouterr().err
    assert run(tmp_path, "--min-agreement", "0.74", count=20)[0] == 0
    assert run(tmp_path, "--min-agreement", "0.742", count=20)[0] == 1


def test_that_prompts_are_too_few_is_said_before_the_engine_starts(
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(name: str, arguments: Any) -> Any:
        assert f"{too_few(57, 0.9)}\n" in capsys.readouterr().err
        return model

    monkeypatch.setattr(by_policy, "_start", start)
    assert run(tmp_path, count=57)[0] == 1
    monkeypatch.setattr(by_policy, "_start", lambda name, arguments: model)
    capsys.readouterr()
    assert run(tmp_path, count=58)[0] == 0
    assert capsys.readouterr().err == ""


def test_as_many_prompts_as_the_note_names_are_the_least_that_can_keep_the_bound() -> None:
    assert too_few(2, 0.0) == ""
    for least in (0.06, 0.5, 0.742, 0.9, 0.95, 0.999):
        note = too_few(2, least)
        count = int(note.rsplit("; ")[-1].split()[0])
        assert f"--min-agreement is {least}" in note
        assert (too_few(count, least), bool(too_few(count - 1, least))) == ("", True)


def test_the_table_is_of_all_prompts_and_the_choice_of_half(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ("--min-agreement", "0.8")  # 20 of 20 prove 0.861, 10 of 10 prove 0.741
    assert run(tmp_path, *limits, count=20)[0] == 1
    captured = capsys.readouterr()
    assert " 0.861 " in captured.out
    assert "on the 10 prompts that it is chosen by (the table is of all)" in captured.err


def test_each_prompt_is_asked_alone_under_every_setting_and_in_full_last(
    model: Model, tmp_path: Path
) -> None:
    run(tmp_path, count=2)
    start, second = (index for index, it in enumerate(model.asked) if it is None)
    assert start == 0, "nothing of one prompt is left for the next"
    first = model.asked[1:second]
    namespace = {"extra_keys": ["calibration 0"]}
    in_full = {"segreuse_min_reused_tokens": MAX_TOKENS}
    assert [args for _, args in first[:2]] == [namespace | in_full] * 2, "all of it donates"
    assert [args for _, args in first[2:-1]] == [
        namespace | {f"segreuse_{key}": value for key, value in options.items()}
        for options in CANDIDATES
    ]
    assert first[-1] == (1000, None)
    assert model.asked[second + 1][1]["extra_keys"] == ["calibration 1"]


def test_what_one_setting_computes_in_full_does_not_help_the_next(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.saves_nothing = [{"policy": "focus"}]
    status, out = run(tmp_path)
    assert status == 0
    assert yaml.safe_load(out.read_text()) == {"policy": "focus", "recompute_ratio": 0.01}
    lines = (line[2:].rsplit(maxsplit=8) for line in capsys.readouterr().out.splitlines())
    work = {cells[0].strip(): cells[1] for cells in lines if len(cells) == 9}
    assert (work["focus"], work["focus recompute_ratio=0.01"]) == ("1.000", "0.110")
    asked = model.asked[1:]
    again = asked[asked.index(None) + 1 :]
    (_, first_context), (_, second_context), (_, setting) = again[:3]
    assert first_context == second_context == model.asked[1][1]
    assert setting["segreuse_recompute_ratio"] == 0.01, "its contexts are there anew"


def test_a_prompt_that_is_too_long_is_named_before_any_is_asked(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"segments": ["ab"], "suffix": it} for it in ("c", "cdef", "cdefg")]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    assert cli.main(["MODEL", "--prompts", str(prompts)]) == 2
    said = capsys.readouterr().err
    assert "line 3 has 8 tokens: max_model_len 8 leaves no room for an answer" in said
    assert model.asked == []


def changed(every: int) -> set[int]:
    """Last tokens of every so many prompts, alike in both halves."""
    return {*range(1000, 1000 + COUNT, every)}


def test_what_drift_says_of_the_chosen_setting_is_reported_and_not_written(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.bad_prompts, model.drifts = {"focus": changed(every=5)}, True
    status, out = run(tmp_path, "--max-kl", "1", "--min-agreement", "0.6")
    assert status == 0
    assert yaml.safe_load(out.read_text()) == {"policy": "focus", "recompute_ratio": 0.01}
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("drift ")]
    assert "has rank correlation 0.70 with KL; max_drift 0.56 is for a p90 of KL up to 0.1" in said
    assert said.endswith("on the prompts it was not chosen by, p90 0.0000, 20.0% in full")


def test_max_drift_is_searched_and_written_when_asked_for(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.bad_prompts, model.drifts = {"focus": changed(every=3)}, True
    model.bad = {"shift", "prophet", "sparsex"}
    assert run(tmp_path)[0] == 1, "one prompt in three gets another answer"
    status, out = run(tmp_path, "--max-drift")
    assert status == 0
    written = yaml.safe_load(out.read_text())
    assert written == {"policy": "focus", "recompute_ratio": 0.01, "max_drift": 0.56}
    SegReuseConfig.model_validate(written)
    shown = capsys.readouterr().out
    assert "* focus recompute_ratio=0.01 max_drift=0.56 " in shown
    assert "rank correlation 0.8" in shown, "of what was measured without a limit"


def test_a_policy_that_measures_no_drift_is_written_without_max_drift(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run(tmp_path, "--max-drift")
    assert status == 0
    assert "max_drift" not in yaml.safe_load(out.read_text())
    assert "drift is not measured by this policy" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "most"), [(None, 128), (127, 128), (129, 129)])
def test_the_engine_tells_as_many_probabilities_as_are_compared(
    given: int | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr("vllm.LLM", lambda **options: started.append(options))
    arguments = [] if given is None else ["--max-logprobs", str(given)]
    loaded_model.start(loaded_model.arguments_of(str(tmp_path), arguments))
    [options] = started
    assert (options["model"], options["max_logprobs"]) == (str(tmp_path), most)
    of_reuse = options["kv_transfer_config"].kv_connector_extra_config
    assert of_reuse == {"max_provenance_depth": 0, "min_reused_tokens": 1}


@pytest.mark.parametrize("is_early", [True, False], ids=["options", "engine"])
def test_a_model_that_vllm_does_not_know_is_a_sentence(
    is_early: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*of: Any, **options: Any) -> None:
        raise OSError("MODEL is not a local folder\n\nand no name of a model\n")

    monkeypatch.setattr(EngineArgs, "__post_init__", refuse if is_early else lambda self: None)
    monkeypatch.setattr("vllm.LLM", refuse)
    assert run(tmp_path)[0] == 2
    said = capsys.readouterr().err
    why = "MODEL is not a local folder and no name of a model"
    assert said == f"vllm-segreuse calibrate: vLLM refuses MODEL: {why}\n"


@pytest.mark.parametrize(("vocabulary", "compared"), [(127, 127), (128, 128), (129, 128)])
def test_so_many_of_the_likeliest_tokens_are_compared(vocabulary: int, compared: int) -> None:
    asked: list[Any] = []

    def generate(prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        asked.append((prompts, sampling.logprobs, sampling.max_tokens, sampling.extra_args))
        said = Of(logprobs=[{1: Of(logprob=-0.5)}], token_ids=[1])
        return [Of(outputs=[said], kv_transfer_params=None)]

    config = Of(get_vocab_size=lambda: vocabulary)
    llm = Of(generate=generate, llm_engine=Of(model_config=config))
    assert trials.answer(llm, [1, 2], {}) == trials.MeasuredAnswer({1: -0.5}, [1], {})
    trials.answer(llm, [1, 2], {"a": 1}, max_tokens=1, salt="s")
    assert asked == [
        ([{"prompt_token_ids": [1, 2]}], compared, 8, None),
        ([{"prompt_token_ids": [1, 2], "cache_salt": "s"}], compared, 1, {"a": 1}),
    ]


def test_options_of_the_server_are_taken(tmp_path: Path) -> None:
    given = ["--segreuse", "--port", "8000", "--max-model-len", "64"]
    assert loaded_model.arguments_of(str(tmp_path), given).max_model_len == 64


def test_a_policy_is_chosen_without_other_options_of_reuse() -> None:
    ours = {"kv_connector": "SegReuseConnector", "kv_role": "kv_producer"}
    with pytest.raises(ConfigError, match="--kv-transfer-config needs --similarity"):
        loaded_model.arguments_of("MODEL", ["--kv-transfer-config", json.dumps(ours)])


@pytest.mark.parametrize(
    "options",
    [
        ("--max-kl", "nan"),
        ("--max-kl", "-1"),
        ("--min-agreement", "1.1"),
        ("--min-agreement", "1"),
        ("--max-kl", "x"),
        ("--target-kl", "-1"),
    ],
)
def test_limits_that_are_none_are_refused(
    model: Model, tmp_path: Path, options: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, *options)
    assert ended.value.code == 2
    assert model.asked == []


@pytest.mark.parametrize(
    "options",
    [
        *(("--max-kl", "0"), ("--max-kl", "inf"), ("--target-kl", "0"), ("--target-kl", "inf")),
        *(("--min-agreement", "0"), ("--min-agreement", "0.999")),
    ],
)
def test_limits_may_be_as_small_and_as_large_as_any(
    model: Model, tmp_path: Path, options: tuple[str, str]
) -> None:
    run(tmp_path, *options, count=2)
    assert model.asked


def test_limits_that_are_not_given_are_those_of_the_help(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.bad_prompts, model.drifts = {"focus": changed(every=5)}, True
    run(tmp_path)
    by_default = capsys.readouterr()
    run(tmp_path, "--max-kl", "0.05", "--min-agreement", "0.9", "--target-kl", "0.1")
    assert capsys.readouterr() == by_default


def test_an_agreement_that_nothing_proves_is_refused(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "--min-agreement", "1.0")
    assert "--min-agreement 1 can never be kept" in capsys.readouterr().err
    assert share_at_least(59, 59) >= 0.95 > share_at_least(58, 58)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot read"),
        ("{", "line 1 is no JSON"),
        ('{"suffix": "a"}', "line 1: segments must be a list"),
        ('{"segments": ["ab"], "suffix": "a"}', "holds 1 prompts: at least 2 are needed"),
    ],
)
def test_a_file_that_holds_no_prompts_is_a_sentence_before_the_engine_starts(
    text: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(by_policy, "_start", lambda name, arguments: pytest.fail("started"))
    prompts = tmp_path / "prompts.jsonl"
    if text is not None:
        prompts.write_text(text)
    assert cli.main(["MODEL", "--prompts", str(prompts), "--out", str(tmp_path / "out.yaml")]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--similarity"]])
@pytest.mark.parametrize("out", ["missing/out.yaml", "."])
def test_a_file_that_cannot_be_written_is_a_sentence_before_the_engine_starts(
    out: str,
    options: list[str],
    model: Model,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tmp_path, *options, "--out", str(tmp_path / out))[0] == 2
    assert "cannot write" in capsys.readouterr().err
    assert model.asked == []


def test_the_prompts_are_not_overwritten(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"segments": ["ab"], "suffix": "a"}\n')
    assert cli.main(["MODEL", "--prompts", str(prompts), "--out", str(prompts)]) == 2
    assert f"--out {prompts} would overwrite the prompts" in capsys.readouterr().err
    assert model.asked == []
    assert prompts.read_text().startswith("{")


def test_a_folder_that_went_away_meanwhile_is_a_sentence(
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "_may_write", lambda out: True)
    assert run(tmp_path, "--out", str(tmp_path / "missing" / "out.yaml"))[0] == 2
    assert "cannot write" in capsys.readouterr().err
