# SPDX-License-Identifier: Apache-2.0
"""Passes number tokens in one row; a model with M-RoPE must compute the same from three equal
rows."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from segreuse_extras.images.proof import prove_images
from tests.prefill.loaded import Loaded, loaded
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.prefill import checks
from vllm_segreuse.prefill.tokens import TokenTable

Patch = pytest.MonkeyPatch


def prove(model: Loaded) -> checks.Runtime:
    return checks.prove(model.model, model.vllm_config, model.kv_cache_config)


@pytest.fixture(scope="module")
def mrope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """A model that numbers tokens by time, height and width."""
    rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    with loaded(tmp_path_factory.mktemp("mrope"), rope_parameters=rope_parameters) as made:
        made.model.get_mrope_input_positions = lambda tokens, _: (
            torch.arange(len(tokens)).expand(3, -1),
            0,
        )
        yield made


def rotations(model: Loaded) -> set[tuple[int, ...]]:
    """Shapes of the positions that the rotary modules are given, without their tokens."""
    seen = set()
    handles = [
        module.register_forward_pre_hook(lambda _, given: seen.add(given[0].shape[:-1]))
        for module in model.model.modules()
        if isinstance(module, MRotaryEmbedding)
    ]
    assert handles, "the model has no M-RoPE"
    assert prove(model).max_deviation < 2e-6
    for handle in handles:
        handle.remove()
    return seen


def test_the_forward_of_a_model_with_mrope_has_three_rows_and_passes_have_one(
    mrope: Loaded,
) -> None:
    assert rotations(mrope) == {(3,), ()}


def test_passes_run_by_no_cuda_graph_which_would_read_rows(
    mrope: Loaded, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(checks, "may_run_compiled", lambda _: True)
    runtime = prove(mrope)
    assert runtime.prefill.runner.settings.compiled
    assert runtime.graphs is None


def test_three_equal_rows_must_do_what_one_does(mrope: Loaded, monkeypatch: Patch) -> None:
    forward = MRotaryEmbedding.forward_native

    def width_is_another(self: Any, positions: torch.Tensor, *given: Any) -> Any:
        if positions.dim() == 2:
            positions = torch.stack([positions[0], positions[1], positions[2] // 2])
        return forward(self, positions, *given)

    monkeypatch.setattr(MRotaryEmbedding, "forward_native", width_is_another)
    for module in mrope.model.modules():
        if isinstance(module, MRotaryEmbedding):
            monkeypatch.setattr(module, "_forward_method", module.forward_native)
    with pytest.raises(RefusedError, match="does not turn with its position as its rotary module"):
        prove(mrope)


class Pictured:
    """The numbering of Qwen's vision models, by rows and columns of each image."""

    def __init__(self, change: Any = None) -> None:
        self._change = change

    def __call__(self, tokens: list[int], features: list[Any]) -> tuple[torch.Tensor, int]:
        numbers: list[tuple[int, int, int]] = []
        for feature in features:
            while len(numbers) < feature.mm_position.offset:
                numbers.append((max(map(max, numbers), default=-1) + 1,) * 3)
            base = max(map(max, numbers), default=-1) + 1
            _, height, width = (int(n) // 2 for n in feature.data["image_grid_thw"].data)
            numbers += [(base, base + i, base + j) for i in range(height) for j in range(width)]
        while len(numbers) < len(tokens):
            numbers.append((max(map(max, numbers), default=-1) + 1,) * 3)
        rows = torch.tensor(numbers).T
        behind = max(map(max, numbers)) + 1 - len(tokens)
        if features and self._change is not None:
            rows, behind = self._change(rows, behind)
        return rows, behind


def with_images(model: Loaded, monkeypatch: Patch, numbering: Any) -> int | None:
    """Patches per token that are proven of a model that numbers images so."""
    monkeypatch.setattr(model.model, "get_mrope_input_positions", numbering)
    vision = SimpleNamespace(spatial_merge_size=2)
    config = model.vllm_config.model_config.hf_config
    monkeypatch.setattr(config, "vision_config", vision, raising=False)
    parts = prove(model).parts
    assert parts is not None
    return prove_images(model.model, model.vllm_config.model_config, parts)


def test_images_are_proven_where_they_are_numbered_by_rows_and_columns(
    mrope: Loaded, monkeypatch: Patch
) -> None:
    shapes = set()
    module = next(m for m in mrope.model.modules() if isinstance(m, MRotaryEmbedding))
    differing = []

    def note(_: Any, given: Any) -> None:
        shapes.add(given[0].shape[:-1])
        if given[0].dim() == 2:
            differing.append(bool((given[0][1] != given[0][2]).any()))

    handle = module.register_forward_pre_hook(note)
    merge_size = with_images(mrope, monkeypatch, Pictured())
    handle.remove()
    assert merge_size == 2
    assert shapes == {(3,), ()}
    assert any(differing), "rows and columns were not told apart"


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, behind: (rows[[0, 2, 1]], behind),
        lambda rows, behind: (rows, behind + 1),
        lambda rows, behind: (rows[:2], behind),
        lambda rows, behind: (rows.clamp(max=int(rows.max()) - 1), behind),
    ],
    ids=["rows are columns", "generated text", "two rows", "the end"],
)
def test_images_numbered_otherwise_are_not_reused(
    mrope: Loaded, monkeypatch: Patch, change: Any
) -> None:
    assert with_images(mrope, monkeypatch, Pictured(change)) is None


def test_an_image_must_turn_by_the_same_in_all_rows(mrope: Loaded, monkeypatch: Patch) -> None:
    forward = MRotaryEmbedding.forward_native

    def height_once_removed(self: Any, positions: torch.Tensor, *given: Any) -> Any:
        if positions.dim() == 2 and (positions[1] != positions[2]).any():
            positions = torch.stack([positions[0], positions[1] // 2, positions[2]])
        return forward(self, positions, *given)

    monkeypatch.setattr(MRotaryEmbedding, "forward_native", height_once_removed)
    for module in mrope.model.modules():
        if isinstance(module, MRotaryEmbedding):
            monkeypatch.setattr(module, "_forward_method", module.forward_native)
    assert with_images(mrope, monkeypatch, Pictured()) is None


def test_a_pass_that_gives_text_behind_images_its_index_is_noticed(
    mrope: Loaded, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(TokenTable, "rotary_positions", property(lambda self: self.positions))
    assert with_images(mrope, monkeypatch, Pictured()) is None
