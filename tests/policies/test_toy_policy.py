# SPDX-License-Identifier: Apache-2.0
"""A policy with a program of its own is two files: one in `policies/`, one in `prefill/programs/`.

Both are written to folders that extend the packages, and found as they would be at start-up. What
they do is small: of the reused tokens, those with the largest values at the first layer.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.loaded import loaded
from tests.prefill.tiny import LAYERS, SIZE, World, make_plan
from vllm_segreuse import policies
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.parsing import parse_request
from vllm_segreuse.options.server import ConfigError
from vllm_segreuse.plan import ModelLayers, Program, Recipe, ReusePlan, Segments
from vllm_segreuse.policies import Situation
from vllm_segreuse.prefill import checks, programs
from vllm_segreuse.prefill.executor import SparsePrefill

Patch = pytest.MonkeyPatch

POLICY = """
from dataclasses import dataclass

from vllm_segreuse.plan import Counts, ModelLayers, Program, Recipe, fates_of
from vllm_segreuse.policies.base import Situation


@dataclass(frozen=True)
class Loudest(Program):
    power: int

    def cost(self, counts: Counts, layers: ModelLayers) -> int:
        return super().cost(counts, layers) + counts.tokens  # values are read once


def recipe(situation: Situation) -> Recipe:
    new = ~situation.reused
    return Recipe.of(Loudest(power=2), fates_of(new, probes=new), situation.budget())
"""

PROGRAM = """
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.policies.loudest import Loudest
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import Computed, ProofCase
from vllm_segreuse.prefill.selection import choose_tokens
from vllm_segreuse.prefill.chunks import Chunks

PROGRAM = Loudest


def run(program: Loudest, layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
    values = batch.held(typed_pages(layers.stack.attention[0]), layers.layouts[0].values)
    values = values.float().abs().pow(program.power).sum((1, 2))
    active = choose_tokens(batch, values).beside(batch.always)
    return active.device, (yield from layers.all_layers(batch.tokens.take(active), batch))


def proof_cases(num_layers: int) -> list[ProofCase]:
    return [ProofCase(Loudest(power=2), top_k=9)]
"""


def extend(package: str, path: Path, source: str, patch: Patch) -> None:
    """Write a module to a folder of its own, which the package then searches, too."""
    path.mkdir()
    (path / "loudest.py").write_text(source)
    module = sys.modules[package]
    patch.setattr(module, "__path__", [*module.__path__, str(path)])


@pytest.fixture(autouse=True)
def added(tmp_path: Path, monkeypatch: Patch) -> Iterator[None]:
    extend(policies.__name__, tmp_path / "policies", POLICY, monkeypatch)
    extend(programs.__name__, tmp_path / "programs", PROGRAM, monkeypatch)
    found = (
        (policies.POLICIES, policies.find_policies),
        (programs.PROGRAMS, programs.find_programs),
    )
    before = [dict(known) for known, _ in found]
    for known, find in found:
        _become(known, find())
    yield
    for (known, _), as_before in zip(found, before, strict=True):
        _become(known, as_before)
    for package in (policies, programs):
        del package.loudest  # type: ignore[attr-defined]
        del sys.modules[f"{package.__name__}.loudest"]


def _become(known: dict[Any, Any], other: dict[Any, Any]) -> None:
    known.clear()
    known.update(other)


def recipe_of(policy: str, reused: np.ndarray) -> Recipe:
    one = np.array([1], np.int32)
    segments = Segments.elsewhere(one, one)
    return policies.POLICIES[policy](Situation(reused, segments, SIZE, LAYERS, 0.2, 0, None))


def test_servers_and_requests_may_choose_it() -> None:
    chosen = SegReuseConfig.from_options({"policy": "loudest"})
    assert chosen.policy == chosen.request_defaults().policy == "loudest"
    asked = {"extra_keys": ["a"], "segreuse_policy": "loudest"}
    assert parse_request(asked, SegReuseConfig()).options.policy == "loudest"
    with pytest.raises(ConfigError, match="focus, loudest, peaks, prophet"):
        SegReuseConfig.from_options({"policy": "louder"})


def plan(name: str, first_block: int, recipe: Recipe) -> ReusePlan:
    new = np.flatnonzero(recipe.always).tolist()
    blocks = np.arange(first_block, first_block + 8)
    return make_plan(name, 0, new, 30, blocks, program=recipe.program, top_k=recipe.top_k)


def test_it_is_planned_and_priced() -> None:
    reused = np.arange(30) % 6 > 0
    recipe = recipe_of("loudest", reused)
    assert (recipe.top_k, recipe.program.chooses) == (5, True)
    assert recipe.program == type(recipe.program)(power=2)  # type: ignore[call-arg]
    assert (
        plan("a", 0, recipe).layer_tokens(ModelLayers.of_full_attention(LAYERS))
        == LAYERS * (5 + 5) + 30
    )
    assert plan("a", 0, recipe).active_tokens == 5 + 5


def test_it_runs_on_a_model(monkeypatch: Patch) -> None:
    """Plans share a pass, each chooses its loudest values, and only what is chosen is written."""
    world, recipe = World(monkeypatch), recipe_of("loudest", np.arange(30) % 6 > 0)
    plans = [plan("one", 10, recipe), plan("other", 30, recipe)]
    expected = set()
    for each in plans:
        kv = world.kv(each)
        loudness = {p: float((kv[0, p][1] ** 2).sum()) for p in range(30) if p % 6}
        chosen = sorted(loudness, key=lambda p: -loudness[p])[:5]
        for p in [*range(0, 30, 6), *chosen]:
            expected.add(int(each.block_ids[p // SIZE]) * SIZE + p % SIZE)
    prepared = world.prefill.prepare(plans)
    assert len(prepared.batches) == 1
    report = world.prefill.run(plans)
    assert report.not_finite == []
    assert [(layer, set(slots)) for layer, slots in world.written] == [
        (layer, expected) for layer in range(LAYERS)
    ]


def test_it_is_proven_at_start_up(tmp_path: Path, monkeypatch: Patch) -> None:
    proven: list[Program] = []
    run = SparsePrefill.run

    def noted(self: SparsePrefill, plans: list[ReusePlan]) -> object:
        proven.extend(plan.recipe.program for plan in plans)
        return run(self, plans)

    monkeypatch.setattr(SparsePrefill, "run", noted)
    (tmp_path / "model").mkdir()
    with loaded(tmp_path / "model") as model, torch.inference_mode():
        checks.prove(model.model, model.vllm_config, model.kv_cache_config)
    assert recipe_of("loudest", np.arange(30) % 6 > 0).program in proven
    used = {type(program) for program in proven}
    assert used == set(programs.PROGRAMS)


def test_without_its_files_it_is_unknown(monkeypatch: Patch) -> None:
    assert "loudest" in policies.find_policies()
    for package in (policies, programs):
        monkeypatch.setattr(package, "__path__", package.__path__[:1])
    assert "loudest" not in policies.find_policies()
    assert len(programs.find_programs()) == len(programs.PROGRAMS) - 1
