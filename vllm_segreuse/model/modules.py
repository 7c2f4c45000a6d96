# SPDX-License-Identifier: Apache-2.0
"""The modules of a loaded model: which are its decoder layers, and others in their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile

from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer


class UnsupportedModelError(RuntimeError):
    """The model is not of a shape that segment reuse supports; the text says why."""


@contextmanager
def in_the_place_of(layers: Sequence[nn.Module], forward: Callable[..., object]) -> Iterator[None]:
    """Modules run this instead, with their hooks, whoever calls their `forward`."""
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        vars(layer)["forward"] = forward
    try:
        yield
    finally:
        for layer, replaced in zip(layers, before, strict=True):
            if replaced is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = replaced


def arguments_of(
    signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Arguments of a call, by name."""
    bound = signature.bind(*args, **kwargs)
    kinds = signature.parameters
    given: dict[str, object] = {}
    for name, value in bound.arguments.items():
        if kinds[name].kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        else:
            given[name] = value
    return given


def num_writing(attention: Sequence[nn.Module], sharing: Mapping[str, nn.Module]) -> int:
    """How many layers write KV, all in front of those that share it.

    Raises:
        UnsupportedModelError: some write theirs behind these.
    """
    names = {id(layer): name for name, layer in sharing.items()}
    count = sum(1 for _ in takewhile(lambda layer: id(layer) not in names, attention))
    if count + len(names) != len(attention):
        raise UnsupportedModelError(
            f"{names[id(attention[count])]} shares the KV of another layer, and layers behind it "
            "write theirs"
        )
    return count


def find_layers(
    model: nn.Module, attention_by_name: Mapping[str, nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """The module list whose members hold exactly one attention layer each, and all of them. Layers
    of other pipeline stages are no members."""
    wanted = {id(module) for module in attention_by_name.values()}
    for _, candidate in model.named_modules():
        if not isinstance(candidate, nn.ModuleList):
            continue
        layers = [layer for layer in candidate if not isinstance(layer, PPMissingLayer)]
        if len(layers) != len(wanted):
            continue
        attention = [[m for m in layer.modules() if id(m) in wanted] for layer in layers]
        if all(len(found) == 1 for found in attention):
            return layers, [found[0] for found in attention]
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of decoder layers with one attention layer each "
        f"({len(wanted)} attention layers in all)"
    )
