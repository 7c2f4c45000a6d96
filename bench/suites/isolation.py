# SPDX-License-Identifier: Apache-2.0
"""Whether time tells a stranger what is cached for somebody else.

Somebody has documents computed under extra keys or a salt of their own. A stranger asks about these
and about documents that nobody has, and measures the time to the first token of each. `auc` is how
often the unknown document takes longer; 0.5 tells nothing. That it does so is said only where the
95 % interval of the pooled `auc` lies within `MARGIN` of 0.5, where the clock was fine enough
(`control_auc`, the same for documents of the stranger's own), and where nobody else computed on the
machine: noise draws any `auc` to 0.5.
"""

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from bench import engine, harness, shapes

SHAPE = "qwen3"
DOCUMENT_TOKENS = 768
MARGIN = 0.05
"""Fixed before measuring: at an AUC of 0.55 whoever has one probe of each of two documents guesses
right 11 times in 20, not 10, and a probe cannot be repeated: it leaves the document cached for the
stranger, too."""
LEAST_CONTROL = 0.9
"""Of an interval of `control_auc`, at least: else the clock would not show a reuse if there was."""
MOST_OTHERS = 0.1
"""Cores that others may use in the mean while this measures."""
_LEAST = 1e-12
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
    rounds = 40 if quick else 300
    engine.prepare_environment(1)
    dice = random.Random(0)
    rows: list[harness.Row] = []
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with engine.engine(
        shapes.make_model(SHAPE), segreuse=True, max_model_len=1024, enforce_eager=True
    ) as llm:
        used = Used.now()
        for arm in ARMS:
            taken = probe(llm, arm, rounds, dice)
            rows.append({"arm": arm.name, **figures(taken)})
            for kind in KINDS:
                # Of arms with other prompts: only their order within an arm counts.
                times[kind] += list(np.asarray(taken[kind]) / np.median(taken["nowhere"]))
        others = Used.now().others_since(used)
    found = figures(times)
    summary = {**found, "margin": MARGIN, "others_cores": round(others, 3)}
    return {"rows": rows, "summary": {**summary, "verdict": verdict(found, others)}}


class Used(NamedTuple):
    """Seconds: of the clock, of all cores in use, and of those by this process."""

    clock: float
    all: float
    own: float

    @classmethod
    def now(cls) -> "Used":
        """Since start-up. Time that a hypervisor gave to others counts as used."""
        user, nice, system, _idle, _wait, irq, soft_irq, steal = (
            int(field) for field in Path("/proc/stat").read_text().split()[1:9]
        )
        ticks = user + nice + system + irq + soft_irq + steal
        own = os.times()
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), sum(own[:4]))

    def others_since(self, before: "Used") -> float:
        """Cores that others used in the mean."""
        of_others = (self.all - before.all) - (self.own - before.own)
        return max(0.0, of_others / (self.clock - before.clock))


def verdict(found: dict[str, float], others: float) -> str:
    """What the figures say of the clock.

    Args:
        found: of `figures`.
        others: cores that others used.
    """
    if others > MOST_OTHERS:
        return f"none: others used {others:.2f} cores, and noise hides a difference"
    if found["control_low"] < LEAST_CONTROL:
        return f"none: the control's AUC may be {found['control_low']:.2f}, too little"
    if abs(found["auc_low"] - 0.5) < MARGIN and abs(found["auc_high"] - 0.5) < MARGIN:
        return f"within {MARGIN} of 0.5"
    if found["auc_low"] > 0.5 or found["auc_high"] < 0.5:
        return "time tells"
    return f"open: {found['probes']:.0f} probes are too few"


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
    """`auc` and the control's, with their intervals; `probes` of each kind."""
    found: dict[str, float] = {"probes": len(taken["nowhere"])}
    for name, fast in (("auc", "elsewhere"), ("control", "own")):
        area = auc(taken["nowhere"], taken[fast])
        low, high = interval(area, len(taken["nowhere"]), len(taken[fast]))
        found |= {f"{name}_low": low, f"{name}_high": high}
        found["auc" if name == "auc" else "control_auc"] = area
    return found


def auc(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Probability that a value of `slow` is larger than one of `fast`; ties count half."""
    order = np.sort(fast)
    below = np.searchsorted(order, slow, side="left")
    up_to = np.searchsorted(order, slow, side="right")
    return float((below + up_to).mean() / (2 * len(order)))


def interval(area: float, slow: int, fast: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of an AUC: right at 0 and 1, too, where a bootstrap has width 0.

    Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic,
    part 2" (Statistics in Medicine 25, 2006), method 5: every area from which the one that was
    found is no more than 1.96 of its own standard errors away, by the variance of Hanley and McNeil
    (1982). What both kinds have in common in a round (load) makes it wider than it had to be.

    Args:
        area: that was found.
        slow, fast: numbers of values.
        confidence: of the interval.

    Raises:
        ValueError: no values.
    """
    if slow < 1 or fast < 1:
        raise ValueError(f"no AUC of {slow} and {fast} values")
    quantile = float(stats.norm.ppf((1 + confidence) / 2))
    more = (slow + fast) / 2 - 1

    def too_far(supposed: float) -> float:
        spread = 1 + more * ((1 - supposed) / (2 - supposed) + supposed / (1 + supposed))
        error = supposed * (1 - supposed) * spread / (slow * fast)
        return (area - supposed) ** 2 - quantile**2 * error

    low = 0.0 if area == 0 else float(optimize.brentq(too_far, 0, area - _LEAST))
    high = 1.0 if area == 1 else float(optimize.brentq(too_far, area + _LEAST, 1))
    return low, high


def _ask(llm: Any, who: Who, tokens: list[int]) -> engine.Timed:
    return engine.first_token(llm, tokens, {"extra_keys": who.keys, **_SHIFT}, who.salt)


def _tokens(count: int, dice: random.Random) -> list[int]:
    return dice.choices(range(300, shapes.VOCAB_SIZE), k=count)
