# SPDX-License-Identifier: Apache-2.0
"""A sound model is proven at start-up, a mistake in any part of the pass is found, and what no
proof covers is refused by name."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.hooks import pre_hooks
from tests.prefill.loaded import (
    BLOCK_SIZE,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    POSITIONS,
    Loaded,
    loaded,
    prove,
    refusal,
)
from vllm_segreuse import config
from vllm_segreuse.compat.attention_impl import replaced_forward
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.kernels import cpu
from vllm_segreuse.kernels.pages import PageLayout, TiledStrides, flat_pages
from vllm_segreuse.model import rope
from vllm_segreuse.model.attention_kind import AttentionKind, kind_of
from vllm_segreuse.model.fast_ops import FastOps
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.rope import DeltaRope
from vllm_segreuse.plan import (
    Boundary,
    Deviation,
    Fixed,
    Probed,
    Program,
    ReusePlan,
    Segments,
    Staged,
    Stock,
)
from vllm_segreuse.policies import POLICIES, Situation
from vllm_segreuse.prefill import checks, programs, rows
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.proofs import causal, passes
from vllm_segreuse.prefill.proofs.causal import check_attention, check_split_keys
from vllm_segreuse.prefill.proofs.rotations import prove_rotation, prove_value
from vllm_segreuse.prefill.states import BoundaryStates

BFLOAT16 = pytest.mark.parametrize("model", ["bfloat16"], indirect=True)
FP8 = [
    pytest.param(of, marks=pytest.mark.needs("fp8_cache"))
    for of in ("bfloat16 fp8_e4m3", "float16 fp8_e5m2", "float32 fp8_e4m3")
]
FORMATS = pytest.mark.parametrize("model", ["float32", "bfloat16", *FP8], indirect=True)
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", params=["float32"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    """Of a dtype, and a KV cache of another, whose scales are not 1."""
    with loaded(tmp_path_factory.mktemp("model"), *request.param.split()) as made:
        if made.first.kv_cache_dtype != "auto":
            for number, layer in enumerate(made.attention.values()):
                layer._k_scale_float, layer._v_scale_float = 0.37, 0.05 + number
        yield made


@FORMATS
def test_a_sound_model_is_proven_on_scratch_blocks(model: Loaded) -> None:
    before = flat_pages(model.first.kv_cache).clone()
    runtime = prove(model)
    # Rounding, not more: ours adds in another order than vLLM's kernel, at every token of the pass.
    eps = torch.finfo(model.vllm_config.model_config.dtype).eps
    stored = typed_pages(model.first).dtype
    near_ties = (eps * torch.finfo(stored).eps) ** 0.5 if stored.itemsize == 1 else 0.0
    assert runtime.max_deviation < eps * 16 + 2 * near_ties
    assert "attention and scores by C++" in runtime.kernels
    assert runtime.kernels
    after = flat_pages(model.first.kv_cache)
    changed = (before != after).any(1).nonzero().flatten().tolist()
    assert set(changed) <= set(range(1, 9)), "blocks beyond the scratch blocks were written"


@pytest.mark.parametrize("model", FP8, indirect=True)
@pytest.mark.parametrize("change", [{"_k_scale_float": 0.8}, {"_v_scale_float": 0.8}], ids=str)
def test_kernels_that_read_other_scales_than_the_backend_are_found(
    change: dict[str, float], model: Loaded, monkeypatch: Patch
) -> None:
    """By those that are declared: the backend writes by others."""
    write = type(model.first.impl).do_kv_cache_update
    true = {name: getattr(model.first, name) for name in change}

    def written(layer: Any, *given: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in true.items():
                patch.setattr(layer, name, value)
            write(layer.impl, layer, *given)

    for name, value in change.items():
        monkeypatch.setattr(model.first, name, value)
    monkeypatch.setattr(model.first.impl, "do_kv_cache_update", written)
    assert "values written by the backend are not in its page" in refusal(model)


# What is run.


@pytest.fixture
def proven(model: Loaded, monkeypatch: Patch) -> list[ReusePlan]:
    """The plans that a proof runs."""
    plans: list[ReusePlan] = []
    run = SparsePrefill.run
    monkeypatch.setattr(
        SparsePrefill, "run", lambda self, given: (plans.extend(given), run(self, given))[1]
    )
    prove(model)
    return plans


def kind(program: Program) -> tuple[Any, ...]:
    """What decides how a program runs, but for numbers."""
    fields = dataclasses.asdict(program)
    gather = fields.get("gather")
    return type(program), gather, program.may_choose_fewer, program.dense_layers > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dense_layers", [0, 1, LAYERS])
def test_the_program_of_every_policy_is_proven(
    policy: str, dense_layers: int, proven: list[ReusePlan]
) -> None:
    reused = np.arange(200) % 7 > 0
    starts = np.flatnonzero(reused & ~np.append(False, reused[:-1])).astype(np.int32)
    options = {"recompute_ratio": 0.1, "dense_layers": dense_layers, "overflow_tokens": 0}
    segments = Segments.elsewhere(starts, starts)
    recipe = POLICIES[policy](Situation(reused, segments, BLOCK_SIZE, LAYERS, **options))
    assert kind(recipe.program) in {kind(plan.recipe.program) for plan in proven}


def test_the_default_policy_is_among_them(proven: list[ReusePlan]) -> None:
    """With the very layers whose attention counts."""
    default = config.SegReuseConfig().policy
    reused = np.arange(200) % 7 > 0
    segments = Segments.elsewhere(np.array([1]), np.array([1]))
    recipe = POLICIES[default](Situation(reused, segments, BLOCK_SIZE, LAYERS, None, 0, None))
    assert recipe.program in [plan.recipe.program for plan in proven]


def test_queries_are_scattered_and_in_long_runs(proven: list[ReusePlan]) -> None:
    fixed = [p.recipe for p in proven if isinstance(p.recipe.program, Fixed)]
    runs = {_longest_run(recipe.always) for recipe in fixed}
    assert min(runs) < 16 <= max(runs), "one of the two ways to attend is not proven"


def _longest_run(mask: np.ndarray) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
    return int(np.diff(edges).max())


def test_few_tokens_are_run_once_before_the_first_request(proven: list[ReusePlan]) -> None:
    active = [int(plan.recipe.always.sum()) for plan in proven]
    assert active[-5:] == [1, 2, 4, 8, 16]


# Mistakes.


def _turned_one_too_far(patch: Patch) -> None:
    tables = DeltaRope.tables
    patch.setattr(DeltaRope, "tables", lambda self, deltas: tables(self, deltas + 1))


def _another_rotation(patch: Patch) -> None:
    """As of a module that rotates keys which are not the ones that are cached."""
    derive = rope.derive
    patch.setattr(
        rope,
        "derive",
        lambda *given: dataclasses.replace(
            derive(*given), frequencies=derive(*given).frequencies * 0.9
        ),
    )


def _turned_backwards(patch: Patch) -> None:
    _with_moves(patch, lambda parts, moves: (parts, dataclasses.replace(moves, sin=-moves.sin)))


def _values_left_behind(patch: Patch) -> None:
    _with_moves(patch, lambda parts, moves: (parts[:1], moves))


def _keys_left_unturned(patch: Patch) -> None:
    _with_moves(
        patch, lambda parts, moves: ([dataclasses.replace(p, rotation=None) for p in parts], moves)
    )


def _one_slot_off(patch: Patch) -> None:
    _with_moves(
        patch,
        lambda parts, moves: (parts, dataclasses.replace(moves, targets=moves.targets - 1)),
    )


def _with_moves(patch: Patch, change: Callable[..., Any]) -> None:
    align = cpu.align
    patch.setattr(cpu, "align", lambda pages, parts, moves: align(pages, *change(parts, moves)))


def _scattered_queries_see_the_future(patch: Patch) -> None:
    attend = cpu.sparse_attention
    patch.setattr(
        cpu,
        "sparse_attention",
        lambda *given, **more: attend(*given[:-2], given[-2] + 1, given[-1], **more),
    )


def _rows_see_the_future(patch: Patch) -> None:
    """One row for all scattered queries: the mistake that most "recompute top-k" code makes."""
    patch.setattr(rows, "row_starts", lambda tokens: np.arange(len(tokens)) == 0)


def _the_least_attended(patch: Patch) -> None:
    scores = cpu.token_scores
    patch.setattr(cpu, "token_scores", lambda *given, **more: -scores(*given, **more))


def _sums_for_peaks(patch: Patch) -> None:
    scores = cpu.token_scores
    patch.setattr(cpu, "token_scores", lambda *given, **more: scores(*given[:7], **more))


def _the_last_queries_count_as_all_do(patch: Patch) -> None:
    scores = cpu.token_scores

    def summed(*given: Any, last: int | None = None, **more: Any) -> torch.Tensor:
        every = None if last is None else len(given[0])
        return scores(*given, last=every, **more)

    patch.setattr(cpu, "token_scores", summed)


def _scores_of_the_token_before(patch: Patch) -> None:
    scores = cpu.token_scores
    patch.setattr(cpu, "token_scores", lambda *given, **more: scores(*given, **more).roll(-1))


def _no_key_beyond_a_step(patch: Patch) -> None:
    """Of what a program loads ahead, only the first is there."""
    attend = cpu.sparse_attention

    def forgetting(out: Any, query: Any, pages: Any, *given: Any, **more: Any) -> None:
        tables = given[2].clone()
        tables[:, 10:] = tables[:, 9:10]
        attend(out, query, pages, *given[:2], tables, *given[3:], **more)

    patch.setattr(cpu, "sparse_attention", forgetting)


def _no_score_beyond_a_step(patch: Patch) -> None:
    scores = cpu.token_scores
    far = torch.arange(4096) < 160
    patch.setattr(
        cpu,
        "token_scores",
        lambda *given, **more: (found := scores(*given, **more)) * far[: found.shape[-1]],
    )


def _others(index: Any) -> Any:
    return index if isinstance(index, slice) else index.roll(1)


def _states_of_other_tokens(patch: Patch) -> None:
    kept = LayerState.kept
    patch.setattr(LayerState, "kept", lambda self, index, n: kept(self, _others(index), n))


MISTAKES = {
    _turned_one_too_far: "is not a rotation by the position difference",
    _another_rotation: "does not turn with its position as its rotary module says",
    _turned_backwards: "moved keys or values are not where and what they should be",
    _values_left_behind: "moved keys or values are not where and what they should be",
    _keys_left_unturned: "moved keys or values are not where and what they should be",
    _one_slot_off: "moved keys or values are not where and what they should be",
    _scattered_queries_see_the_future: "does not reproduce this model's own forward",
    _rows_see_the_future: "does not reproduce this model's own forward",
    _the_least_attended: "the scores of tokens are not the attention that queries pay them",
    _sums_for_peaks: "the scores of tokens are not the attention that queries pay them",
    _the_last_queries_count_as_all_do: "the scores of tokens are not the attention",
    _scores_of_the_token_before: "the scores of tokens are not the attention",
    _no_key_beyond_a_step: "over 2048 tokens attention of the pass is not what plain torch",
    _no_score_beyond_a_step: "over 2048 tokens scores of tokens are not what plain torch",
    _states_of_other_tokens: "does not reproduce this model's own forward",
}


@FORMATS
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_mistake_is_found(
    mistake: Callable[[Patch], None], model: Loaded, monkeypatch: Patch
) -> None:
    mistake(monkeypatch)
    assert MISTAKES[mistake] in refusal(model)


@pytest.fixture
def unwatched(model: Loaded) -> Iterator[Loaded]:
    """Layers that report to nobody, before and after."""
    yield model
    for module in model.model.modules():
        pre_hooks(module).clear()


CUTS = tuple(range(LAYERS))


@FORMATS
def test_boundary_states_are_proven(unwatched: Loaded) -> None:
    """At each cut: what enters there is what the model's own forward has left."""
    eps = torch.finfo(unwatched.vllm_config.model_config.dtype).eps
    stored = typed_pages(unwatched.first).dtype
    near_ties = (eps * torch.finfo(stored).eps) ** 0.5 if stored.itemsize == 1 else 0.0
    runtime = prove(unwatched, CUTS)
    assert runtime.max_deviation < eps * 16 + 2 * near_ties
    states = runtime.prefill.states
    assert states is not None
    assert states.cuts == CUTS
    assert int((states.positions >= 0).sum(1).min()) > 100


def _nothing_is_reported(patch: Patch) -> None:
    patch.setattr(DecoderStack, "report_input", lambda *_: None)


def _states_without_the_residual(patch: Patch) -> None:
    patch.setattr(LayerState, "stream", property(lambda state: state.hidden_states))


def _states_of_the_slot_before(patch: Patch) -> None:
    at = BoundaryStates.at
    patch.setattr(BoundaryStates, "at", lambda self, cut, slots: at(self, cut, slots - 1))


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (_nothing_is_reported, "the sparse pass meets NaN or infinity (Staged(cuts=(1,)))"),
        (_states_without_the_residual, "does not reproduce this model's own forward"),
        (_states_of_the_slot_before, "does not reproduce this model's own forward"),
    ],
)
def test_wrong_boundary_states_are_found(
    mistake: Callable[[Patch], None], why: str, unwatched: Loaded, monkeypatch: Patch
) -> None:
    mistake(monkeypatch)
    assert why in refusal(unwatched, (1,))


@pytest.mark.parametrize("program", [Stock, Fixed, Staged, Boundary, Deviation, Probed])
def test_a_program_that_computes_nothing_is_found(
    program: type[Program], model: Loaded, monkeypatch: Patch
) -> None:
    def nothing(_: Program, __: Any, batch: Any) -> Any:
        yield 0
        return batch.always.device, None

    monkeypatch.setattr(programs.PROGRAMS[program], "run", nothing)
    assert "does not reproduce this model's own forward" in refusal(model)


@pytest.mark.parametrize(
    ("model", "share", "passes"),
    [
        ("float32", 1e-5, True),
        ("float32", 1e-3, False),
        ("float32", 0.01, False),
        ("bfloat16", 0.01, True),
        ("bfloat16", 0.1, False),
    ],
    indirect=["model"],
)
def test_the_pass_may_be_off_by_rounding_only(
    share: float, passes: bool, model: Loaded, monkeypatch: Patch
) -> None:
    run = SparsePrefill.run

    def off(self: SparsePrefill, plans: list[ReusePlan]) -> Any:
        report = run(self, plans)
        for layer in model.attention.values():
            flat_pages(layer.kv_cache)[plans[0].block_ids.tolist()] *= 1 + share
        return report

    monkeypatch.setattr(SparsePrefill, "run", off)
    if passes:
        assert share / 2 < prove(model).max_deviation < 2 * share
    else:
        assert "does not reproduce this model's own forward" in refusal(model)


@pytest.mark.parametrize(
    ("dtype", "off", "fine"),
    [
        (torch.float32, 2.4e-4, True),
        (torch.float32, 2.5e-4, False),
        (torch.bfloat16, 0.12, True),
        (torch.bfloat16, 0.13, False),
    ],
    ids=str,
)
def test_a_cached_key_may_be_off_by_rounding_only(
    dtype: torch.dtype, off: float, fine: bool
) -> None:
    layer: Any = SimpleNamespace(num_kv_heads=1, head_size=HEAD_SIZE, layer_name="layer 7")
    key = torch.randn(50, HEAD_SIZE).to(dtype)
    shifted = (key.float() * (1 + off)).to(dtype)
    if fine:
        prove_rotation(layer, key, shifted, None, 100)
    else:
        with pytest.raises(rope.RopeError, match="layer 7: the cached key carries positions"):
            prove_rotation(layer, key, shifted, None, 100)


def _values_grow(model: Loaded, index: int, patch: Patch) -> None:
    """With their position, at one layer: slower than those of Moondream 3."""
    attention = model.model.model.layers[index].self_attn

    def forward(positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        sizes = attention.q_size, attention.kv_size, attention.kv_size
        query, key, value = attention.qkv_proj(hidden_states)[0].split(sizes, -1)
        query, key = attention.rotary_emb(positions, query, key)
        grown = 1 + 0.3 * torch.sigmoid(0.3 * (positions + 1).log())
        value = value * grown[:, None].to(value.dtype)
        output: torch.Tensor = attention.o_proj(attention.attn(query, key, value))[0]
        return output

    patch.setattr(attention, "forward", forward)


@pytest.mark.parametrize("model", ["float32", "bfloat16"], indirect=True)
@pytest.mark.parametrize("index", range(LAYERS))
def test_a_value_that_depends_on_its_position_is_found(
    index: int, model: Loaded, monkeypatch: Patch
) -> None:
    _values_grow(model, index, monkeypatch)
    why = f"model.layers.{index}.self_attn.attn: the cached value depends on its position"
    assert why in refusal(model)


@pytest.mark.parametrize(
    ("dtype", "off", "fine"),
    [
        (torch.float32, 6.0e-5, True),
        (torch.float32, 6.2e-5, False),
        (torch.float32, math.nan, False),
        (torch.bfloat16, 0.03, True),
        (torch.bfloat16, 0.035, False),
    ],
    ids=str,
)
def test_the_value_of_each_token_may_be_off_by_rounding_only(
    dtype: torch.dtype, off: float, fine: bool
) -> None:
    layer: Any = SimpleNamespace(layer_name="layer 7")
    value = torch.randn(50, 2, HEAD_SIZE).to(dtype)
    value[3] = 0
    shifted = value.clone()
    shifted[40] = (value[40].float() * (1 + off)).to(dtype)
    if fine:
        prove_value(layer, value, shifted)
    else:
        with pytest.raises(rope.RopeError, match="layer 7: the cached value depends on its pos"):
            prove_value(layer, value, shifted)


@pytest.mark.parametrize("off", [1e-3, float("nan")])
def test_a_moved_value_is_the_value(off: float, model: Loaded, monkeypatch: Patch) -> None:
    align = cpu.align

    def inexact(pages: list[torch.Tensor], parts: Any, moves: Any) -> None:
        align(pages, parts, moves)
        for each in pages:
            each[5:9] *= 1 + off

    monkeypatch.setattr(cpu, "align", inexact)
    assert "moved keys or values are not" in refusal(model)


@pytest.mark.needs("fp8_cache")
@pytest.mark.parametrize("model", ["bfloat16 fp8_e5m2"], indirect=True)
def test_a_moved_value_in_fp8_is_the_value(model: Loaded, monkeypatch: Patch) -> None:
    """All of them a step too large is less than the step itself, and found all the same."""
    align = cpu.align

    def inexact(pages: list[torch.Tensor], parts: Any, moves: Any) -> None:
        align(pages, parts, moves)
        for each in pages:
            codes = each.view(torch.uint8)[5:9]
            codes += (codes & 0x7F) > 0

    monkeypatch.setattr(cpu, "align", inexact)
    assert "moved keys or values are not" in refusal(model)


@pytest.mark.parametrize(
    ("stored", "noise", "allowed"),
    [
        ("fp8", 0.0, 0.0884),
        ("fp8", 0.01, 0.0884),
        ("fp8", 0.06, 0.24),
        ("fp8", 0.2, 0.5),
        ("fp8", 9.0, 0.5),
        ("auto", 0.0, 0.0625),
        ("auto", 0.01, 0.0625),
        ("auto", 0.06, 0.12),
    ],
)
def test_passes_may_be_some_times_as_far_off_as_rounding(
    stored: str, noise: float, allowed: float, monkeypatch: Patch
) -> None:
    """Without fp8, too: DeepSeek V3's and those of Gemma 3 270M are off by 0.06."""
    ran: list[str] = []
    of_pages = torch.uint8 if stored == "fp8" else torch.bfloat16
    layer = SimpleNamespace(kv_cache_dtype=stored, kv_cache=torch.zeros(1, dtype=of_pages))
    scratch: Any = SimpleNamespace(
        stack=SimpleNamespace(attention=[layer]),
        dtype=torch.bfloat16,
        clear_copy=lambda: ran.append("cleared"),
        forward_rounded_otherwise=lambda: ran.append("again"),
    )
    monkeypatch.setattr(passes, "deviation", lambda _: noise)
    assert passes.allowed_deviation(scratch) == pytest.approx(allowed, rel=1e-2)
    assert ran == ["cleared", "again"]


@pytest.mark.parametrize("model", ["bfloat16", "float16"], indirect=True)
def test_rounding_is_that_of_attention_by_another_kernel(model: Loaded, monkeypatch: Patch) -> None:
    """Also where vLLM prefers the very kernels that the proof has, and they make the same numbers
    each time. Passes may: some machines' kernels of vLLM and ours round as one."""
    found: list[float] = []
    scratches: list[Any] = []
    deviation = passes.deviation

    def noted(scratch: Any) -> float:
        scratches.append(scratch)
        found.append(deviation(scratch))
        return found[-1]

    monkeypatch.setattr(passes, "deviation", noted)
    monkeypatch.setattr(FastOps, "preferred", lambda _: nullcontext())
    prove(model)
    rounding, *of_passes = found
    assert max(of_passes) < 2 * rounding

    scratch = scratches[0]
    layers = scratch.stack.attention
    for attend in (_kernel(torch.float32), _kernel(scratch.dtype)):
        for layer in layers:  # of the kernel before
            typed_pages(layer)[scratch.copy.tolist()] = typed_pages(layer)[scratch.own.tolist()]
        with torch.inference_mode(), replaced_forward(layers, attend):
            scratch.forward()
    assert rounding / 2 < deviation(scratch) < rounding


def _kernel(weights_in: torch.dtype) -> Callable[..., torch.Tensor]:
    """Attention of one request, as vLLM's layers call it, whose weights are of this type: by matrix
    units they are of the model's."""

    def attend(
        layer: Any, query: Any, key: Any, value: Any, _: Any, __: Any, output: Any, **more: Any
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (part.float().repeat_interleave(group, dim=1) for part in (key, value))
        logits = torch.einsum("qhd,thd->hqt", query.float() * layer.impl.scale, key)
        logits += torch.full(logits.shape[1:], -torch.inf).triu(1)
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        attended = torch.einsum("hqt,thd->qhd", weights.to(weights_in).float(), value)
        return output.copy_(attended / weights.sum(-1).T[..., None])

    return attend


@pytest.mark.parametrize("wrong", ["keys", "values"])
def test_keys_and_values_are_compared_each_by_its_own_norm(wrong: str) -> None:
    """Keys may have a bias that is a thousand times as large as values are."""
    layout = PageLayout(_channels_of_page(0), _channels_of_page(1))
    pages = torch.tensor([[1000.0, 1.0], [1000.0, 1.0]])
    pages[1, ["keys", "values"].index(wrong)] *= 1.5
    scratch: Any = SimpleNamespace(
        stack=SimpleNamespace(attention=[SimpleNamespace(kv_cache_dtype="auto", kv_cache=pages)]),
        layouts=[layout],
        tables=[0],
        own_in=lambda table: np.array([0]),
        copy_in=lambda table: np.array([1]),
        count=1,
    )
    assert passes.deviation(scratch) == 0.5


def _channels_of_page(offset: int) -> TiledStrides:
    """Keys or values of one head, token and channel."""
    return TiledStrides((1, 1, 1), offset, 2, 1, 2, 2, 1, 1, 1)


@pytest.mark.parametrize(
    ("found", "fine"), [(0.25, True), (0.2501, False), (0.0, True), (math.nan, False)]
)
def test_a_deviation_is_allowed_up_to_what_rounding_does(found: float, fine: bool) -> None:
    if fine:
        passes.require_equal("a pass", found, 0.25)
        return
    with pytest.raises(
        UnsupportedModelError,
        match=rf"^a pass does not reproduce this model's own forward \(off by {found:.2g} of its "
        r"norm, allowed 0\.25\)$",
    ):
        passes.require_equal("a pass", found, 0.25)


@pytest.mark.parametrize(("off", "fine"), [(0.9e-4, True), (1.1e-4, False)])
def test_scores_may_be_off_by_rounding_only(
    off: float, fine: bool, model: Loaded, monkeypatch: Patch
) -> None:
    """Sums as well as peaks, and sums over the last queries, each by itself."""
    scores = cpu.token_scores
    for wrong in ((False, False), (True, False), (False, True)):

        def inexact(
            *given: Any, last: int | None = None, wrong: tuple[bool, bool] = wrong
        ) -> torch.Tensor:
            is_wrong = (given[7], last is not None) == wrong
            return scores(*given, last=last) * (1 + off * is_wrong)

        monkeypatch.setattr(cpu, "token_scores", inexact)
        if fine:
            prove(model)
        else:
            assert "are not the attention that queries pay them (off by 0.00011" in refusal(model)


# What no proof covers.


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sliding_window": 64}, "has a sliding window of 64, its backend of None"),
        ({"has_sink": True}, "has attention sinks that its backend does not show"),
        ({"attn_type": "encoder_only"}, "is encoder_only attention"),
        ({"head_size_v": 2 * HEAD_SIZE}, "has values of another size than its keys"),
    ],
)
def test_a_layer_that_attends_otherwise_is_refused(
    change: dict[str, Any], why: str, model: Loaded, monkeypatch: Patch
) -> None:
    for name, value in change.items():
        assert hasattr(model.first, name), f"vLLM's attention layers have no {name} any more"
        monkeypatch.setattr(model.first, name, value)
    assert f"model.layers.0.self_attn.attn {why}" in refusal(model)


def test_layers_with_alibi_are_refused(model: Loaded) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^other has ALiBi positions"):
        check_attention({"other": _layer(model, alibi_slopes=[0.5] * HEADS)}, BLOCK_SIZE)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, AttentionKind()),
        ({"logits_soft_cap": 30.0}, AttentionKind(soft_cap=30.0)),
        ({"per_layer_sliding_window": 64}, AttentionKind(window=64)),
        ({"per_layer_sliding_window": POSITIONS - 1}, AttentionKind(window=POSITIONS - 1)),
        ({"per_layer_sliding_window": POSITIONS}, AttentionKind()),
        ({"sinks": torch.zeros(HEADS)}, AttentionKind(has_sinks=True)),
    ],
)
def test_the_kind_of_layers_as_vllm_makes_them(
    options: dict[str, Any], kind: AttentionKind, model: Loaded
) -> None:
    """A window that no request can leave is none."""
    layer = _layer(model, **options)
    check_attention({"other": layer}, BLOCK_SIZE)
    assert kind_of(layer, POSITIONS) == kind


def test_plain_layers_are_not_refused(model: Loaded) -> None:
    check_attention({"plain": _layer(model)} | model.attention, BLOCK_SIZE)


def _layer(model: Loaded, **options: Any) -> Any:
    from vllm.model_executor.layers.attention import Attention

    layer = Attention(HEADS, HEAD_SIZE, 1.0, 1, prefix="other", **options)
    del model.attention["other"]
    layer.kv_cache = model.first.kv_cache
    return layer


def test_a_layer_that_shares_kv_in_front_of_others_is_refused(
    model: Loaded, monkeypatch: Patch
) -> None:
    """What is behind all that write it is in test_sharing.py."""
    monkeypatch.setattr(model.first, "kv_sharing_target_layer_name", "model.layers.1")
    name = "model.layers.0.self_attn.attn"
    assert f"{name} shares the KV of another layer, and layers behind" in refusal(model)


def test_a_layer_that_shares_kv_beside_the_decoders_is_refused(
    model: Loaded, monkeypatch: Patch
) -> None:
    """vLLM leaves it out of the group that it shows to connectors."""
    sharing: Any = SimpleNamespace(kv_sharing_target_layer_name="model.layers.0")
    monkeypatch.setitem(model.attention, "model.layers.9", sharing)
    assert f"one attention layer each ({LAYERS + 1} attention layers in all)" in refusal(model)


@pytest.mark.parametrize("window", [128, (127, 0)])
def test_a_window_of_the_backends_own_is_refused(
    window: Any, model: Loaded, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(model.first.impl, "sliding_window", window)
    assert "has a sliding window of None, its backend of 128" in refusal(model)


@pytest.mark.parametrize("nowhere", [None, -1, (-1, -1)])
def test_a_window_of_no_size_is_none(nowhere: Any, model: Loaded, monkeypatch: Patch) -> None:
    monkeypatch.setattr(model.first.impl, "sliding_window", nowhere)
    check_attention(model.attention, BLOCK_SIZE)


def test_attention_of_another_kind_is_refused(model: Loaded, monkeypatch: Patch) -> None:
    from vllm.model_executor.layers.attention import Attention

    class CrossAttention(Attention):
        """vLLM's own has what is above, and keys of another sequence."""

    monkeypatch.setattr(model.first, "__class__", CrossAttention)
    assert "self_attn.attn is CrossAttention, not plain attention" in refusal(model)


def test_pages_of_another_size_than_the_schedulers_are_refused(model: Loaded) -> None:
    with pytest.raises(UnsupportedModelError, match=r"pages of 32 tokens, .* have 64"):
        check_attention(model.attention, 2 * BLOCK_SIZE)


@pytest.mark.parametrize(("num_blocks", "enough"), [(8, False), (9, True)])
def test_a_cache_without_room_for_the_proof_is_refused(
    num_blocks: int, enough: bool, model: Loaded
) -> None:
    cache = dataclasses.replace(model.kv_cache_config, num_blocks=num_blocks)
    small = dataclasses.replace(model, kv_cache_config=cache)
    if enough:
        prove(small)
    else:
        assert "the KV cache has 8 blocks only; give it more memory" in refusal(small)


# Attention sinks; windows and capped logits: test_windows.py.


@pytest.fixture
def sinking(model: Loaded, monkeypatch: Patch) -> Loaded:
    """Whose attention has sinks."""
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    for number, layer in enumerate(model.attention.values()):
        monkeypatch.setattr(layer, "has_sink", True)
        monkeypatch.setattr(layer.impl, "sinks", torch.tensor([0.5, -1.0]) * (1 + number))
    return model


@pytest.fixture
def only_by_layer(monkeypatch: Patch) -> None:
    """Rounding may hide a mistake among random tokens: those that are made for it must find it."""
    monkeypatch.setattr(checks, "prove_passes", lambda *_: 0.0)


@FORMATS
def test_a_model_with_sinks_is_proven(sinking: Loaded) -> None:
    assert prove(sinking).prefill.layers.scored == (0, 1)


def test_sinks_are_refused_where_the_cpu_backend_divides_keys_among_threads(
    sinking: Loaded, monkeypatch: Patch
) -> None:
    monkeypatch.delenv("VLLM_CPU_ATTN_SPLIT_KV")
    with pytest.raises(RefusedError, match="keys among threads; set VLLM_CPU_ATTN_SPLIT_KV=0"):
        prove(sinking)


@pytest.mark.usefixtures("only_by_layer")
@pytest.mark.parametrize(("times", "passes"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("position", [0, 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_attention_may_be_off_by_a_share_of_what_one_key_of_many_contributes(
    position: int, times: float, passes: bool, sinking: Loaded, monkeypatch: Patch
) -> None:
    """A ten thousandth of the value of a key, by the number of keys that the query sees. Sinks
    leave next to nothing of the output itself."""
    for layer in sinking.attention.values():
        monkeypatch.setattr(layer.impl, "sinks", torch.tensor([20.0, 20.0]))
    off_at(position, times * 1e-4 / (position + 1), monkeypatch)
    if passes:
        prove(sinking)
    else:
        assert "the pass does not attend to all tokens before, with sinks" in refusal(sinking)


def off_at(position: int, error: float, patch: Patch) -> None:
    """The kernel's attention of queries at a position, where it is proven layer by layer."""
    attend = cpu.sparse_attention

    def inexact(out: torch.Tensor, *given: Any, **more: Any) -> None:
        attend(out, *given, **more)
        positions = given[6]
        if positions[:2].tolist() == [0, 1] and len(positions) < 10:
            out[positions == position, -1, 3] += error

    patch.setattr(cpu, "sparse_attention", inexact)


@pytest.mark.usefixtures("only_by_layer")
@pytest.mark.parametrize(("times", "passes"), [(0.9, True), (1.1, False)])
def test_attention_may_be_off_by_a_share_of_itself(
    times: float, passes: bool, model: Loaded, monkeypatch: Patch
) -> None:
    """At position 1 it is half of the first value and half of the second, which is twice that."""
    off_at(1, times * 1.5e-4, monkeypatch)
    if passes:
        prove(model)
    else:
        assert re.search(
            r"layers\.0\.self_attn\.attn: the pass does not attend to all tokens before "
            r"\(off by 0\.00011\)",
            refusal(model),
        )


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("splits", ["0", "1"])
def test_only_sinks_on_a_cpu_whose_keys_are_divided_are_refused(
    splits: str, on_cpu: bool, sinks: bool, monkeypatch: Patch
) -> None:
    impl = SimpleNamespace(sinks=torch.zeros(2) if sinks else None)
    impl.get_impl_variants = lambda: [impl]
    platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    monkeypatch.setattr(causal, "current_platform", platform)
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", splits)
    layers: Any = {"a": SimpleNamespace(impl=impl)}
    if sinks and on_cpu and splits == "1":
        with pytest.raises(RefusedError, match="set VLLM_CPU_ATTN_SPLIT_KV=0"):
            check_split_keys(layers)
    else:
        check_split_keys(layers)


@FORMATS
@pytest.mark.usefixtures("only_by_layer")
def test_a_sink_that_is_dropped_is_found(sinking: Loaded, monkeypatch: Patch) -> None:
    attend = cpu.sparse_attention
    monkeypatch.setattr(
        cpu,
        "sparse_attention",
        lambda *given, sinks, **more: attend(*given, **more),
    )
    assert "the pass does not attend to all tokens before, with sinks" in refusal(sinking)


@pytest.mark.usefixtures("only_by_layer")
def test_a_backend_that_does_otherwise_than_its_layer_says_is_found(
    sinking: Loaded, monkeypatch: Patch
) -> None:
    attend = type(sinking.first.impl).forward

    def without_sinks(impl: Any, *given: Any, **more: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(impl, "sinks", None)
            return attend(impl, *given, **more)

    monkeypatch.setattr(type(sinking.first.impl), "forward", without_sinks)
    assert "the stock backend does not attend to all tokens before" in refusal(sinking)


@FORMATS
def test_scores_without_the_sinks_are_found(sinking: Loaded, monkeypatch: Patch) -> None:
    scores = cpu.token_scores
    monkeypatch.setattr(
        cpu, "token_scores", lambda *given, sinks, last=None: scores(*given, last=last)
    )
    assert "the scores of tokens are not the attention" in refusal(sinking)


# What follows from the configuration.


@pytest.mark.parametrize(
    ("only", "compiled"),
    [
        (None, True),
        *(("eager", False), ("multimodal", False), ("experts", False), ("lora", False)),
        *(("quantised output", False), ("stages", False)),
    ],
)
def test_which_models_run_as_compiled(only: str | None, compiled: bool) -> None:
    eager = only == "eager"
    mode = checks.CompilationMode.NONE if eager else checks.CompilationMode.VLLM_COMPILE
    given: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            is_multimodal_model=only == "multimodal", is_moe=only == "experts"
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1 + (only == "stages")),
        lora_config=object() if only == "lora" else None,
        compilation_config=SimpleNamespace(
            mode=mode,
            pass_config=SimpleNamespace(fuse_attn_quant=only == "quantised output"),
        ),
    )
    assert checks.may_run_compiled(given) is compiled


@pytest.mark.parametrize(
    ("scattered", "latent", "tokens", "rows"),
    [
        (None, False, 8192, 8192),
        (object(), False, 8192, 8192 // 16 + 33),
        (None, True, 8192, 8192 // 16 + 33),
        (None, True, 1024, 256),
    ],
)
def test_the_builder_has_room_for_every_row(
    scattered: Any, latent: bool, tokens: int, rows: int
) -> None:
    """Each token may be a row of its own, unless a kernel of ours takes scattered ones, or few are
    decoded at once."""
    scheduler = SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=32)
    given: Any = SimpleNamespace(scheduler_config=scheduler)
    part = TiledStrides((1, 16, 8), 0, 0, 16, 0, 8, 8, 0, 1)
    pages = [PageLayout(part, part), PageLayout(part, part, part if latent else None)]
    kernels: Any = {
        pages[0]: SimpleNamespace(sparse_attention=object()),
        pages[1]: SimpleNamespace(sparse_attention=scattered),
    }
    assert checks.most_rows_of(given, kernels) == rows
