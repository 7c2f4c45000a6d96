# SPDX-License-Identifier: Apache-2.0
"""`calibrate --similarity` on an engine of few lines: what is asked of it, what is written."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest
import yaml

from segreuse_tools.calibrate import by_similarity
from segreuse_tools.calibrate.search import Setting, Trial, too_few
from segreuse_tools.commands import calibrate as cli
from segreuse_tools.estimate import prompt_rendering, served_model
from segreuse_tools.estimate.request_log import Logged
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.values import MAX_TOKENS

COUNT = 40
LAYERS = 8


class Model:
    """Answers token 1. What is similar is a tenth of each prompt but the first.

    Attributes:
        similarity, searches: as it was set last, and every time.
        wrong_from: thresholds below it have every second prompt answered by token 2.
        asked: (prompt, extra_args, salt) in order; None for a reset.
        started: options of the server.
        finds: whether anything is similar.
        drifts: of halos, where they are measured.
        halos_save: whether a larger halo saves work; else it costs some.
    """

    def __init__(self) -> None:
        self.similarity: dict[str, Any] = {}
        self.searches: list[dict[str, Any]] = []
        self.wrong_from = 0.0
        self.asked: list[Any] = []
        self.started: dict[str, Any] = {}
        self.finds = True
        self.drifts: tuple[float | None, ...] = (0.1, 0.3)
        self.halos_save = False
        self.llm_engine = Of(
            model_config=Of(get_vocab_size=lambda: 3), engine_core=Of(call_utility=self._call)
        )

    def _call(self, method: str, name: str, options: dict[str, Any]) -> None:
        assert (method, name) == ("segreuse_call", "set_similarity")
        self.similarity = options
        self.searches.append(options)

    def reset_prefix_cache(self) -> None:
        self.asked.append(None)

    def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        [prompt] = prompts
        tokens, options = prompt["prompt_token_ids"], sampling.extra_args
        self.asked.append((tokens, options, prompt.get("cache_salt")))
        reuses = options["segreuse_similarity"] == 1 and self.finds and tokens[-1] > 0
        is_bad = reuses and self.similarity["threshold"] < self.wrong_from and tokens[-1] % 2 == 1
        shares = {1: 0.1, 2: 0.9} if is_bad else {1: 0.9, 2: 0.1}
        logprobs = {token: Of(logprob=math.log(share)) for token, share in shares.items()}
        halo = self.similarity.get("halo_tokens") or 0
        found: list[Any] = [{"source": "similar"}] * reuses
        if reuses and self.similarity.get("max_boundary_drift"):
            found = [it | {"boundary_drift": drift} for it in found for drift in self.drifts]
        report = {
            "prefix_tokens": 20,
            "computed_share": 0.5 - 0.01 * reuses * (20 + halo if self.halos_save else 20 - halo),
        }
        if reuses:
            report |= {"similar_tokens": 10, "explain": found}
        said = Of(logprobs=[logprobs], token_ids=[2 if is_bad else 1])
        return [Of(outputs=[said], kv_transfer_params={"segreuse": report})]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()

    def start(args: Any, options: Any) -> Model:
        SegReuseConfig.from_options(options)
        model.started = options
        return model

    class Renderer:
        def __init__(self, config: Any, args: Any, keys: list[str], answer_tokens: int) -> None:
            self._keys = keys

        def render(self, log: list[Logged]) -> list[Any]:
            return [
                Of(
                    token_ids=[7] * 99 + [it.body["prompt"]],
                    extra_args={"extra_keys": it.body.get("extra_keys", self._keys)},
                    cache_salt=it.body.get("cache_salt"),
                )
                for it in log
            ]

    monkeypatch.setattr(by_similarity, "_start", start)
    monkeypatch.setattr(served_model, "load_model", loading(enforce_eager=True))
    monkeypatch.setattr(prompt_rendering, "Renderer", Renderer)
    return model


def loading(enforce_eager: bool) -> Any:
    """In place of `load_model`."""

    def load_model(command: str, model: str, arguments: Any, of_file: SegReuseConfig | None) -> Any:
        return Of(
            args=None,
            options=of_file or SegReuseConfig(),
            layers=Of(count=LAYERS),
            vllm_config=Of(model_config=Of(enforce_eager=enforce_eager)),
        )

    return load_model


def run(tmp_path: Path, *options: str, count: int = COUNT, **body: Any) -> tuple[int, Path]:
    log, out = tmp_path / "log.jsonl", tmp_path / "out.yaml"
    log.write_text("".join(json.dumps({"prompt": n, **body}) + "\n" for n in range(count)))
    limits = ("--max-kl", "0.5", "--min-agreement", "0.8")
    given = ["MODEL", "--similarity", "--prompts", str(log), "--out", str(out), *limits, *options]
    return cli.main(given), out


def test_the_cheapest_options_that_keep_the_answers_are_written(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.wrong_from = 0.6
    status, out = run(tmp_path)
    assert status == 0
    assert yaml.safe_load(out.read_text()) == {"similarity": {"threshold": 0.65}}
    shown = capsys.readouterr().out
    (chosen,) = [line for line in shown.splitlines() if line.startswith("*")]
    # Of 100 tokens 20 are known; 0.3 of the others is computed, and 0.5 of the first prompt.
    assert chosen.split()[1:3] == ["threshold=0.65", f"{0.8 * (0.3 * 39 + 0.5) / 40:.3f}"]
    assert "9.8% of the prompts' tokens were reused from similar text" in shown


def test_how_far_halos_are_off_is_said_of_the_setting_that_is_chosen() -> None:
    def about(*drifts: float | None) -> str:
        trials = [Trial(0.1 * n, 1.0, 0.5, drift) for n, drift in enumerate(drifts)]
        return by_similarity._about(Setting({}, trials), 0.0625)

    plain = "6.2% of the prompts' tokens were reused from similar text"
    assert about(None, None, None) == about(0.5, 0.5) == plain
    assert about(None, 0.5, 1.0, 0.25) == (
        f"{plain}; the largest boundary drift of a request (mean 0.58) has rank correlation -0.50 "
        "with KL"
    )


def test_with_bounds_that_nothing_keeps_the_least_divergence_is_gone_on_with() -> None:
    def setting(name: str, divergence: float, work: float) -> Setting:
        spread = [Trial(divergence * n, 0.0, work) for n in (1, 2)]
        return Setting({"policy": name}, spread * 4)

    far, near, cheap = setting("far", 0.3, 0.1), setting("near", 0.1, 0.9), setting("c", 0.1, 0.8)
    assert by_similarity._best([far, near], 0.01, 0.9) is near
    assert by_similarity._best([far, near, cheap], 0.01, 0.9) is cheap
    assert by_similarity._best([far, near], 9.0, 0.0) is far, "both keep these"


def test_the_log_is_asked_in_order_with_reuse_and_then_in_full(
    model: Model, tmp_path: Path
) -> None:
    run(tmp_path, count=2, extra_keys=["mine"], cache_salt="salt")
    streams = [i for i, it in enumerate(model.asked) if it is None]
    first, second = (model.asked[i + 1 : j] for i, j in itertools.pairwise(streams[:3]))
    assert [tokens[-1] for tokens, _, _ in first] == [0, 0, 1, 1]
    assert {salt for *_, salt in first} == {"salt"}
    full = {"extra_keys": ["mine"], "segreuse_similarity": 0}
    full["segreuse_min_reused_tokens"] = MAX_TOKENS
    for stream, switch in ((first, 0), (second, 1)):
        reusing = {"extra_keys": ["mine"], "segreuse_similarity": switch, "segreuse_explain": 1}
        assert [options for _, options, _ in stream] == [reusing, full] * 2


def test_the_worst_halo_of_each_request_is_measured_and_bounds_are_tried_there(
    model: Model, tmp_path: Path
) -> None:
    model.wrong_from = 2.0  # none keeps the answers: the first that is tried is as good as any
    run(tmp_path, "--max-kl", "0.001")
    off = {"halo_tokens": 0, "max_boundary_drift": None, "w_exact": None}
    assert model.searches[0] == off | {"threshold": 0.5}
    halos = [it for it in model.searches if it["halo_tokens"]]
    assert [it["halo_tokens"] for it in halos] == [4, 8, 16], "measured, and nothing rejected"
    assert {it["max_boundary_drift"] for it in halos} == {by_similarity.UNBOUNDED}


@pytest.mark.parametrize(
    ("drifts", "worst"), [((0.1, 0.3), 0.3), ((0.1, None), by_similarity.UNBOUNDED)]
)
def test_a_drift_that_is_not_a_number_is_worse_than_any(
    drifts: tuple[Any, ...], worst: float, model: Model, tmp_path: Path
) -> None:
    model.drifts, model.halos_save = drifts, True
    run(tmp_path)
    bounded = [it["max_boundary_drift"] for it in model.searches if it["halo_tokens"]]
    assert bounded[:3] == [by_similarity.UNBOUNDED] * 3, "measured"
    assert bounded[3] == worst


def test_options_that_are_given_are_kept_and_those_that_are_fitted_are_not(
    model: Model, tmp_path: Path
) -> None:
    config = tmp_path / "given.yaml"
    given = {
        "policy": "epic",
        "recompute_ratio": 0.2,
        "observe": True,
        "knowledge_path": "knowledge.sqlite",
        "similarity": {"stride_tokens": 16, "halo_tokens": 4},
    }
    config.write_text(yaml.safe_dump(given))
    status, out = run(tmp_path, "--config", str(config))
    assert status == 0
    written = yaml.safe_load(out.read_text())
    assert written.pop("knowledge_path").endswith("knowledge.sqlite")
    assert written == {
        "policy": "epic",
        "recompute_ratio": 0.2,
        "observe": True,
        "similarity": {"stride_tokens": 16, "threshold": 0.5},
    }
    SegReuseConfig.from_yaml(out)
    assert "knowledge_path" not in model.started, "its file is the server's"
    assert model.started["policy"] == "epic"
    assert model.started["observe"] is False, "of requests that only observe nothing is measured"
    assert model.started["max_provenance_depth"] == 0
    assert model.started["similarity"]["stride_tokens"] == 16
    assert model.started["similarity"]["w_exact"] == {"2": 0, "4": 0, "6": 0}
    reusing = [it[1] for it in model.asked if it is not None and "segreuse_policy" in it[1]]
    assert reusing == [], "its policy lets tokens enter"


def test_a_file_that_switches_similar_text_off_is_one_without_its_options(
    model: Model, tmp_path: Path
) -> None:
    config = tmp_path / "given.yaml"
    config.write_text("similarity: null\n")
    status, out = run(tmp_path, "--config", str(config))
    assert status == 0
    assert yaml.safe_load(out.read_text()) == {"similarity": {"threshold": 0.5}}


def test_what_saves_nothing_is_not_written(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.wrong_from = 2.0
    status, out = run(tmp_path)
    assert (status, out.exists()) == (1, False)
    assert "no setting with similar text keeps the bounds" in capsys.readouterr().err


def test_logs_without_anything_similar_are_said_to_be(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.finds = False
    status, out = run(tmp_path)
    assert (status, out.exists()) == (2, False)
    assert f"no similar text was found among the {COUNT} requests" in capsys.readouterr().err


def test_one_request_is_too_few(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, count=1)[0] == 2
    assert "holds 1 requests of text alone: at least 2 are needed" in capsys.readouterr().err


def test_that_requests_are_too_few_is_said(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    assert "no setting will be written" not in capsys.readouterr().err
    run(tmp_path, "--min-agreement", "0.9")
    assert too_few(COUNT, 0.9) in capsys.readouterr().err


def test_no_layers_are_tried_of_a_compiled_model(
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(served_model, "load_model", loading(enforce_eager=False))
    assert run(tmp_path)[0] == 0
    assert "w_exact" not in model.started["similarity"]
    assert "without --enforce-eager no layers of `w_exact` were tried" in capsys.readouterr().out


def test_no_layers_are_tried_beside_a_tier(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "given.yaml"
    config.write_text(yaml.safe_dump({"tier": {"host_gib": 1}}))
    status, out = run(tmp_path, "--config", str(config))
    assert status == 0
    assert SegReuseConfig.from_yaml(out).tier is not None, "a file that a server takes"
    assert not any(it["w_exact"] for it in model.searches)
    assert "with a `tier` no layers of `w_exact` were tried" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--similarity", "--max-drift"], "--max-drift is chosen with a policy"),
        (["--config", "x.yaml"], "--config needs --similarity"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["MODEL", "--prompts", "x.jsonl", *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_files_that_cannot_be_read_are_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert cli.main(["MODEL", "--similarity", "--prompts", missing]) == 2
    assert "cannot read" in capsys.readouterr().err
    given = ["--prompts", missing, "--config", missing]
    assert cli.main(["MODEL", "--similarity", *given]) == 2
    assert capsys.readouterr().err.count("\n") == 1
