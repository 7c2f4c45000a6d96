# SPDX-License-Identifier: Apache-2.0
"""Tokens that take part in changes of others, to test `carry` with."""

import dataclasses

import torch
from hypothesis import strategies as st

from vllm_segreuse.kernels.pages import Carried, Part

TOKENS, ROWS = 192, 5


def carried_of(runs: list[tuple[int, int, int]], pairs: int) -> Carried:
    """Of runs (first slot, tokens, row of the changes), each right behind the changed token."""
    slots = torch.cat([torch.arange(first, first + length) for first, length, _ in runs])
    distances = torch.cat([torch.arange(1, length + 1) for _, length, _ in runs])
    row = torch.cat([torch.full((length,), at) for _, length, at in runs])
    turns = torch.arange(int(distances.max()) + 1)[:, None] * torch.logspace(0, -4, pairs)
    shares = torch.rand(2, len(slots))
    changed = torch.arange(TOKENS, TOKENS + ROWS) + 2
    return Carried(changed, slots, row, distances, shares, turns.cos(), turns.sin())


def before_of(parts: list[Part], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = [(ROWS, part.strides.shape[0], part.strides.shape[2]) for part in parts]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Of tokens that follow one another, over the borders of tiles and pages; some take part in
    nothing."""
    made: list[tuple[int, int, int]] = []
    slot = draw(st.integers(0, 40))
    while len(made) < 8:
        length = draw(st.sampled_from([1, 2, 7, 15, 16, 17, 33, 70]))
        if slot + length > TOKENS:
            break
        made.append((slot, length, draw(st.integers(-1, ROWS - 1))))
        slot += length + draw(st.sampled_from([0, 1, 30]))
    return made or [(0, 3, 1)]


def to_device(carried: Carried, device: str) -> Carried:
    names = (field.name for field in dataclasses.fields(carried))
    return Carried(**{name: getattr(carried, name).to(device) for name in names})
