# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages carry plans out in the same steps, and report together how they have ended."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from segreuse_extras.pipeline import backlog as module
from segreuse_extras.pipeline.backlog import StageBacklog
from segreuse_extras.pipeline.proof import HandedStates
from tests.prefill.staged import Backlogs, Pipe
from vllm_segreuse.engine.stage import Stage
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.plan import ModelLayers, Pieces, Recipe, ReusePlan
from vllm_segreuse.prefill import backlog
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.executor import PassReport
from vllm_segreuse.prefill.outcomes import Computed
from vllm_segreuse.prefill.proofs.causal import check_scored
from vllm_segreuse.prefill.tokens import Index

CPU = torch.device("cpu")
CHUNK = 10


def plan(name: str, tokens: int) -> ReusePlan:
    """Of tokens that are all computed."""
    computed = np.ones(tokens, np.bool_)
    return ReusePlan(
        *(name, 0, tokens, np.zeros(tokens, np.int32)),
        Pieces.from_table(np.zeros((0, 5), np.int64)),
        Recipe.without_choice(computed),
        [],
        0,
        spread=True,
    )


class Prefill:
    """`SparsePrefill` and `LayerRunner` without a model: states are numbers of tokens."""

    def __init__(self, stage: Stage, pipe: Pipe) -> None:
        self.stage, self._pipe = stage, pipe
        self.runner = self
        self.aligner = SimpleNamespace(device=CPU)
        self.fails, self.spoils = set[str](), set[str]()
        self.seen: list[tuple[str, list[int]]] = []
        self.in_full: list[str] = []

    def prepare(self, plans: list[ReusePlan], chunk_work: int | None, apart: bool) -> Any:
        [one] = plans
        self.in_full += [one.request_id] * apart
        if one.request_id in self.fails:
            self.fails.remove(one.request_id)
            raise ArithmeticError
        sound = torch.ones(1, dtype=torch.bool)
        batch = SimpleNamespace(plans=plans, name=one.request_id, sound=sound)
        return SimpleNamespace(batches=[batch])

    @contextmanager
    def after_forward(self) -> Iterator[None]:
        yield

    def compute_batch(self, batch: Any, run: None) -> Chunks[Computed]:
        count, name = batch.plans[0].num_tokens, batch.name
        for first in range(0, count, CHUNK):
            chunk = np.arange(first, min(count, first + CHUNK))
            self.seen.append((name, chunk.tolist()))
            state = LayerState(torch.from_numpy(chunk)[:, None].float(), None)
            self._pipe.send_states(Index.known(chunk, CPU), self._spoilt(name, state))
            yield len(chunk)
        fine = torch.ones(1, dtype=torch.bool)
        batch.drift = torch.full((1,), torch.nan)
        batch.boundary_drifts = torch.zeros(0)
        batch.num_active = lambda active: torch.tensor([count])
        batch.positions = lambda active, wanted: dict.fromkeys(wanted, (1, 2))
        return Computed(batch, torch.arange(count), fine)

    def follow(self, index: Index, handed: LayerState, batch: Any, watching: None) -> LayerState:
        self.seen.append((batch.name, index.device.tolist()))
        assert torch.equal(handed.hidden_states[:, 0].nan_to_num(), index.device.float())
        state = self._spoilt(batch.name, handed)
        if not self.stage.is_last:
            self._pipe.send_states(index, state)
        return state

    def is_finite(self, state: LayerState) -> torch.Tensor:
        return state.hidden_states.isfinite().all(-1)

    def _spoilt(self, name: str, state: LayerState) -> LayerState:
        if name not in self.spoils:
            return state
        self.spoils.remove(name)
        hidden = state.hidden_states.clone()
        hidden[hidden == 0] = torch.nan
        return LayerState(hidden, None)


class Stages(Backlogs):
    """Without a model."""

    def __init__(self, count: int, step_work: int = 2 * CHUNK) -> None:
        super().__init__(count)
        self.prefills = []
        for number in range(count):
            stage = Stage(number, count, number, number + 1, count)
            pipe = self.pipe(stage)
            prefill: Any = Prefill(stage, pipe)
            self.prefills.append(prefill)
            self.backlogs.append(StageBacklog(prefill, step_work, stage, pipe, lambda: 0.0))

    @property
    def seen(self) -> list[list[tuple[str, list[int]]]]:
        """What each stage has computed."""
        return [prefill.seen for prefill in self.prefills]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(module, "fatal", lambda *_: nullcontext())


@pytest.mark.parametrize("count", [2, 3])
def test_all_stages_compute_the_same_tokens_in_the_same_step(count: int) -> None:
    stages = Stages(count)
    a, b = plan("a", 45), plan("b", 14)
    steps = [[("a", 0), ("a", 10)], [("a", 20), ("a", 30)], [("a", 40), ("b", 0), ("b", 10)]]
    for number, expected in enumerate(steps):
        assert stages.step(*([a, b] if number == 0 else [])) == (set(), set())
        for seen in stages.seen:
            assert [(name, tokens[0]) for name, tokens in seen] == expected
            seen.clear()
    assert stages.until_idle() == [set()] * (count - 1) + [{"a", "b"}]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_met_nan_on_any_stage_is_computed_again_on_all(stage: int) -> None:
    stages = Stages(3, step_work=1000)
    stages.prefills[stage].spoils.add("a")
    stages.step(plan("a", 15), plan("b", 5))
    assert [stages.step()[1] for _ in range(3)] == [set(), set(), {"b"}]
    assert [stages.step()[1] for _ in range(3)] == [set(), set(), {"a"}]
    twice = [("a", list(range(10))), ("a", list(range(10, 15)))]
    assert stages.seen == [[*twice, ("b", list(range(5))), *twice]] * 3
    assert [it.in_full for it in stages.prefills] == [["a"]] * 3
    first, *others = [reports["a"] for reports in stages.reports]
    assert first.not_finite == ["a"]
    assert first.outcomes["a"].computed == 15
    assert all(report == PassReport(0.0, 0.0, [], {}) for report in others)
    assert stages.until_idle() == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_a_stage_cannot_prepare_is_computed_again_on_all(stage: int) -> None:
    stages = Stages(3, step_work=1000)
    stages.prefills[stage].fails.add("a")
    stages.step(plan("b", 5), plan("a", 15), plan("c", 5))
    assert [stages.step()[1] for _ in range(3)] == [set(), set(), {"b", "c"}]
    assert [stages.step()[1] for _ in range(3)] == [set(), set(), {"a"}]
    report = stages.reports[0]["a"]
    assert (report.not_finite, report.outcomes["a"].computed) == ([], 15)
    for seen in stages.seen:
        assert seen[-2:] == [("a", list(range(10))), ("a", list(range(10, 15)))]


def test_what_fails_in_full_is_an_error() -> None:
    stages = Stages(2, step_work=1000)
    stages.prefills[1].spoils.add("a")
    stages.step(plan("a", 5))
    stages.prefills[0].fails.add("a")
    stages.step()
    with pytest.raises(ArithmeticError):
        stages.step()


def test_outcomes_are_reported_where_the_plan_says_so() -> None:
    stages = Stages(2)
    reported = plan("a", 5)
    reported.reports = True
    explained = plan("b", 5)
    explained.reports = explained.explains = True
    stages.step(reported, explained, plan("c", 5))
    stages.step()
    stages.step()
    outcomes = {name: report.outcomes for name, report in stages.reports[0].items()}
    assert outcomes["a"]["a"].positions is None
    assert outcomes["b"]["b"].positions == (1, 2)
    assert outcomes["c"] == {}


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_request_that_ends_is_dropped_by_all_and_disturbs_nobody(after: int) -> None:
    """While it is computed, and while its verdict is awaited."""
    stages = Stages(3)
    stages.step(plan("a", 35), plan("b", 15))
    done = [stages.step()[1] for _ in range(after)]
    assert not any(done)
    assert stages.step(ends=("a",)) == ({"a"}, set())
    dropped, found = stages.step(ends=("a",))
    assert not dropped
    assert found.union(*stages.until_idle()) == {"b"}


def test_no_plan_is_done_within_its_step() -> None:
    at_once = plan("a", 5)
    at_once.spread = False
    with pytest.raises(ValueError, match=r"\['a'\] cannot be done within a step"):
        Stages(2).step(at_once)


def test_what_a_pass_hands_on_is_compared_with_what_the_model_does() -> None:
    """By the residual stream: how it is divided is the next layer's to undo."""
    hidden, residual = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    compared = HandedStates(LayerState(hidden, residual))
    index = Index.known(np.array([1, 4, 5]), CPU)
    some = LayerState(hidden, residual).take(index.device)
    assert some.residual is not None
    compared.send_states(index, some)
    compared.send_states(index, LayerState(some.residual, some.hidden_states))
    assert compared.worst < 1e-6
    compared.send_states(index, LayerState(1.1 * some.hidden_states, 1.1 * some.residual))
    compared.send_states(index, some)
    assert compared.worst == pytest.approx(0.1, rel=0.01)
    compared.send_states(index, LayerState(some.hidden_states * torch.nan, some.residual))
    assert compared.worst == float("inf")
    with pytest.raises(UnsupportedModelError, match="hands on hidden_states to the next pipeline"):
        compared.send_states(index, LayerState(some.hidden_states, None))


def test_of_several_stages_the_first_must_have_a_layer_that_scores() -> None:
    """The model may have one elsewhere: the refusal says what is missing, and where."""
    check_scored(ModelLayers(4, scored=(3,)), num_stages=2)
    with pytest.raises(UnsupportedModelError) as refused:
        check_scored(ModelLayers(4, scored=()), num_stages=2)
    assert str(refused.value).startswith("no layer of the first pipeline stage (VLLM_PP_LAYER_")
    with pytest.raises(UnsupportedModelError, match="no layer before the last one attends"):
        check_scored(ModelLayers(4, scored=()), num_stages=1)
