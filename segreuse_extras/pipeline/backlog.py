# SPDX-License-Identifier: Apache-2.0
"""The plans of a worker that has one of several pipeline stages: their queue, and their steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from segreuse_extras.pipeline.endings import GoEnding, packed, packed_numbers, unpacked
from segreuse_extras.pipeline.goes import first_go
from segreuse_extras.pipeline.link import MessageKind, PlanVerdict, StageMessage
from segreuse_extras.pipeline.under_way import UnderWay
from vllm_segreuse.engine.stage import Stage
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.prefill.backlog import Backlog, fatal, log_failure, on_all_ranks
from vllm_segreuse.prefill.executor import PassReport, SparsePrefill
from vllm_segreuse.prefill.layer_runner import Onward


class Neighbours(Onward, Protocol):
    """The other stages (`link.Link`)."""

    def send_plan_ends(self, verdict: torch.Tensor, figures: torch.Tensor) -> None:
        """All of a plan's go was handed on."""

    def send_step_ends(self) -> None:
        """Nothing more of this step."""

    def receive(self) -> StageMessage:
        """The next message of the stage before."""

    def end_step(self) -> None:
        """All of a step was sent."""

    def send_endings(self, numbers: torch.Tensor) -> None:
        """Of the plans whose go has ended in this step, from the last stage to all others."""

    def receive_endings(self, count: int) -> torch.Tensor:
        """So many numbers of those that the last stage has sent."""


class StageBacklog(Backlog):
    """The plans that a worker of a stage has taken over; all of them take several steps.

    Args:
        prefill: carries them out.
        step_work: layer-tokens in one step.
        stage: of this worker.
        link: to the other stages.
        clock: seconds.
    """

    def __init__(
        self,
        prefill: SparsePrefill,
        step_work: int,
        stage: Stage,
        link: Neighbours,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(prefill, step_work)
        self._stage, self._link, self._clock = stage, link, clock
        self._queue: dict[str, UnderWay] = {}
        self._ended: deque[tuple[int, list[UnderWay], torch.Tensor | None]] = deque()
        self._step = 0

    @property
    def is_empty(self) -> bool:
        """Whether no plan is under way, and no verdict awaited."""
        return not self._queue and not self._ended

    def take(self, plans: list[ReusePlan]) -> None:
        """A step's plans: align all.

        Raises:
            ValueError: one is to be done in this step.
        """
        if at_once := [plan.request_id for plan in plans if not plan.spread]:
            raise ValueError(f"plans of {at_once} cannot be done within a step of several stages")
        with fatal([plan.request_id for plan in plans], _WHO):
            for plan in plans:
                self._begin(plan)

    def advance(self) -> dict[str, PassReport]:
        """What is known by now of plans that have ended, and a step's share of the others.

        Returns:
            Those that are done, by request.
        """
        with fatal(self._queue, _WHO), torch.inference_mode():
            done = self._settle()
            with self.prefill.after_forward():
                ended, endings = self._lead() if self._stage.is_first else self._follow()
            if not self._stage.is_last:
                self._link.send_step_ends()
            elif endings is not None:
                self._link.send_endings(endings)
            self._link.end_step()
            if ended:
                self._ended.append((self._step + self._stage.num_stages, ended, endings))
            self._step += 1
        return done

    def drop(self, request_ids: Iterable[str]) -> set[str]:
        """Requests have ended; those of them whose plan was under way, which now is not."""
        ids = set(request_ids)
        dropped = self._queue.keys() & ids
        for request_id in dropped:
            chunks = self._queue.pop(request_id).chunks
            if chunks is not None:
                chunks.close()
        for _, ended, _ in self._ended:
            for each in ended:
                if each.plan.request_id in ids and not each.is_dropped:
                    each.is_dropped = True
                    dropped.add(each.plan.request_id)
        return dropped

    def _begin(self, plan: ReusePlan, is_again: bool = False) -> UnderWay:
        """Lay a plan out, align it, and queue it."""
        started, batch = self._clock(), None
        try:
            [batch] = self.prefill.prepare([plan], self.step_work, apart=is_again).batches
        except Exception:
            if is_again:
                raise
            log_failure([plan])
        if not on_all_ranks(batch is not None):
            batch = None
        report = PassReport(self._clock() - started, 0.0, [], {})
        go = first_go(self.prefill.runner, plan, batch)
        return self._enqueue(UnderWay(plan, batch, report, is_again, go))

    def _enqueue(self, begun: UnderWay) -> UnderWay:
        if begun.batch is not None and self._stage.is_first:
            begun.chunks = self.prefill.compute_batch(begun.batch, begun.go.run)
        self._queue[begun.plan.request_id] = begun
        return begun

    def _next(self) -> UnderWay:
        return next(iter(self._queue.values()))

    def _end(self) -> UnderWay:
        ended = self._next()
        del self._queue[ended.plan.request_id]
        return ended

    def _lead(self) -> tuple[list[UnderWay], None]:
        """A step's share, on the first stage.

        Returns:
            Plans of whose go all was handed on.
        """
        ended: list[UnderWay] = []
        left = self.step_work
        while self._queue and left > 0:
            leading, started = self._next(), self._clock()
            over = leading.chunks is None
            if leading.chunks is not None:
                try:
                    left -= next(leading.chunks)
                except StopIteration as end:
                    leading.computed, over = end.value, True
            if over:
                ended.append(self._end())
                self._link.send_plan_ends(*leading.led(self.prefill.aligner.device))
            leading.report.sparse_s += self._clock() - started
        return ended, None

    def _follow(self) -> tuple[list[UnderWay], torch.Tensor | None]:
        """What the stage before has done in this step, on the same tokens.

        Returns:
            Plans of whose go all was handed on; and, of the last stage, how they have ended.
        """
        ended, verdicts, answers = [], [], []
        while (message := self._link.receive()).kind is not MessageKind.STEP_ENDS:
            following, started = self._next(), self._clock()
            if message.kind is MessageKind.STATES:
                self._compute(following, message)
            else:
                assert message.figures is not None
                assert message.verdict is not None
                figures, answer = following.told(message.figures, self._stage.is_last)
                verdict = following.with_own(message.verdict)
                ended.append(self._end())
                if self._stage.is_last:
                    verdicts.append(verdict)
                    answers.append(answer)
                else:
                    self._link.send_plan_ends(verdict, figures)
            following.report.sparse_s += self._clock() - started
        return ended, packed(verdicts, answers) if verdicts else None

    def _compute(self, following: UnderWay, message: StageMessage) -> None:
        assert message.tokens is not None
        assert message.state is not None
        runner = self.prefill.runner
        if following.batch is None:  # it is computed again: only that messages come counts
            if not self._stage.is_last:
                self._link.send_states(message.tokens, message.state)
            return
        state = runner.follow(message.tokens, message.state, following.batch, following.go.watching)
        following.followed(runner.is_finite(state).all())

    def _settle(self) -> dict[str, PassReport]:
        """Endings that are due: plans go on with their next go, or are queued again, to be computed
        in full."""
        done: dict[str, PassReport] = {}
        while self._ended and self._ended[0][0] <= self._step:
            _, ended, numbers = self._ended.popleft()
            sizes = [each.go.answer_numbers for each in ended]
            if numbers is None:
                numbers = self._link.receive_endings(packed_numbers(sizes))
            for each, ending in zip(ended, unpacked(numbers, sizes), strict=True):
                if not each.is_dropped and self._is_over(each, ending):
                    done[each.plan.request_id] = each.report
        return done

    def _is_over(self, each: UnderWay, ending: GoEnding) -> bool:
        """Whether a plan is done; else it is queued again."""
        if each.is_again:
            return True
        plan, verdict = each.plan, ending.verdict
        if verdict is PlanVerdict.FINE:
            go = each.go.then(ending.answer)
            if go is not None:
                self._enqueue(each.in_go(go))
                return False
        drift = each.go.drift(ending.answer)
        if self._stage.is_first:
            each.note(verdict, drift)
        if verdict is not PlanVerdict.FINE:
            self._begin(plan.without_copies(), is_again=True).report = each.report
        elif drift > plan.max_drift:
            self._begin(plan.in_full(), is_again=True).report = each.report
        else:
            return True
        return False


_WHO = "pipeline stages"
