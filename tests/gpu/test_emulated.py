# SPDX-License-Identifier: Apache-2.0
"""The emulated attention of GPUs is right, and refuses what it does not compute."""

from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import fa_utils

from tests.gpu import emulated

KEYS, VALUES = torch.randn(2, 3, 16, 2, 8)  # three blocks, two KV heads
QUERY = torch.randn(5, 4, 8)
STARTS, LENGTHS = [0, 3, 5], [19, 2]
PAGES = torch.tensor([[2, 0], [1, 0]])
SCALE = 0.4


def truth() -> torch.Tensor:
    """Query by query: the last three of 19 tokens, and both of two."""
    out = torch.empty_like(QUERY)
    for i, (row, position) in enumerate([(0, 16), (0, 17), (0, 18), (1, 0), (1, 1)]):
        k, v = (part[PAGES[row]].flatten(0, 1)[: position + 1] for part in (KEYS, VALUES))
        for head in range(4):
            weights = (k[:, head // 2] @ QUERY[i, head] * SCALE).softmax(0)
            out[i, head] = weights @ v[:, head // 2]
    return out


@pytest.fixture(params=[2, 3], ids=["version 2", "version 3"])
def flash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """FlashAttention's functions, emulated until the test ends."""
    for name in (
        "get_flash_attn_version",
        "is_flash_attn_varlen_func_available",
        "get_scheduler_metadata",
        "flash_attn_varlen_func",
        "reshape_and_cache_flash",
        "compile_flash_attn_varlen_func_from_specs",
    ):
        monkeypatch.setattr(fa_utils, name, None, raising=False)
    emulated.install_flash_attention(request.param)

    def run(**changes: Any) -> torch.Tensor:
        out = torch.empty_like(QUERY)
        given = {
            "q": QUERY,
            "k": KEYS,
            "v": VALUES,
            "out": out,
            "cu_seqlens_q": torch.tensor(STARTS),
            "seqused_k": torch.tensor(LENGTHS),
            "max_seqlen_k": 19,
            "block_table": PAGES,
            "softmax_scale": SCALE,
            "causal": True,
            "window_size": [-1, -1],
            "softcap": 0.0,
            "alibi_slopes": None,
            "scheduler_metadata": torch.full((emulated.schedule_bytes(2),), 19),
        } | changes
        fa_utils.flash_attn_varlen_func(**given)
        return out

    return run


def test_flash_attention_is_causal(flash: Any) -> None:
    torch.testing.assert_close(flash(), truth())


@pytest.mark.parametrize(
    "asked",
    [
        {"causal": False},
        {"causal": torch.ones(2, dtype=torch.int32)},
        {"window_size": [15, 0]},
        {"softcap": 30.0},
        {"alibi_slopes": torch.ones(4)},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_flash_attention_refuses_what_it_does_not_compute(
    flash: Any, asked: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError, match="emulated"):
        flash(**asked)


def wrapper(**changes: Any) -> emulated.Wrapper:
    planned = emulated.Wrapper(torch.empty(0), "NHD")
    given = {"causal": True, "sm_scale": SCALE, "window_left": -1, "logits_soft_cap": None}
    indptr = torch.tensor([0, 2, 3])
    planned.plan(
        torch.tensor(STARTS), indptr, PAGES.flatten()[:3], torch.tensor(LENGTHS), **given | changes
    )
    return planned


def test_flashinfer_is_causal() -> None:
    out = torch.empty_like(QUERY)
    wrapper().run(QUERY, (KEYS, VALUES), out=out)
    torch.testing.assert_close(out, truth())


@pytest.mark.parametrize(
    "asked",
    [{"causal": False}, {"window_left": 15}, {"logits_soft_cap": 30.0}],
    ids=lambda asked: next(iter(asked)),
)
def test_flashinfer_refuses_what_it_does_not_compute(asked: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="emulated"):
        wrapper(**asked)
