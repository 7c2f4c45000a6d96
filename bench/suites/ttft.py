# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a prompt made of known documents in a new order.

Four documents of 2,048 tokens were each computed once, alone. Every measured prompt is new to the
prefix cache: 37 fresh tokens, the documents in another order (so at odd offsets), 64 fresh tokens.

`full` sends it without extra keys: vLLM's own prefill. `shift` moves the documents' KV only.
`sparsex` also recomputes 10 % of it, with no dense layer. `hybrid` computes 15 % of the layers for
every token, and then 10 %. `prophet` recomputes the 10 % that the question attends to, at all
layers; `focus`, the default policy, does so with a share of 10 %, and `default` with its own budget
for documents that were computed alone. `hit` is a bound: all but the question is in vLLM's own
prefix cache. All modes take turns, in an order that changes every round.

A speed-up is the median of the rounds' own ratios, with its interval of 95 %.
"""

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench import engine, harness, shapes

DOCUMENTS = 4
DOCUMENT_TOKENS = 2048
PREAMBLE_TOKENS = 37
QUESTION_TOKENS = 64
PROMPT_TOKENS = PREAMBLE_TOKENS + DOCUMENTS * DOCUMENT_TOKENS + QUESTION_TOKENS
MAX_MODEL_LEN = 16384

_NAMESPACE = ["bench-ttft"]
_FIRST_TEXT_TOKEN = 300  # below are special tokens and single bytes
_KV_SPACE_GIB = 4


class Mode(NamedTuple):
    """One way to prefill the prompt; `policy` None is vLLM's own, of a prompt in its prefix cache
    where `cached`."""

    name: str
    policy: str | None
    dense_share: float = 0.0
    recompute_ratio: float = 0.0
    cached: bool = False

    def extra_args(self) -> dict[str, Any] | None:
        """What the request carries in `SamplingParams.extra_args`."""
        if self.policy is None:
            return None
        options: dict[str, Any] = {"extra_keys": _NAMESPACE, "segreuse_policy": self.policy}
        if self.recompute_ratio:
            options["segreuse_recompute_ratio"] = self.recompute_ratio
        if self.policy == "sparsex":
            options["segreuse_dense_layers"] = self.dense_share or 0
        return options


MODES = (
    Mode("full", None),
    Mode("shift", "shift"),
    Mode("sparsex", "sparsex", recompute_ratio=0.1),
    Mode("hybrid", "sparsex", dense_share=0.15, recompute_ratio=0.1),
    Mode("prophet", "prophet", recompute_ratio=0.1),
    Mode("focus", "focus", recompute_ratio=0.1),
    Mode("default", "focus"),
    Mode("hit", None, cached=True),
)


class Prompts:
    """Documents that stay, and prompts over them that never come twice."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.documents = [self._fresh(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
        self._orders = itertools.cycle(list(itertools.permutations(range(DOCUMENTS)))[1:])

    def next(self) -> list[int]:
        """A prompt of `PROMPT_TOKENS` token ids."""
        order = next(self._orders)
        body = [token for index in order for token in self.documents[index]]
        return self.asks([*self._fresh(PREAMBLE_TOKENS), *body])

    def asks(self, context: list[int]) -> list[int]:
        """A new question behind a text."""
        return [*context, *self._fresh(QUESTION_TOKENS)]

    def _fresh(self, count: int) -> list[int]:
        return self._random.choices(range(_FIRST_TEXT_TOKEN, shapes.VOCAB_SIZE), k=count)


def run(quick: bool) -> harness.SuiteResult:
    """Measure the 8-layer shape, and unless `quick` the 28-layer shape too."""
    engine.prepare_environment(_KV_SPACE_GIB)
    rows, summary = _measure("bench8", rounds=6 if quick else 11, eager=quick)
    if not quick:
        deep_rows, deep = _measure("bench28", rounds=9, eager=False)
        rows += deep_rows
        summary |= {f"{key}_deep": value for key, value in deep.items()}
    return {"rows": rows, "summary": summary}


def _measure(shape: str, rounds: int, eager: bool) -> tuple[list[harness.Row], dict[str, float]]:
    layers = int(shapes.SHAPES[shape].config["num_hidden_layers"])
    prompts = Prompts(seed=layers)
    taken: dict[str, list[engine.Timed]] = {mode.name: [] for mode in MODES}
    with engine.engine(
        shapes.make_model(shape), segreuse=True, max_model_len=MAX_MODEL_LEN, enforce_eager=eager
    ) as llm:
        for document in prompts.documents:
            engine.first_token(llm, document, {"extra_keys": _NAMESPACE})
        cached = prompts.next()[:-QUESTION_TOKENS]
        for turn in harness.progress(range(rounds + 1), f"ttft {shape}"):
            # Now, so that nothing has evicted it.
            engine.first_token(llm, cached)
            for mode in harness.rotated(MODES, turn):
                prompt = prompts.asks(cached) if mode.cached else prompts.next()
                timed = _first_token(llm, mode, prompt)
                if turn > 0:  # the first round warms up
                    taken[mode.name].append(timed)
    rows = [_row(shape, eager, mode, taken[mode.name]) for mode in MODES]
    return rows, _summary(rows, taken)


def _first_token(llm: Any, mode: Mode, prompt: list[int]) -> engine.Timed:
    timed = engine.first_token(llm, prompt, mode.extra_args())
    if mode.policy is not None:
        # Every document must come from its donor, whole; a stray token may match by chance.
        engine.require_reuse(timed, mode.policy, DOCUMENTS * DOCUMENT_TOKENS)
    elif mode.cached:
        missing = len(prompt) - timed.cached_tokens - QUESTION_TOKENS
        if missing > engine.BLOCK_TOKENS:
            raise harness.BenchError(f"{missing} tokens were not in the prefix cache")
    elif timed.cached_tokens or timed.report:
        raise harness.BenchError(
            f"full prefill is the baseline, but {timed.cached_tokens} of its tokens were cached "
            f"and its report is {timed.report}"
        )
    return timed


def _row(shape: str, eager: bool, mode: Mode, taken: list[engine.Timed]) -> harness.Row:
    times = [timed.ms for timed in taken]
    share = 1 - taken[-1].cached_tokens / PROMPT_TOKENS
    nothing = {"reused_tokens": 0, "recomputed_tokens": 0, "computed_share": share}
    report = taken[-1].report or nothing
    reused, recomputed = report["reused_tokens"], report["recomputed_tokens"]
    if mode.policy is not None and recomputed < int(mode.recompute_ratio * reused):
        raise harness.BenchError(f"{mode.name} recomputed only {recomputed} of {reused} tokens")
    return {
        "shape": shape,
        "mode": mode.name,
        "execution": "eager" if eager else "compiled",
        "prompt_tokens": PROMPT_TOKENS,
        "reused": reused,
        "recomputed": recomputed,
        "computed_share": report["computed_share"],
        "median_ms": statistics.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "rounds": len(times),
    }


def _summary(
    rows: list[harness.Row], taken: Mapping[str, Sequence[engine.Timed]]
) -> dict[str, float]:
    by_mode = {row["mode"]: row for row in rows}
    ms = {mode: float(row["median_ms"]) for mode, row in by_mode.items()}
    summary = {f"{mode}_ms": value for mode, value in ms.items()}
    for mode in (name for name in ms if name != "full"):
        # Of the ratios of each round, not of the medians: both ran in the same minute, and the
        # interval is about the same figure.
        ratios = [full.ms / mine.ms for full, mine in zip(taken["full"], taken[mode], strict=True)]
        low, high = harness.median_interval(ratios)
        name = f"{mode}_speedup"
        summary |= {name: harness.median(ratios), f"{name}_low": low, f"{name}_high": high}
    summary["shift_against_hit"] = ms["shift"] / ms["hit"]
    # 1.0: every layer-token of the hybrid mode costs what it costs in a full prefill.
    summary["hybrid_efficiency"] = summary["hybrid_speedup"] * by_mode["hybrid"]["computed_share"]
    return summary
