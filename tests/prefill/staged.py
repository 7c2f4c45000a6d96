# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages in one process: what stands between them, and the decoder of `tiny.py` cut into
stages."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors

from segreuse_extras.pipeline.backlog import StageBacklog
from segreuse_extras.pipeline.link import MessageKind, StageMessage
from tests.prefill.tiny import LAYERS, Rows, World
from vllm_segreuse.engine.stage import Stage
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.prefill.align import Aligner
from vllm_segreuse.prefill.attention import PassAttention
from vllm_segreuse.prefill.executor import PassReport, SparsePrefill
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.tokens import Index


class Pipe:
    """`Link` in one process: whoever would have to wait for a message fails."""

    def __init__(
        self, stage: Stage, forward: list[deque[StageMessage]], back: list[deque[torch.Tensor]]
    ) -> None:
        self._stage, self._forward, self._back = stage, forward, back

    def send_states(self, index: Index, state: LayerState) -> None:
        message = StageMessage(MessageKind.STATES, index, state.clone())
        self._forward[self._stage.number].append(message)

    def send_plan_ends(self, verdict: torch.Tensor, figures: torch.Tensor) -> None:
        assert figures.dtype == torch.float32
        assert figures.ndim == 1
        verdict = verdict.to(torch.int32)
        message = StageMessage(MessageKind.PLAN_ENDS, verdict=verdict, figures=figures.clone())
        self._forward[self._stage.number].append(message)

    def send_step_ends(self) -> None:
        self._forward[self._stage.number].append(StageMessage(MessageKind.STEP_ENDS))

    def end_step(self) -> None:
        pass

    def receive(self) -> StageMessage:
        return self._forward[self._stage.number - 1].popleft()

    def send_endings(self, numbers: torch.Tensor) -> None:
        assert numbers.dtype == torch.float64
        for stage in range(self._stage.number):
            self._back[stage].append(numbers.clone())

    def receive_endings(self, count: int) -> torch.Tensor:
        numbers = self._back[self._stage.number].popleft()
        assert len(numbers) == count
        return numbers


class Backlogs:
    """Those of all stages, in one process.

    Attributes:
        reports: of the last step, of each stage.
    """

    def __init__(self, count: int) -> None:
        forward: list[deque[StageMessage]] = [deque() for _ in range(count)]
        back: list[deque[torch.Tensor]] = [deque() for _ in range(count)]
        self._pipes = forward, back
        self.backlogs: list[StageBacklog] = []
        self.reports: list[dict[str, PassReport]] = []

    def pipe(self, stage: Stage) -> Pipe:
        """That of a stage."""
        return Pipe(stage, *self._pipes)

    def step(self, *plans: ReusePlan, ends: tuple[str, ...] = ()) -> tuple[set[str], set[str]]:
        """A step of vLLM's, stage by stage; every stage must say the same.

        Returns:
            Requests that were dropped, and those that are done.
        """
        said, self.reports = [], []
        for each in self.backlogs:
            each.take(list(plans))
            dropped = each.drop(ends)
            self.reports.append({} if each.is_empty else each.advance())
            said.append((dropped, set(self.reports[-1])))
        assert all(one == said[0] for one in said), said
        assert not any(self._pipes[0]), "a message of this step was not taken in it"
        return said[0]

    def until_idle(self) -> list[set[str]]:
        done: list[set[str]] = []
        for _ in range(100):
            if all(each.is_empty for each in self.backlogs):
                return done
            done.append(self.step()[1])
        raise AssertionError("plans starve")


class Part(nn.Module):
    """The layers `[first, stop)` of a tiny model, as vLLM's models have those of a stage."""

    def __init__(self, world: World, stage: Stage) -> None:
        super().__init__()
        self._whole, self._stage = [world.model], stage  # in a list: its layers are no children
        own = range(stage.first, stage.stop)
        self.layers = nn.ModuleList(
            layer if number in own else PPMissingLayer()
            for number, layer in enumerate(world.model.layers)
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        assert (intermediate_tensors is None) is self._stage.is_first
        if intermediate_tensors is None:
            [whole] = self._whole
            hidden, residual = whole.tokens(input_ids) + whole.positions(positions), None
        else:
            hidden, residual = (intermediate_tensors[it] for it in ("hidden_states", "residual"))
        for layer in self.layers:
            if not isinstance(layer, PPMissingLayer):
                hidden, residual = layer(positions, hidden, residual)
        if self._stage.is_last:
            return hidden + residual
        return IntermediateTensors({"hidden_states": hidden, "residual": residual})


class StagedWorld(Backlogs):
    """A tiny model in stages, each with the layers and pages of a `World` of its own.

    Args:
        bounds: where stages end, but for the last.
        step_work: layer-tokens in one step.
        arguments: of each world.

    Attributes:
        worlds: of each stage; only its own layers count.
        runners: of each.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        bounds: tuple[int, ...],
        step_work: int = 10_000,
        **arguments: Any,
    ) -> None:
        super().__init__(len(bounds) + 1)
        self.worlds = [World(patch, **arguments) for _ in range(len(bounds) + 1)]
        self.runners: list[LayerRunner] = []
        firsts, stops = (0, *bounds), (*bounds, LAYERS)
        for number, (first, stop) in enumerate(zip(firsts, stops, strict=True)):
            stage = Stage(number, len(self.worlds), first, stop, LAYERS)
            runner = self._runner(self.worlds[number], stage)
            pipe = self.pipe(stage)
            if not stage.is_last:
                runner.onward = pipe
            prefill = SparsePrefill(runner, Aligner(runner.known))
            self.runners.append(runner)
            self.backlogs.append(StageBacklog(prefill, step_work, stage, pipe, lambda: 0.0))

    def _runner(self, world: World, stage: Stage) -> LayerRunner:
        own = slice(stage.first, stage.stop)
        named = {str(it): world.model.layers[it].attn for it in range(LAYERS)[own]}
        stack = DecoderStack(Part(world, stage), named, hands_on=not stage.is_last)
        rows: Any = Rows(world)
        known = world.layers.known[own]
        attention = PassAttention(rows, known)
        return LayerRunner(stack, known, attention, world.layers.settings, stage=stage)

    def caches(self) -> list[torch.Tensor]:
        """Pages of all layers."""
        return [
            self.worlds[number].caches[layer]
            for number, runner in enumerate(self.runners)
            for layer in range(runner.stage.first, runner.stage.stop)
        ]
