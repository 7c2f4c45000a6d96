# SPDX-License-Identifier: Apache-2.0
"""Steady state: documents come and go in a nearly full pool, while requests reuse them.

    python -m tests.stateful.churn [--requests 20000] [--spread]

vLLM's own scheduler and pool without a model (`world`), so that hours of traffic take minutes.
Somebody else holds as many blocks as it takes to keep 95 % of the pool in use. Documents that were
evicted and that a prompt has contained are computed again, as the service of knowledge bases does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from tests.stateful.world import Ask, Setup, World
from vllm_segreuse.plan import FreezeOrder

USAGE = 0.95
NUM_BLOCKS = 1800  # 5 % of them take the requests that run at a time, and little more
DOCUMENTS = 40  # at a time; 4 blocks each
DOCUMENT_TOKENS = 15
KEYS = ("base",)
OPTIONS = {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 4}


@dataclass
class Outcome:
    """Of one run.

    Attributes:
        usage: mean share of the blocks in use.
        first, last: reused share of the passages' tokens in the first and the last tenth.
        given_back: documents evicted under pressure.
        spread_plans: plans that were carried out over several steps.
    """

    requests: int = 0
    failed: int = 0
    documents: int = 0
    given_back: int = 0
    preemptions: int = 0
    spread_plans: int = 0
    usage: float = 0.0
    first: float = 0.0
    last: float = 0.0


def churn(requests: int, seed: int = 0, check_every: int = 50, spread: bool = False) -> Outcome:
    """Run that many requests.

    Args:
        spread: whether plans are carried out over several steps where others run.

    Raises:
        AssertionError: an invariant of `World` does not hold; above all, blocks leak.
    """
    setup = Setup(
        NUM_BLOCKS,
        max_step_tokens=64,
        max_running=4,
        spread_tokens=int(spread),
        frozen_pressure=0.98,
        frozen_share=0.8,
    )
    return _Churn(World(setup), Random(seed)).run(requests, check_every)


class _Churn:
    def __init__(self, world: World, dice: Random) -> None:
        self.world = world
        self.reports: dict[str, Any] = {}
        world.reports = self.reports
        self.dice = dice
        self.outcome = Outcome()
        self.active: dict[str, list[int]] = {}
        self.shares: list[float] = []
        self.usages: list[float] = []

    def run(self, requests: int, check_every: int) -> Outcome:
        for _ in range(DOCUMENTS):
            self.replace_one()
            self.step()
        for number in range(requests):
            self.replace_one()
            self.fill()
            self.ask()
            while len(self.world.live) > 3:
                self.step()
            if number % check_every == 0:
                self.world.check()
        self.world.drain()
        self.collect()
        outcome, tenth = self.outcome, max(1, requests // 10)
        outcome.requests = requests
        outcome.failed = requests - len(self.shares)
        outcome.given_back = self.world.side.call("frozen")["given_back"]
        outcome.preemptions = self.world.counts["preemptions"]
        outcome.spread_plans = self.world.worker.spread_plans
        outcome.usage = sum(self.usages) / len(self.usages)
        outcome.first = sum(self.shares[:tenth]) / tenth
        outcome.last = sum(self.shares[-tenth:]) / tenth
        return outcome

    def replace_one(self) -> None:
        """A document is deleted, another is added."""
        while len(self.active) >= DOCUMENTS:
            name = self.dice.choice(list(self.active))
            del self.active[name]
            self.world.unfreeze([name])
        self.outcome.documents += 1
        name = f"doc{self.outcome.documents}"
        self.active[name] = [self.dice.randrange(10, 10**6) for _ in range(DOCUMENT_TOKENS)]
        self.ingest(name)

    def ingest(self, name: str) -> None:
        tokens = [2, *self.active[name]]
        order = FreezeOrder(name, 0, 1, 1)
        self.world.add(Ask(tokens=tokens, keys=KEYS, max_tokens=1, freeze=order))

    def ask(self) -> None:
        """Three passages behind new text each."""
        tokens: list[int] = []
        for name in self.dice.sample(list(self.active), min(3, len(self.active))):
            tokens += [self.dice.randrange(10, 10**6) for _ in range(3)] + self.active[name]
        self.world.add(Ask(tokens=[*tokens, 9], keys=KEYS, options=OPTIONS, max_tokens=4))

    def fill(self) -> None:
        """Somebody else holds what is missing to the usage that is wanted."""
        pool = self.world.pool
        total = pool.num_gpu_blocks - 1
        self.world.release()
        spare = pool.num_free_blocks() - round((1 - USAGE) * total)
        if spare > 0:
            self.world.hold(spare)
        self.usages.append(1 - pool.num_free_blocks() / total)

    def step(self) -> None:
        self.world.step()
        self.collect()
        for name in self.world.side.call("frozen")["wanted"]:
            if name in self.active:
                self.ingest(name)

    def collect(self) -> None:
        """Reused share of the requests that have ended."""
        finished = self.world.finished
        while finished:
            request = finished.popleft()
            if request.num_prompt_tokens <= DOCUMENT_TOKENS + 1:
                continue  # a document
            report = self.reports.pop(request.request_id)
            passages = request.num_prompt_tokens // (DOCUMENT_TOKENS + 3) * DOCUMENT_TOKENS
            reused = report["prefix_tokens"] + report["reused_tokens"]
            self.shares.append(min(1.0, reused / passages))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Churn of knowledge bases in a full pool.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spread", action="store_true", help="plans over several steps")
    options = parser.parse_args()
    outcome = churn(options.requests, options.seed, spread=options.spread)
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
