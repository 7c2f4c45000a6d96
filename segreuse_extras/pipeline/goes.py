# SPDX-License-Identifier: Apache-2.0
"""What one go through all stages is to a plan: its tokens are known before it, or its program
chooses them by the first stage's layers.

Programs that choose by later layers take two goes, in each of which a stage does what concerns its
own layers:

    first go    what is always computed, all layers ─► scores, added up from stage to stage
                all stages  ◄── the choice, by the last stage
    second go   what was chosen, all layers         ─► drift, added up from stage to stage
                all stages  ◄── the drift
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from vllm_segreuse.plan import Probed, ReusePlan
from vllm_segreuse.prefill.attention import Queries, Watching
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.carried import CarriedChanges, carries
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.drift import MovedValues
from vllm_segreuse.prefill.executor import RunProgram
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import Computed
from vllm_segreuse.prefill.scores import Scores
from vllm_segreuse.prefill.selection import Choice, choose_tokens
from vllm_segreuse.prefill.tokens import Index, upload

_NO_TOKEN = -1


class Go:
    """The only go of a plan that needs one.

    Attributes:
        run: computes its tokens on the first stage; None: its program does.
        watching: is told what reaches attention on a later stage; None: nobody.
        answer_numbers: how many numbers the last stage answers to all others.
    """

    run: RunProgram | None = None
    answer_numbers = 0

    @property
    def watching(self) -> Watching | None:
        """See above; made when it is first asked for, which is before anything is computed."""
        return None

    def tokens(self, batch: Batch) -> Index | None:
        """Those that pass the layers of a later stage; None: only the first stage knows."""
        return None

    def figures(self, so_far: torch.Tensor) -> torch.Tensor:
        """What goes to the next stage once all is computed.

        Args:
            so_far: float32 `[n]`, of the stages before; empty on the first, and where one of them
                could not prepare the plan.
        """
        return so_far

    def answer(self, figures: torch.Tensor) -> torch.Tensor:
        """What the last stage makes of the figures of all, float64 `[answer_numbers]`."""
        return figures.new_zeros(self.answer_numbers, dtype=torch.float64)

    def then(self, answer: np.ndarray) -> Go | None:
        """What comes behind it; None: the plan is done."""
        return None

    def drift(self, answer: np.ndarray) -> float:
        """Of the plan; NaN where it is not measured."""
        return math.nan


def first_go(layers: LayerRunner, plan: ReusePlan, batch: Batch | None) -> Go:
    """How a plan begins.

    Args:
        layers: of this stage.
        batch: the plan alone; None: it could not be prepared here, and only `answer_numbers` of the
            go counts.
    """
    if isinstance(plan.recipe.program, Probed):
        return FirstReading(layers, plan, plan.recipe.program, batch)
    return Go()


class FirstReading(Go):
    """What is always computed, with the probes, whose attention gives the scores."""

    def __init__(
        self, layers: LayerRunner, plan: ReusePlan, program: Probed, batch: Batch | None
    ) -> None:
        self._layers, self._program = layers, program
        self._given = batch
        self._most = min(plan.recipe.top_k, plan.num_written)
        self.answer_numbers = 1 + self._most
        self.run = self._run

    @property
    def _batch(self) -> Batch:
        assert self._given is not None
        return self._given

    @functools.cached_property
    def _scores(self) -> Scores:
        scored = [it for it in self._layers.model.scored if it >= self._program.first_layer]
        return Scores(self._layers, self._batch, self._layers.own(scored), self._program.gather)

    @functools.cached_property
    def _queries(self) -> Queries:
        return self._scores.queries(self._batch.always)

    @property
    def watching(self) -> Watching:
        """Queries of the probes."""
        return self._queries

    def tokens(self, batch: Batch) -> Index:
        return batch.always

    def _run(self, layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
        computing = layers.up_to_choice(
            batch.probes, batch.always, len(layers) - 1, self._queries, batch
        )
        others, state = yield from computing
        return others.device, state

    def figures(self, so_far: torch.Tensor) -> torch.Tensor:
        """Whether all stages so far can carry changes, and the scores."""
        able = torch.tensor([carries(self._layers, self._batch)], device=so_far.device).float()
        if len(so_far):
            able = able.minimum(so_far[:1])
            self._scores.add(so_far[1:].view_as(self._scores.totals))
        return torch.cat([able, self._scores.totals.flatten()])

    def answer(self, figures: torch.Tensor) -> torch.Tensor:
        """Whether changes are carried, and the tokens that are chosen."""
        program, totals = self._program, self._scores.totals
        choice = choose_tokens(
            self._batch, totals, program.gather, program.threshold, program.levelling
        )
        answer = figures.new_full((self.answer_numbers,), _NO_TOKEN, dtype=torch.float64)
        answer[:1] = figures[:1]
        answer[1 : 1 + len(choice.chosen)] = choice.chosen.double()
        return answer

    def then(self, answer: np.ndarray) -> Go:
        able, chosen = bool(answer[0]), answer[1:].astype(np.int64)
        chosen = chosen[chosen != _NO_TOKEN]
        device = self._batch.always.device.device
        choice = Choice(upload(chosen, device), [self._most])
        probes = self._batch.probes.without(self._batch.suffix).host
        assert probes is not None
        again = Index.known(np.union1d(chosen, probes), device)
        return SecondReading(self._layers, self._batch, self._program, choice, again, able)


class SecondReading(Go):
    """What was chosen, and the probes once more but those of the suffix."""

    def __init__(
        self,
        layers: LayerRunner,
        batch: Batch,
        program: Probed,
        choice: Choice,
        again: Index,
        able: bool,
    ) -> None:
        self._layers, self._batch, self._choice, self._again = layers, batch, choice, again
        self._carries = able and program.carries and len(again) > 0
        self.answer_numbers = int(program.measures_drift)
        self.run = self._run

    @functools.cached_property
    def _held(self) -> tuple[MovedValues | None, CarriedChanges | None]:
        """What is compared, and what is carried, as it is before anything is computed again."""
        moved = carried = None
        if self.answer_numbers:
            moved = MovedValues(self._layers, self._batch, self._choice)
        if self._carries:
            carried = CarriedChanges(self._layers, self._batch, self._again)
        return moved, carried

    @property
    def watching(self) -> Watching | None:
        """Changes to be carried."""
        return self._held[1]

    def tokens(self, batch: Batch) -> Index:
        return self._again

    def _run(self, layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
        again, watching = self._again, self.watching
        if not len(again):  # no token's score was above the threshold
            return again.device, None
        state = yield from layers.all_layers(batch.tokens.take(again), batch, watching)
        return again.device, state

    def figures(self, so_far: torch.Tensor) -> torch.Tensor:
        """The drift."""
        moved = self._held[0]
        if moved is None:
            return so_far
        drift = moved.drift().float()
        return drift + so_far if len(so_far) else drift

    def answer(self, figures: torch.Tensor) -> torch.Tensor:
        """The same."""
        return figures.double()

    def drift(self, answer: np.ndarray) -> float:
        return float(answer[0]) if self.answer_numbers else math.nan
