# SPDX-License-Identifier: Apache-2.0
"""What healing gives the next turn, and what it costs who comes meanwhile.

Two servers, one of which heals, get the same conversations by turns, an edit each. Behind the edit
others send plain prompts at random times; while they pause, the healing server computes the turn in
full. Then the conversation goes on. Only one of the servers has anything to do at a time.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np

from bench import harness
from bench.agents.arms import Arm
from bench.edits import serving
from bench.edits.conversations import Conversation
from bench.edits.edits import Edit
from bench.edits.writing import Writer
from bench.harness import SuiteResult
from bench.quality.statistics import FloatArray

OTHERS = 12
"""Prompts of others behind each edit."""
OTHER_TOKENS = 256
MEAN_GAP_S = 0.5
MOST_REST_S = 120.0
_RESAMPLES = 2000
_ENDED = re.compile(r"^vllm:segreuse_healings_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Rested:
    """One conversation on one server.

    Attributes:
        heals: whether the server does.
        conversation: which.
        next_prompt, next_prefix: tokens of the next turn's prompt, and of its prefix hit.
        next_ttft_s: of that turn.
        others_s: to the first token of each prompt of others.
    """

    heals: bool
    conversation: int
    next_prompt: int
    next_prefix: int
    next_ttft_s: float
    others_s: tuple[float, ...]


def measure(
    model: Path,
    options: Mapping[str, Any],
    heal_tokens: int,
    writer: Writer,
    conversations: Sequence[Conversation],
    edit: Edit,
    arm: Arm,
) -> Iterator[list[Rested]]:
    """All conversations on both servers.

    Raises:
        ServerError: one of them does not start.
        BenchError: a turn was not healed in time.
    """
    with ExitStack() as stack:
        clients = [
            stack.enter_context(serving.asking(model, {**options, "heal_tokens": tokens}, writer))
            for tokens in (0, heal_tokens)
        ]
        for number, before in enumerate(harness.progress(conversations, "healing")):
            for heals in harness.rotated((False, True), number):
                yield [_rested(clients[heals], heals, before, edit, arm)]


def _rested(
    client: serving.Client, heals: bool, before: Conversation, edit: Edit, arm: Arm
) -> Rested:
    client.reset()
    edited = client.edited(before, edit, arm)
    ended = _healings(client)
    client.ask(edited.prompt(0), edited.body(0), serving.ANSWER_TOKENS)
    others = _others(client, Random(f"others {before.number}"))
    until = time.monotonic() + MOST_REST_S
    while heals and _healings(client) == ended:
        if time.monotonic() > until:
            raise harness.BenchError(f"a turn was not healed within {MOST_REST_S:.0f} s")
        time.sleep(0.2)
    found = client.ask(edited.prompt(1), edited.body(1), serving.ANSWER_TOKENS)
    tokens = found.tokens
    return Rested(heals, before.number, tokens.prompt, tokens.prefix, found.ttft_s, tuple(others))


def _healings(client: serving.Client) -> float:
    """Turns that were healed, or given up, so far."""
    text = httpx.get(f"{client.url}/metrics", timeout=30).text
    return sum(map(float, _ENDED.findall(text)))


def _others(client: serving.Client, rng: Random) -> list[float]:
    """Seconds to the first token of each; they come whether or not the ones before are answered."""
    seconds = [0.0] * OTHERS

    def ask(number: int, prompt: list[int]) -> None:
        seconds[number] = client.ask(prompt, {"cache_salt": "others"}, 1).ttft_s

    threads = []
    for number in range(OTHERS):
        prompt = [rng.randrange(1000, 20_000) for _ in range(OTHER_TOKENS)]
        threads.append(threading.Thread(target=ask, args=(number, prompt)))
        threads[-1].start()
        time.sleep(rng.expovariate(1 / MEAN_GAP_S))
    for thread in threads:
        thread.join()
    return seconds


def result_of(rested: Sequence[Rested]) -> SuiteResult:
    """Figures: shares of the next prompt that are an exact prefix, and p99 of others.

    Raises:
        BenchError: nothing was measured on one of the servers.
    """
    if len({one.heals for one in rested}) < 2:
        raise harness.BenchError("no conversation was measured with and without healing")
    rows, others = [], {}
    for heals in (False, True):
        mine = [one for one in rested if one.heals is heals]
        others[heals] = [seconds for one in mine for seconds in one.others_s]
        rows.append(
            {
                "heals": heals,
                "conversations": len(mine),
                "next_prefix_share": statistics.fmean(
                    one.next_prefix / one.next_prompt for one in mine
                ),
                "next_ttft_s": statistics.median(one.next_ttft_s for one in mine),
                "others": len(others[heals]),
                "others_p50_s": statistics.median(others[heals]),
                "others_p99_s": float(np.quantile(others[heals], 0.99)),
            }
        )
    low, high = _interval(others[True], others[False])
    summary = {
        "healed_prefix_share": rows[1]["next_prefix_share"],
        "next_ttft_over_unhealed": rows[1]["next_ttft_s"] / rows[0]["next_ttft_s"],
        "others_p99_over_unhealed": rows[1]["others_p99_s"] / rows[0]["others_p99_s"],
        "others_p99_over_unhealed_low": low,
        "others_p99_over_unhealed_high": high,
    }
    return {"rows": [*rows, *map(asdict, rested)], "summary": summary}


def _interval(mine: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Of 95 % for the ratio of two 99th percentiles, by bootstrap of both."""
    rng = np.random.default_rng(0)

    def drawn(values: Sequence[float]) -> FloatArray:
        chosen = rng.choice(np.asarray(values), (_RESAMPLES, len(values)))
        return np.quantile(chosen, 0.99, axis=1)

    low, high = np.quantile(drawn(mine) / drawn(theirs), (0.025, 0.975))
    return float(low), float(high)
