# SPDX-License-Identifier: Apache-2.0
"""What only goes wrong over a long context is found at start-up: by kernels that are plain torch,
and then are made wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.align_cases import nhd
from vllm_segreuse.kernels import reference
from vllm_segreuse.kernels.pages import PageLayout
from vllm_segreuse.model.attention_kind import FULL, AttentionKind
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.prefill.proofs.long_contexts import CONTEXT, QUERIES, prove_long_contexts


@dataclass(frozen=True)
class Schedule:
    splits: int = 1
    common: bool | None = None


class Kernels:
    """Plain torch, of which each call is noted; `attend` and `score` may change what it returns."""

    def __init__(self, plans: bool = True) -> None:
        self.seen: list[tuple[str, int, int, bool]] = []
        self.attend: Callable[[torch.Tensor, Schedule], torch.Tensor] = lambda out, _: out
        self.score: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores
        self.plan_attention = self._plan if plans else None

    def _plan(self, *_: torch.Tensor, window: int, common_tiles: int) -> Schedule:
        """As for queries that are five tiles."""
        return Schedule(7, common=(common_tiles <= 5 and not window) or None)

    def sparse_attention(
        self, out: torch.Tensor, query: torch.Tensor, *given: Any, **more: Any
    ) -> None:
        schedule = more.pop("schedule", Schedule())
        self.seen.append(("attention", more["window"], schedule.splits, bool(schedule.common)))
        reference.sparse_attention(out, query, *given, **more)
        out.copy_(self.attend(out, schedule))

    def token_scores(self, *given: Any, **more: Any) -> torch.Tensor:
        self.seen.append(("scores", int(given[-1]), 0, False))
        return self.score(reference.token_scores(*given, **more))


SHAPE = nhd(2, 16, 16)


def layer(kernels: Any, kind: AttentionKind = FULL, dtype: torch.dtype = torch.float32) -> LayerKv:
    assert SHAPE.values is not None
    attention: Any = SimpleNamespace(
        layer_name="model.layers.3.attn",
        num_heads=4,
        impl=SimpleNamespace(scale=0.25),
        kv_cache=torch.zeros(4, SHAPE.page_elements, dtype=dtype),
        kv_cache_dtype="auto",
    )
    return LayerKv(attention, PageLayout(SHAPE.keys, SHAPE.values), None, kernels, kind)


def test_layers_that_are_alike_are_asked_once_in_every_way() -> None:
    kernels, window = Kernels(), AttentionKind(window=300)
    prove_long_contexts([layer(kernels), layer(kernels), layer(kernels, window)], torch.float32)
    attention = [("attention", 0, splits, common) for common in (True, False) for splits in (1, 3)]
    scores = [("scores", 0, 0, False), ("scores", 1, 0, False)]
    assert kernels.seen[:6] == attention + scores
    assert kernels.seen[6:] == [("attention", 300, 1, False), ("attention", 300, 3, False)]


def test_without_a_plan_attention_is_asked_once() -> None:
    kernels = Kernels(plans=False)
    prove_long_contexts([layer(kernels)], torch.float32)
    assert [what for what, *_ in kernels.seen].count("attention") == 1


def test_layers_without_a_kernel_are_left_out() -> None:
    prove_long_contexts([layer(SimpleNamespace(sparse_attention=None))], torch.float32)


def test_rounding_passes() -> None:
    kernels = Kernels()
    kernels.attend = lambda out, _: out * 1.002
    prove_long_contexts([layer(kernels, dtype=torch.bfloat16)], torch.bfloat16)


@pytest.mark.parametrize("what", ["attend", "score"])
def test_a_ten_thousandth_is_rounding_and_more_is_not(what: str) -> None:
    for off, fine in ((0.9e-4, True), (1.1e-4, False)):
        kernels = Kernels()
        setattr(kernels, what, lambda out, *_, off=off: out * (1 + off))
        if fine:
            prove_long_contexts([layer(kernels)], torch.float32)
        else:
            with pytest.raises(UnsupportedModelError, match=r"\(off by 0\.00011 of its norm\)$"):
                prove_long_contexts([layer(kernels)], torch.float32)


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize("splits", [1, 3])
def test_attention_that_is_off_is_refused(splits: int, common: bool) -> None:
    """By one program, or by several only; behind common keys only, or with them."""
    kernels = Kernels()
    wrong = Schedule(splits, common or None)
    kernels.attend = lambda out, schedule: out + 0.1 * (schedule == wrong)
    with pytest.raises(UnsupportedModelError, match=f"over {CONTEXT} tokens attention of the pass"):
        prove_long_contexts([layer(kernels)], torch.float32)


def test_numbers_that_are_none_are_refused() -> None:
    kernels = Kernels()
    kernels.attend = lambda out, _: out * torch.nan
    with pytest.raises(UnsupportedModelError, match="off by nan"):
        prove_long_contexts([layer(kernels)], torch.float32)


def test_scores_of_the_token_before_are_refused() -> None:
    kernels = Kernels()
    kernels.score = lambda scores: scores.roll(-1)
    with pytest.raises(UnsupportedModelError, match=f"over {CONTEXT} tokens scores of tokens"):
        prove_long_contexts([layer(kernels)], torch.float32)


def test_most_queries_have_many_steps_before_them() -> None:
    seen: list[torch.Tensor] = []
    kernels = Kernels()
    attend = kernels.sparse_attention

    def noting(*given: Any, **more: Any) -> None:
        seen.append(given[-2])
        attend(*given, **more)

    kernels.sparse_attention = noting  # type: ignore[method-assign]
    prove_long_contexts([layer(kernels)], torch.float32)
    positions = seen[0]
    assert len(positions) == QUERIES
    assert positions.min() >= CONTEXT // 4
    assert positions.max() > CONTEXT * 0.9
    assert (positions.diff() > 0).all()
