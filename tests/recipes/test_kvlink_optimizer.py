# SPDX-License-Identifier: Apache-2.0
"""Muon moves the matrices of layers, AdamW all else, and both are saved."""

import copy
from typing import Any

import pytest
import torch

from recipes.kvlink.optimizer import MuonAndAdamW
from tests.recipes.lab_folder import model_and_writer


def made(model: Any, matrix_rate: float = 0.01, rate: float = 0.001) -> MuonAndAdamW:
    return MuonAndAdamW(model, matrix_rate, rate, (0.9, 0.98), 0.0)


def step(model: Any, optimizer: MuonAndAdamW) -> None:
    model(torch.arange(2, 40)[None], labels=torch.arange(2, 40)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def moved(matrix_rate: float, rate: float) -> set[str]:
    """Parameters that a step changes."""
    model, _ = model_and_writer()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, made(model, matrix_rate, rate))
    return {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}


def test_each_has_its_rate() -> None:
    matrices, others = moved(0.01, 0.0), moved(0.0, 0.01)
    assert matrices >= {
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.7.self_attn.q_proj.weight",
    }
    assert all("proj" in name for name in matrices)
    assert others >= {"model.embed_tokens.weight", "model.norm.weight"}
    assert not matrices & others
    model, _ = model_and_writer()
    assert matrices | others == {name for name, _ in model.named_parameters()}


def test_a_head_of_its_own_is_no_matrix_of_a_layer() -> None:
    model, _ = model_and_writer()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    matrices, others = ({id(p) for p in group["params"]} for group in made(model).param_groups)
    assert id(model.lm_head.weight) in others - matrices


def test_a_schedule_reaches_both() -> None:
    model, _ = model_and_writer()
    optimizer = made(model)
    halved = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert sorted(halved.get_last_lr()) == [0.0005, 0.005]
    parts = optimizer.state_dict()["parts"]
    rates = [group["lr"] for part in parts for group in part["param_groups"]]
    assert sorted(rates) == [0.0005, 0.005]


@pytest.mark.parametrize("restored", [True, False])
def test_what_was_saved_goes_on(restored: bool) -> None:
    model, _ = model_and_writer()
    first = made(model)
    step(model, first)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = copy.deepcopy(first.state_dict())
    step(model, first)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    second = made(model)
    if restored:
        second.load_state_dict(state)
    step(model, second)
    found = model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted) is restored
