# SPDX-License-Identifier: Apache-2.0
"""Plans of a worker that has one of several pipeline stages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from segreuse_extras.pipeline.endings import GoEnding, packed, packed_numbers, unpacked
from segreuse_extras.pipeline.goes import Go, first_go
from segreuse_extras.pipeline.link import MessageKind, PlanVerdict, StageMessage
from vllm_segreuse.engine.stage import Stage
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.prefill import outcomes
from vllm_segreuse.prefill.backlog import Backlog, fatal, log_failure, on_all_ranks
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.executor import PassReport, SparsePrefill
from vllm_segreuse.prefill.layer_runner import Onward
from vllm_segreuse.prefill.outcomes import Computed


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


@dataclass
class _UnderWay:
    """A plan, from when it has left with a step until all stages know how it has ended.

    Attributes:
        batch: laid out and aligned; None: that failed, here or on another tensor-parallel rank.
        report: what it took here so far.
        is_again: whether it is computed in full, because of how it has ended before.
        go: which one it is in.
        before: of the first stage, what an earlier go has computed.
        chunks: of the first stage, what is left to be computed in this one.
        computed: of the first stage, once that is over.
        fine: bool `[]`, of later stages: whether no state was NaN or infinite.
        is_dropped: whether its request has ended.
    """

    plan: ReusePlan
    batch: Batch | None
    report: PassReport
    is_again: bool
    go: Go
    before: Computed | None = None
    chunks: Chunks[Computed] | None = None
    computed: Computed | None = None
    fine: torch.Tensor | None = None
    is_dropped: bool = False


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
        self._queue: dict[str, _UnderWay] = {}
        self._ended: deque[tuple[int, list[_UnderWay], torch.Tensor | None]] = deque()
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

    def _begin(self, plan: ReusePlan, is_again: bool = False) -> _UnderWay:
        """Lay a plan out, align it, and queue it."""
        started, batch = self._clock(), None
        try:
            [batch] = self.prefill.prepare([plan], self.step_work).batches
        except Exception:
            if is_again:
                raise
            log_failure([plan])
        if not on_all_ranks(batch is not None):
            batch = None
        report = PassReport(self._clock() - started, 0.0, [], {})
        go = first_go(self.prefill.runner, plan, batch)
        return self._enqueue(_UnderWay(plan, batch, report, is_again, go))

    def _enqueue(self, begun: _UnderWay) -> _UnderWay:
        if begun.batch is not None and self._stage.is_first:
            begun.chunks = self.prefill.compute_batch(begun.batch, begun.go.run)
        self._queue[begun.plan.request_id] = begun
        return begun

    def _next(self) -> _UnderWay:
        return next(iter(self._queue.values()))

    def _end(self) -> _UnderWay:
        ended = self._next()
        del self._queue[ended.plan.request_id]
        return ended

    def _lead(self) -> tuple[list[_UnderWay], None]:
        """A step's share, on the first stage.

        Returns:
            Plans of whose go all was handed on.
        """
        ended: list[_UnderWay] = []
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
                self._link.send_plan_ends(*self._led(leading))
            leading.report.sparse_s += self._clock() - started
        return ended, None

    def _led(self, leading: _UnderWay) -> tuple[torch.Tensor, torch.Tensor]:
        """The verdict and the figures of a go, on the first stage."""
        device, computed = self.prefill.aligner.device, leading.computed
        nothing = torch.zeros(0, device=device)
        if computed is None:
            failed = torch.tensor(int(PlanVerdict.FAILED), dtype=torch.int32, device=device)
            return failed, nothing
        verdict = _of((computed.batch.sound & computed.finite).all())
        if leading.before is not None:
            leading.computed = _joined(leading.before, computed)
        return verdict, leading.go.figures(nothing)

    def _follow(self) -> tuple[list[_UnderWay], torch.Tensor | None]:
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
                figures, answer = self._told(following, message.figures)
                verdict = self._with_own(following, message)
                ended.append(self._end())
                if self._stage.is_last:
                    verdicts.append(verdict)
                    answers.append(answer)
                else:
                    self._link.send_plan_ends(verdict, figures)
            following.report.sparse_s += self._clock() - started
        return ended, packed(verdicts, answers) if verdicts else None

    def _told(
        self, following: _UnderWay, so_far: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The figures of a go with this stage's, and what the last one answers."""
        go = following.go
        if following.batch is None:
            return so_far, so_far.new_zeros(go.answer_numbers, dtype=torch.float64)
        figures = go.figures(so_far)
        return figures, go.answer(figures) if self._stage.is_last else figures

    def _with_own(self, following: _UnderWay, message: StageMessage) -> torch.Tensor:
        assert message.verdict is not None
        if following.batch is None:
            return torch.zeros_like(message.verdict)  # FAILED
        verdict = message.verdict.minimum(_of(following.batch.sound.all()))
        return verdict if following.fine is None else verdict.minimum(_of(following.fine))

    def _compute(self, following: _UnderWay, message: StageMessage) -> None:
        assert message.tokens is not None
        assert message.state is not None
        runner = self.prefill.runner
        if following.batch is None:  # it is computed again: only that messages come counts
            if not self._stage.is_last:
                self._link.send_states(message.tokens, message.state)
            return
        state = runner.follow(message.tokens, message.state, following.batch, following.go.watching)
        fine = runner.is_finite(state).all()
        following.fine = fine if following.fine is None else following.fine & fine

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

    def _is_over(self, each: _UnderWay, ending: GoEnding) -> bool:
        """Whether a plan is done; else it is queued again."""
        if each.is_again:
            return True
        plan, verdict = each.plan, ending.verdict
        if verdict is PlanVerdict.FINE:
            go = each.go.then(ending.answer)
            if go is not None:
                self._enqueue(_UnderWay(plan, each.batch, each.report, False, go, each.computed))
                return False
        drift = each.go.drift(ending.answer)
        self._note(each, verdict, drift)
        if verdict is not PlanVerdict.FINE:
            self._begin(plan.without_copies(), is_again=True).report = each.report
        elif drift > plan.max_drift:
            self._begin(plan.in_full(), is_again=True).report = each.report
        else:
            return True
        return False

    def _note(self, each: _UnderWay, verdict: PlanVerdict, drift: float) -> None:
        """What is reported of a plan, by the first stage, which knows what it has computed."""
        if not self._stage.is_first:
            return
        plan, request_id = each.plan, each.plan.request_id
        positions = None
        if each.computed is None:
            ended = outcomes.Ended(plan, False, 0, float("nan"), ())
        else:
            [ended] = outcomes.read([each.computed])
            ended = ended._replace(drift=drift)
            batch, active, _ = each.computed
            wanted = [request_id] if ended.wants_positions else []
            positions = batch.positions(active, wanted).get(request_id)
        outcome, _ = ended._replace(fine=verdict is PlanVerdict.FINE).outcome(positions)
        if verdict is PlanVerdict.NOT_FINITE:
            each.report.not_finite.append(request_id)
        if plan.reports or verdict is not PlanVerdict.FINE:
            shown = outcome if plan.explains else outcome._replace(positions=None)
            each.report.outcomes[request_id] = shown


def _joined(first: Computed, second: Computed) -> Computed:
    """What two goes of a plan have computed."""
    active = torch.cat([first.active, second.active])
    return Computed(second.batch, active, first.finite & second.finite)


def _of(fine: torch.Tensor) -> torch.Tensor:
    """int32 `[]`, a `PlanVerdict`, of a bool."""
    return fine.to(torch.int32) + PlanVerdict.NOT_FINITE


_WHO = "pipeline stages"
