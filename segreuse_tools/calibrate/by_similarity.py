# SPDX-License-Identifier: Apache-2.0
"""Options of `similarity`, chosen by a log of requests in the order in which they came.

Every setting gets the whole log on an empty cache. Each request is asked with reuse, and then in
full in the same namespace: what it is compared with, and what later requests find. Settings are
tried option by option (`coordinate_search`), on one engine that keeps boundary states at all
layers that are tried.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from segreuse_tools.calibrate import coordinate_search, drift_limits, loaded_model
from segreuse_tools.calibrate.search import (
    Found,
    Options,
    Setting,
    Trial,
    cheapest,
    halves,
    judge,
    too_few,
)
from segreuse_tools.calibrate.trials import IN_FULL, answer, trial
from segreuse_tools.calibrate.verdict_table import name_of
from segreuse_tools.estimate.request_log import LogError, read_log
from segreuse_tools.terminal import complain
from vllm_segreuse.config import RequestOptions, SegReuseConfig
from vllm_segreuse.features.knowledge.scheduler_calls import call_scheduler_of
from vllm_segreuse.policies import WITHOUT_CHOICE

if TYPE_CHECKING:
    from segreuse_tools.estimate.prompt_rendering import Asked

NAMESPACE = "calibration"
"""Of requests that name none."""
UNBOUNDED = 1e9
"""A bound that no halo exceeds: all segments are measured, and accepted."""
FITTED = (
    "by_default",
    "threshold",
    "halo_tokens",
    "max_boundary_drift",
    "min_context_tokens",
    "w_exact",
)
"""Options that a given file may have, and that are chosen anew."""
_IN_FULL = {**IN_FULL, "segreuse_similarity": 0}


def measure(given: argparse.Namespace, engine_arguments: Sequence[str]) -> Found:
    """Try settings, each chosen by those before.

    Raises:
        ConfigError: the file of options is none, or `--kv-transfer-config` is refused.
        LogError: the log cannot be replayed, or holds nothing to calibrate on.
        InputError: there is no such model, or vLLM does not take the arguments.
        RefusedError: segment reuse refuses it.
    """
    of_file = None if given.config is None else SegReuseConfig.from_yaml(given.config)
    log = read_log(given.prompts)
    # Imported here: it loads vLLM, which takes seconds, and bad input is reported before.
    from segreuse_tools.estimate.prompt_rendering import Renderer
    from segreuse_tools.estimate.served_model import load_model

    model = load_model("calibrate", given.model, engine_arguments, of_file)
    base = model.options
    asked = Renderer(model.vllm_config, model.args, [NAMESPACE], answer_tokens=1).render(log)
    if len(asked) < 2:
        raise LogError(
            f"{given.prompts} holds {len(asked)} requests of text alone: at least 2 are needed, "
            "one half to choose by and one to check; some hundred give a useful bound"
        )
    if note := too_few(len(asked), given.min_agreement):
        complain("calibrate", note)
    why_no_cuts = _why_no_cuts(base, model.vllm_config.model_config.enforce_eager)
    cuts = () if why_no_cuts else coordinate_search.cuts(model.layers.count)
    kept = base.model_dump(mode="json", exclude_unset=True)
    similarity = kept.pop("similarity", None) or {}  # a file may say `similarity: null`
    windows = {key: it for key, it in similarity.items() if key not in FITTED}
    start = {name: kept[name] for name in RequestOptions.model_fields if name in kept}
    start |= {"max_provenance_depth": 0, "observe": False}
    start["similarity"] = windows | coordinate_search.reserved(cuts)
    stream = _Stream(_start(model.args, start), asked)

    def tried(options: Sequence[Options]) -> list[Setting]:
        return [Setting(it, stream.trials(it)) for it in options]

    def best_of(settings: Sequence[Setting]) -> Setting:
        return _best(settings, given.max_kl, given.min_agreement)

    def written(options: Options) -> Options:
        return {**kept, **options, "similarity": {**windows, **options["similarity"]}}

    settings = coordinate_search.fit(tried, best_of, cuts, base.policy in WITHOUT_CHOICE)
    if not any(stream.shares):
        raise LogError(
            f"no similar text was found among the {len(asked)} requests of {given.prompts}: "
            "`similarity` has nothing to reuse"
        )

    def about(index: int) -> str:
        return _about(settings[index], stream.shares[index]) + why_no_cuts

    return Found(settings, about, written)


def _why_no_cuts(base: SegReuseConfig, enforce_eager: bool) -> str:
    """A note on why no layers of `w_exact` are tried; empty: they are."""
    if base.tier is not None:
        return "; with a `tier` no layers of `w_exact` were tried: it does not store their states"
    if not enforce_eager:
        return "; without --enforce-eager no layers of `w_exact` were tried"
    return ""


def _start(args: argparse.Namespace, options: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return loaded_model.start(EngineArgs.from_cli_args(args), options)


class _Stream:
    """The log, asked under one setting after the other.

    Attributes:
        shares: of each setting, the share of the prompts' tokens that were reused from similar
            text.
    """

    def __init__(self, llm: Any, asked: Sequence[Asked]) -> None:
        self.shares: list[float] = []
        self._llm, self._asked = llm, asked

    def trials(self, options: Options) -> list[Trial]:
        """What a setting does to each request."""
        from tqdm import tqdm

        self._llm.reset_prefix_cache()
        similarity = options.get("similarity")
        if similarity is not None:
            self._search(similarity)
        mine = {f"segreuse_{key}": it for key, it in options.items() if key != "similarity"}
        mine |= {"segreuse_similarity": int(similarity is not None), "segreuse_explain": 1}
        trials, similar, total = [], 0, 0
        for one in tqdm(self._asked, desc=name_of(options), disable=None):
            at = {"extra_keys": one.extra_args["extra_keys"]}
            reusing = answer(self._llm, one.token_ids, {**at, **mine}, salt=one.cache_salt)
            full = answer(self._llm, one.token_ids, {**at, **_IN_FULL}, salt=one.cache_salt)
            trials.append(_of_whole(trial(full, reusing), reusing.report, len(one.token_ids)))
            similar += reusing.report.get("similar_tokens", 0)
            total += len(one.token_ids)
        self.shares.append(similar / total)
        return trials

    def _search(self, similarity: Mapping[str, Any]) -> None:
        wanted = dict(similarity)
        if wanted.get("halo_tokens"):
            wanted.setdefault("max_boundary_drift", UNBOUNDED)
        off = {"halo_tokens": 0, "max_boundary_drift": None, "w_exact": None}
        call_scheduler_of(self._llm, "segreuse_call", "set_similarity", {**off, **wanted})


def _of_whole(found: Trial, report: Mapping[str, Any], num_tokens: int) -> Trial:
    """With the work of the whole prompt, and how far the worst halo was off."""
    behind = num_tokens - report["prefix_tokens"]
    stretches = report.get("explain", ())
    drifts = [it["boundary_drift"] for it in stretches if "boundary_drift" in it]
    off = max((UNBOUNDED if it is None else it for it in drifts), default=None)
    return Trial(found.divergence, found.agreement, found.work * behind / num_tokens, off)


def _best(settings: Sequence[Setting], max_kl: float, min_agreement: float) -> Setting:
    """The cheapest that keeps the bounds on the choosing half; else the one of least divergence."""
    index = cheapest(settings, max_kl, min_agreement)
    if index is not None:
        return settings[index]

    def rank(setting: Setting) -> tuple[float, float]:
        verdict = judge(halves(setting.trials)[0])
        return verdict.divergence_at_most, verdict.work

    return min(settings, key=rank)


def _about(setting: Setting, share: float) -> str:
    with_similar = f"{share:.1%} of the prompts' tokens were reused from similar text"
    correlation = drift_limits.rank_correlation(setting.trials)
    if correlation is None:
        return with_similar
    worst = fmean(it.drift for it in setting.trials if it.drift is not None)
    return (
        f"{with_similar}; the largest boundary drift of a request (mean {worst:.2f}) has rank "
        f"correlation {correlation:.2f} with KL"
    )
