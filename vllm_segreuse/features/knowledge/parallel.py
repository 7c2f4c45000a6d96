# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one API server (vLLM's `--data-parallel-size`).

Each has a KV cache and a frozen pool of its own, and requests may reach any of them. So each
computes every document, and a document is warm once it is so on all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from vllm_segreuse.features.knowledge.answers import State
from vllm_segreuse.features.knowledge.engine import Answer, ServedEngine
from vllm_segreuse.features.knowledge.scheduler_calls import call_schedulers
from vllm_segreuse.plan import FreezeOrder


class ParallelEngines(ServedEngine):
    """All engines of an API server, as one.

    Args:
        client: vLLM's `AsyncLLM`.
        number: how many engines it has.
    """

    def __init__(self, client: Any, number: int) -> None:
        super().__init__(client)
        self._number = number

    def num_others(self, own: int) -> int:
        """Each computation of ours is a request to every engine."""
        return super().num_others(own * self._number)

    async def compute(self, tokens: list[int], extra_key: str, order: FreezeOrder) -> bool:
        """On every engine; one that has it finds it in its prefix cache, and freezes nothing twice.

        Returns:
            Whether it is frozen on all.
        """
        computing = (self.compute_on(it, tokens, extra_key, order) for it in range(self._number))
        return all(await _of_all(computing))

    async def answers(
        self, tokens: list[int], extra_args: Mapping[str, Any], **sampling: Any
    ) -> list[Answer]:
        """Of every engine."""
        ranks = range(self._number)
        return await _of_all(self.answer_on(it, tokens, extra_args, **sampling) for it in ranks)

    async def frozen(self) -> dict[str, Any]:
        """Of all engines (`merged`)."""
        return merged(await call_schedulers(self._client, "segreuse_call", "frozen"))

    async def unfreeze(self, entries: list[str]) -> None:
        """On every engine."""
        await call_schedulers(self._client, "segreuse_call", "unfreeze", entries)


async def _of_all(asked: Iterable[Awaitable[Any]]) -> list[Any]:
    """Nothing is said of one before all have ended: the next order may be for the same entry."""
    found = await asyncio.gather(*asked, return_exceptions=True)
    if failed := [one for one in found if isinstance(one, BaseException)]:
        raise failed[0]
    return found


_LEAST = ("total", "free", "limit", "frozen_limit")


def merged(states: Sequence[State]) -> dict[str, Any]:
    """What holds for all engines: there is room where each has room, and warm is what is so on
    each. Stored is what is stored or warm on each; `engines` has the states themselves."""
    first, *others = states
    names = set(first["warm"]).intersection(*(state["warm"] for state in others))
    stored = set.intersection(*({*state["warm"], *state["stored"]} for state in states))
    used = set().union(*(state["uses"] for state in states))
    return {
        "engines": list(states),
        "block_size": first["block_size"],
        **{name: min(state[name] for state in states) for name in _LEAST},
        "frozen": max(state["frozen"] for state in states),
        "given_back": sum(state["given_back"] for state in states),
        "warm": {name: _warm([state["warm"][name] for state in states]) for name in names},
        "stored": {name: _place(name, states) for name in sorted(stored - names)},
        "uses": {
            name: _use([state["uses"][name] for state in states if name in state["uses"]])
            for name in used
        },
        "wanted": sorted(set().union(*(state["wanted"] for state in states))),
    }


def _warm(entries: Sequence[tuple[int, int]]) -> list[int]:
    """The most blocks that it holds on an engine; readers on all."""
    return [max(blocks for blocks, _ in entries), sum(readers for _, readers in entries)]


def _place(name: str, states: Sequence[State]) -> str:
    """The slowest of those that engines read it from."""
    return "disk" if any(state["stored"].get(name) == "disk" for state in states) else "host"


def _use(uses: Sequence[tuple[int, float]]) -> list[float]:
    """All of them; the last."""
    return [sum(hits for hits, _ in uses), max(last for _, last in uses)]
