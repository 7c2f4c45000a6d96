# SPDX-License-Identifier: Apache-2.0
"""One seed, one run: an engine of that seed's making under a mix of requests, and faults.

    python -m tests.stateful.simulation --seed 17          replays it
    python -m tests.stateful.simulation --seed 17 --trace  and prints every event

Phases of different mixes follow each other, so that one run sees crowds, silence, slow workers and
disturbances. The same seed gives the same events (`Result.digest`).
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from tests.stateful.faults import OTHERS, SITES, Faults
from tests.stateful.world import DENSE_LAYERS, DOCUMENTS, MAX_DRIFTS, RATIOS, Ask, Setup, World
from vllm_segreuse.policies import POLICIES

REQUESTS = 300
"""Requests of one run."""

_THOROUGH = 16  # the index's own links are walked at every so many events

# Weight of each event, by phase.
_PHASES: dict[str, dict[str, int]] = {
    "crowd": {"arrive": 12, "step": 10, "schedule": 4, "complete": 4, "abort": 1},
    "calm": {"arrive": 2, "step": 10, "go_on": 2},
    "slow worker": {"arrive": 6, "schedule": 12, "complete": 4, "abort_under_way": 3},
    "talks": {"go_on": 6, "arrive": 2, "step": 10},
    "faults": {"arrive": 8, "step": 12, "go_on": 2, "fault": 4, "abort_twice": 1},
    "disturbed": {"arrive": 8, "step": 12, "disturb": 3, "abort": 1, "fault": 1},
    "holes": {"arrive": 6, "go_on": 4, "step": 12, "evict": 4},
}


class SimulationError(AssertionError):
    """A seed that failed, and how to replay it."""


@dataclass
class Result:
    """What a run did.

    Attributes:
        digest: changes with every event and its outcome.
        counts: events, requests that finished, plans, copied tokens, preemptions, faults by place.
    """

    seed: int
    digest: int = 0
    counts: Counter[str] = field(default_factory=Counter)


def simulate(
    seed: int, requests: int = REQUESTS, trace: bool = False, same_context: float = 0.0
) -> Result:
    """Run one seed to its end.

    Args:
        same_context: share of the requests that reuse in the same context only.

    Raises:
        SimulationError: an invariant did not hold, or something raised; names the command.
    """
    run = _Run(seed, trace, same_context)
    try:
        run.to_the_end(requests)
    except Exception as error:
        raise SimulationError(
            f"seed {seed} failed at event {run.result.counts['events']} ({run.last}): "
            f"{type(error).__name__}: {error}\n"
            f"replay: python -m tests.stateful.simulation --seed {seed} --requests {requests} "
            f"--same-context {same_context} --trace"
        ) from error
    return run.result


class _Run:
    def __init__(self, seed: int, trace: bool, same_context: float) -> None:
        self.result = Result(seed)
        self.last = "start"
        self._trace = trace
        self._random, self._once = Random(seed), Random(f"once {seed}")
        self._same, self._same_context = Random(f"same {seed}"), same_context
        self._setup = self._make_setup()
        self._world = World(self._setup)
        self._faults = Faults(self._world)
        self._note(str(self._setup))

    def to_the_end(self, requests: int) -> None:
        world, random = self._world, self._random
        while len(world.identities) < requests:
            phase = random.choice(list(_PHASES))
            mix = _PHASES[phase]
            for _ in range(random.randint(10, 60)):
                event = random.choices(list(mix), list(mix.values()))[0]
                outcome = getattr(self, "_" + event)()
                self._note(f"{phase}: {event} {outcome}")
                world.check(thorough=self.result.counts["events"] % _THOROUGH == 0)
            self._calm_down()
        self.last = "drain"
        self._faults.disarm()
        world.drain()
        self._count()

    def _note(self, event: str) -> None:
        self.last = event
        self.result.counts["events"] += 1
        world = self._world
        pool = [world.pool.get_num_free_blocks(), len(world.index), len(world.live)]
        line = f"{event} {pool} {world.worker.copied_tokens}"
        self.result.digest = zlib.crc32(line.encode(), self.result.digest)
        if self._trace:
            print(self.result.counts["events"], line, flush=True)

    def _count(self) -> None:
        world, counts = self._world, self.result.counts
        counts.clear()
        counts.update(world.counts)
        counts["copied tokens"] = world.worker.copied_tokens
        counts["exact tokens"] = world.worker.exact_tokens
        counts["kept tokens"] = world.worker.kept_tokens
        counts["tokens in their context"] = world.worker.in_context_tokens
        counts["restored tokens"] = world.worker.rows.restored
        counts["stored blocks"] = world.worker.rows.stored
        counts["spread plans"] = world.worker.spread_plans
        counts.update({f"fault: {site}": n for site, n in self._faults.raised.items()})

    # Events. What they return goes into the digest.

    def _arrive(self) -> str:
        ask, n = self._make_ask(), self._random.choice([1] * 8 + [2, 3])
        first = self._world.add(ask)
        ask.tokens = list(first.prompt_token_ids or [])
        for ask.seed in range(1, n):
            self._world.add(ask)
        return f"{first.request_id} x {n}: {ask.tokens} {ask.keys} {ask.salt}"

    def _go_on(self) -> str:
        if not self._world.finished:
            return "nothing"
        before = self._random.choice(list(self._world.finished))
        identity, _ = self._world.identities[before.request_id]
        ask = self._make_ask()
        ask.tokens = [*before.all_token_ids[:], *ask.tokens[:9]]
        ask.keys, ask.salt, ask.lora = identity.keys, identity.salt, identity.lora is not None
        return self._world.add(ask).request_id

    def _step(self) -> None:
        self._world.step()

    def _schedule(self) -> Any:
        if not self._world.may_schedule:
            return "not"
        return list(self._world.schedule().num_scheduled_tokens.items())

    def _complete(self) -> str:
        if not self._world.under_way:
            return "nothing"
        self._world.complete()
        return f"{self._world.counts['finished']} finished"

    def _abort(self, times: int = 1) -> str:
        if not self._world.live:
            return "nobody"
        request = self._random.choice(self._world.live)
        for _ in range(times):
            self._world.abort(request)
        return request.request_id

    def _abort_twice(self) -> str:
        """The end of a request is reported twice, to vLLM and to the connector itself."""
        if not self._world.live:
            return "nobody"
        request = self._random.choice(self._world.live)
        self._world.abort(request)
        self._world.abort(request)
        assert self._world.scheduler.connector.request_finished(request, [])[1] is None
        return request.request_id

    def _abort_under_way(self) -> str:
        """A request goes while the step that computes it is under way; its output comes later."""
        scheduled = [i for step, _ in self._world.under_way for i in step.num_scheduled_tokens]
        live = [request for request in self._world.live if request.request_id in scheduled]
        if not live:
            return "nobody"
        request = self._random.choice(live)
        self._world.abort(request)
        return request.request_id

    def _fault(self) -> str:
        site = self._random.choice([*SITES, *OTHERS, "planned"])
        self._faults.arm(site)
        return site

    def _disturb(self) -> str:
        world, random = self._world, self._random
        what = random.choice(["exhaust", "release", "reset", "preempt", "switch", "pause"])
        match what:
            case "exhaust":
                world.hold(random.randint(1, self._setup.num_blocks))
            case "release":
                world.release()
            case "reset" | "preempt":
                world.reset(preempt=what == "preempt")
            case "switch":
                world.switch(random.choice([True, True, False, "observe"]))
            case "pause":
                world.pause(random.choice(list(PauseState)))
        return what

    def _evict(self) -> int:
        return self._world.evict(self._random.randint(0, 7), self._random.randint(2, 9))

    def _calm_down(self) -> None:
        """End of a phase: nothing that would make the rest of the run a standstill."""
        self._world.release()
        self._world.switch(True)
        self._world.pause(PauseState.UNPAUSED)
        self._faults.disarm()
        while len(self._world.live) > 40:
            self._world.step()
            self._world.check(thorough=False)

    def _make_setup(self) -> Setup:
        choose = self._random.choice
        return Setup(
            num_blocks=choose([20, 28, 40, 80, 160]),
            in_flight=choose([1, 2, 2, 3]),
            priority=choose([False, True]),
            max_step_tokens=choose([10, 24, 48, 96]),
            max_running=choose([2, 4, 8]),
            long_prompt_tokens=choose([0, 0, 9]),
            whole_prompts=choose([True, True, False]),
            watermark=choose([0.0, 0.05]),
            max_depth=choose([4, 4, 1, 0]),
            spread_tokens=choose([0, 1, 1, 5]),
            similarity=choose([False, True]),
            halo=choose([False, True]),
            heal_tokens=Random(f"heal {self.result.seed}").choice([0, 0, 8]),
            tier_rows=Random(f"rows {self.result.seed}").choice([0, 12, 30, 90]),
        )

    def _make_ask(self) -> Ask:
        random = self._random
        choose = random.choice
        parts = [
            (random.randrange(len(DOCUMENTS)), choose([0, 0, 0, 1, 3]), random.randint(0, 6))
            for _ in range(random.randint(1, 4))
        ]
        return Ask(
            tokens=self._world.prompt(parts),
            keys=choose([("a",), ("a",), ("a",), ("a",), ("b",), ("a", "b"), None]),
            salt=choose([None] * 7 + ["salt"]),
            lora=random.random() < 0.05,
            options={
                "segreuse_policy": choose([*POLICIES]),
                "segreuse_recompute_ratio": choose(RATIOS),
                "segreuse_dense_layers": choose(DENSE_LAYERS),
                "segreuse_overflow_tokens": choose([0, 1, None]),
                "segreuse_max_drift": choose(MAX_DRIFTS),
                "segreuse_min_reused_tokens": choose([4, 4, 8]),
                "segreuse_observe": random.random() < 0.1,
                "segreuse_explain": random.random() < 0.5,
                "segreuse_recompute_once": self._once.random() < 0.7,
                "segreuse_weigh_turns": self._once.random() < 0.3,
                "segreuse_context": "same" if self._same.random() < self._same_context else "any",
            },
            max_tokens=random.randint(1, 12),
            priority=random.randint(0, 2),
            prompt_logprobs=random.random() < 0.05,
        )


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 1 if the seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.stateful.simulation")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--same-context", type=float, default=0.0)
    parser.add_argument("--trace", action="store_true", help="print every event")
    options = parser.parse_args(arguments)
    try:
        result = simulate(options.seed, options.requests, options.trace, options.same_context)
    except SimulationError as error:
        print(error)
        return 1
    print(f"seed {result.seed}: {dict(result.counts)} digest {result.digest:08x}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
