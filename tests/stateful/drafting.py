# SPDX-License-Identifier: Apache-2.0
"""A worker with a drafter: some drafts are what it samples, and the KV of the others is garbage."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from tests.stateful.worker import APPROXIMATE, Running, Worker
from vllm_segreuse.plan import ReusePlan

NOTHING = 999
"""A draft that is never sampled."""

_RIGHT = 0.6  # of the drafts

_PLACEHOLDER = -1
"""The scheduler's, where only the worker knows its drafts."""


class DraftingWorker(Worker):
    """As a worker whose runner verifies drafts: in a step it computes them behind the last token,
    and samples behind each until one was wrong."""

    accepted = rejected = 0

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._drafts = {name: [*ids] for name, ids in step.scheduled_spec_decode_tokens.items()}
        self._dice = Random(self.num_steps)
        return super().run(step)

    def update_requests(self, step: SchedulerOutput) -> dict[str, int]:
        starts = super().update_requests(step)
        # The scheduler counts drafts as computed before it knows that they were wrong.
        return {
            name: start
            if self._requests[name].is_new
            else min(start, len(self._requests[name].tokens) - 1)
            for name, start in starts.items()
        }

    def check_plan(
        self,
        plan: ReusePlan,
        request: Running,
        scheduled: dict[str, int],
        starts: dict[str, int],
    ) -> None:
        drafts = {name: len(self._drafts.get(name, ())) for name in scheduled}
        own = {name: count - drafts[name] for name, count in scheduled.items()}
        super().check_plan(plan, request, own, starts)

    def forward(self, name: str, start: int, count: int) -> list[int]:
        request, drafts = self._requests[name], self._drafts.get(name, [])
        was_new = request.is_new
        known = min(count - len(drafts), len(request.tokens) - start)
        sampled = super().forward(name, start, known)
        for place, draft in enumerate(drafts if sampled else ()):
            at = len(request.tokens) - 1
            has_slot = at < len(request.blocks) * self.block_size
            if not has_slot or not self._is_right(draft, request, was_new):
                self.rejected += len(drafts) - place
                self._spoil(request, at, len(drafts) - place)
                break
            self.accepted += 1
            self.histories.of(request.identity, request.tokens, request.history)
            sampled += super().forward(name, at, 1)
        return sampled

    def _is_right(self, draft: int, request: Running, was_new: bool) -> bool:
        if draft == _PLACEHOLDER:  # it has drafted nothing for who has just come
            return not was_new and self._dice.random() < _RIGHT
        return draft == request.tokens[-1]

    def _spoil(self, request: Running, start: int, count: int) -> None:
        """Drafts were computed that nobody will read."""
        stop = min(start + count, len(request.blocks) * self.block_size)
        if start < stop:
            slots = self.slots(request.blocks, start, stop)
            self.token[slots], self.history[slots] = NOTHING, APPROXIMATE
            self.position[slots] = np.arange(start, stop)

    def draft(self, requests: list[Request], most: int) -> DraftTokenIds:
        """Drafts for requests that decode, as the worker returns them behind a step.

        Args:
            most: drafts of a request.
        """
        names: list[str] = []
        drafts: list[list[int]] = []
        for request in requests:
            running: Any = self._requests.get(request.request_id)
            is_behind = request.num_computed_tokens < request.num_tokens - 1
            if running is None or is_behind or request.is_prefill_chunk:
                continue
            names.append(request.request_id)
            drafts.append(self._continued(running, [*request.all_token_ids], most))
        return DraftTokenIds(names, drafts)

    def _continued(self, running: Running, tokens: list[int], most: int) -> list[int]:
        found: list[int] = []
        for _ in range(self._dice.randint(0, most)):
            known = self.histories.of(running.identity, tokens + found, [])
            guess = Running(running.identity, running.seed, [], [], known)
            found.append(self._sample(guess) if self._dice.random() < _RIGHT else NOTHING)
        return found
