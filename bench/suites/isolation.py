# SPDX-License-Identifier: Apache-2.0
"""Whether time tells a stranger what is cached for somebody else.

Somebody has documents computed under extra keys or a salt of their own. A stranger asks about these
and about documents that nobody has, and measures the time to the first token of each. `auc` is how
often the unknown document takes longer: 0.5 says nothing, and its interval of 95 % has to hold 0.5.
`control_auc` is the same for documents of the stranger's own: near 1, or the clock tells nothing.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bench import engine, harness, shapes

SHAPE = "qwen3"
DOCUMENT_TOKENS = 768
_RESAMPLES = 2000
_SHIFT = {"segreuse_policy": "shift"}


class Who(NamedTuple):
    """Whose requests these are."""

    keys: str
    salt: str | None = None


class Arm(NamedTuple):
    """What is tried: who asked before, who probes, and what stands before the document."""

    name: str
    somebody: Who
    stranger: Who
    preamble_tokens: int


ARMS = (
    Arm("extra keys, segment", Who("somebody"), Who("stranger"), 33),
    Arm("salt, segment", Who("everybody", "somebody"), Who("everybody", "stranger"), 33),
    Arm("salt, prefix", Who("everybody", "somebody"), Who("everybody", "stranger"), 0),
)
KINDS = ("elsewhere", "nowhere", "own")


def run(quick: bool) -> harness.SuiteResult:
    """Probe one engine (`quick`: fewer times)."""
    rounds = 40 if quick else 250
    engine.prepare_environment(1)
    dice = random.Random(0)
    rows: list[harness.Row] = []
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with engine.engine(
        shapes.make_model(SHAPE), segreuse=True, max_model_len=1024, enforce_eager=True
    ) as llm:
        for arm in ARMS:
            taken = probe(llm, arm, rounds, dice)
            rows.append({"arm": arm.name, "probes": rounds, **figures(taken)})
            for kind in KINDS:
                # Of arms with other prompts: only their order within an arm counts.
                times[kind] += list(np.asarray(taken[kind]) / np.median(taken["nowhere"]))
    return {"rows": rows, "summary": figures(times)}


def probe(llm: Any, arm: Arm, rounds: int, dice: random.Random) -> dict[str, list[float]]:
    """Milliseconds to the first token by kind, the kinds in random order in each round."""
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in harness.progress(range(rounds + 1), arm.name):
        documents = {kind: _tokens(DOCUMENT_TOKENS, dice) for kind in KINDS}
        _ask(llm, arm.somebody, documents["elsewhere"])
        _ask(llm, arm.stranger, documents["own"])
        for kind in dice.sample(KINDS, len(KINDS)):
            prompt = _tokens(arm.preamble_tokens, dice) + documents[kind] + _tokens(9, dice)
            answer = _ask(llm, arm.stranger, prompt)
            if (answer.cached_tokens > 0) != (kind == "own"):
                raise harness.BenchError(
                    f"{arm.name}: {answer.cached_tokens} tokens of a document that is cached "
                    f"{kind} were reused"
                )
            if turn:  # the first round warms up
                taken[kind].append(answer.ms)
    return taken


def figures(taken: dict[str, list[float]]) -> dict[str, float]:
    """`auc` with its interval, and the control."""
    low, high = interval(taken["nowhere"], taken["elsewhere"])
    return {
        "auc": auc(taken["nowhere"], taken["elsewhere"]),
        "auc_low": low,
        "auc_high": high,
        "control_auc": auc(taken["nowhere"], taken["own"]),
    }


def auc(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Probability that a value of `slow` is larger than one of `fast`; ties count half."""
    order = np.sort(fast)
    below = np.searchsorted(order, slow, side="left")
    up_to = np.searchsorted(order, slow, side="right")
    return float((below + up_to).mean() / (2 * len(order)))


def interval(slow: Sequence[float], fast: Sequence[float]) -> tuple[float, float]:
    """Percentile bootstrap of 95 % for `auc`."""
    draw = np.random.default_rng(0)
    drawn = [
        auc(draw.choice(slow, len(slow)).tolist(), draw.choice(fast, len(fast)).tolist())
        for _ in range(_RESAMPLES)
    ]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def _ask(llm: Any, who: Who, tokens: list[int]) -> engine.Timed:
    return engine.first_token(llm, tokens, {"extra_keys": who.keys, **_SHIFT}, who.salt)


def _tokens(count: int, dice: random.Random) -> list[int]:
    return dice.choices(range(300, shapes.VOCAB_SIZE), k=count)
