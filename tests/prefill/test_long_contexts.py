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
from vllm_segreuse.model.layers import UnsupportedModelError
from vllm_segreuse.prefill.proofs.long_contexts import CONTEXT, QUERIES, prove_long_contexts


@dataclass(frozen=True)
class Schedule:
    splits: int = 1


class Kernels:
    """Plain torch, of which each call is noted; `attend` and `score` may change what it returns."""

    def __init__(self, plans: bool = True) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self.attend: Callable[[torch.Tensor, int], torch.Tensor] = lambda out, _: out
        self.score: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores
        self.plan_attention = (lambda *_: Schedule(7)) if plans else None

    def sparse_attention(
        self, out: torch.Tensor, query: torch.Tensor, *given: Any, **more: Any
    ) -> None:
        splits = more.pop("schedule", Schedule()).splits
        self.seen.append(("attention", more["window"], splits))
        reference.sparse_attention(out, query, *given, **more)
        out.copy_(self.attend(out, splits))

    def token_scores(self, *given: Any, **more: Any) -> torch.Tensor:
        self.seen.append(("scores", int(given[-1]), 0))
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
    attention = [("attention", 0, 1), ("attention", 0, 3)]
    scores = [("scores", 0, 0), ("scores", 1, 0)]
    assert kernels.seen[:4] == attention + scores
    assert kernels.seen[4:] == [("attention", 300, 1), ("attention", 300, 3)]


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


@pytest.mark.parametrize("splits", [1, 3])
def test_attention_that_is_off_is_refused(splits: int) -> None:
    """By one program, or by several only."""
    kernels = Kernels()
    kernels.attend = lambda out, found: out + 0.1 * (found == splits)
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
