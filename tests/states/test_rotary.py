# SPDX-License-Identifier: Apache-2.0
"""Rotary modules are given rows, also of models that have queries and keys by head."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from segreuse_extras.states.rotary import turn_rows

COUNT, HEADS, KV_HEADS, CHANNELS = 10, 4, 2, 32
CLOSE = 1e-5


@pytest.fixture
def rotary() -> Iterator[RotaryEmbedding]:
    with set_current_vllm_config(VllmConfig()):
        yield RotaryEmbedding(CHANNELS, CHANNELS, 128, 10000.0, True, torch.float32)


@pytest.fixture
def layer(rotary: RotaryEmbedding) -> nn.Module:
    """As a model that is run eagerly has it: it calls the kernel."""
    rotary._forward_method = rotary.forward_cpu
    made = nn.Module()
    made.rotary_emb = rotary
    return made


def off(layer: nn.Module, by_head: bool) -> float:
    """How far what a layer turns is from plain torch."""
    torch.manual_seed(0)
    positions = torch.arange(COUNT) + 5
    query, key = torch.randn(COUNT, HEADS, CHANNELS), torch.randn(COUNT, KV_HEADS, CHANNELS)
    rotary = layer.rotary_emb
    expected = rotary.forward_native(positions, query.flatten(1).clone(), key.flatten(1).clone())
    if not by_head:
        query, key = query.flatten(1), key.flatten(1)
    found = rotary(positions, query.clone(), key.clone())
    pairs = zip(found, expected, strict=True)
    return max(float((it.flatten(1) - wanted).norm() / wanted.norm()) for it, wanted in pairs)


def test_vllms_kernel_turns_what_is_given_by_head_wrongly(layer: nn.Module) -> None:
    """Once it does not any more, `states/rotary.py` can go."""
    assert off(layer, by_head=False) < CLOSE
    assert off(layer, by_head=True) > 0.5


@pytest.mark.parametrize("by_head", [True, False])
def test_in_rows_it_turns_them_as_plain_torch_does(by_head: bool, layer: nn.Module) -> None:
    turn_rows([layer, layer])
    assert off(layer, by_head) < CLOSE


def test_a_key_that_is_not_there_stays_so(layer: nn.Module) -> None:
    turn_rows([layer])
    query = torch.randn(COUNT, HEADS, CHANNELS)
    _, key = layer.rotary_emb(torch.arange(COUNT), query, None)
    assert key is None
