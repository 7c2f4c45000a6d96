# SPDX-License-Identifier: Apache-2.0
"""Parts of a model without weights, run: what start-up's proofs find in code, whatever the weights.

- How keys turn, and that values do not: start-up's own proof (`prefill/proofs/rotations.py`) runs
  on the first layer of each kind, on random weights of the modules that lead to its attention.
- That nothing happens between layers: the model's own forward runs, and each layer hands something
  random on.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from vllm.forward_context import set_forward_context

from vllm_segreuse.engine.supported import WITHOUT, RefusedError
from vllm_segreuse.model.attention_kind import kind_of
from vllm_segreuse.model.fast_ops import FastOps
from vllm_segreuse.model.layer_state import LayerInputs, LayerState
from vllm_segreuse.model.modules import arguments_of, in_the_place_of
from vllm_segreuse.model.rope import RopeError
from vllm_segreuse.model.rotary import MODULES, read
from vllm_segreuse.prefill.proofs.rotations import prove_rotations

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_segreuse.model.layers import DecoderStack

_TOKENS = 8
_NUMBERS = 65537
_LARGEST_TABLE = 1 << 26
"""Cosines and sines, of half a million positions or so: the proof holds some copies in float32,
and those of Llama 4 Scout, for ten million, take 20 GiB."""
_FARTHEST = 211
"""Positions that the tokens are moved by, as start-up's are."""


class _Reached(BaseException):
    """Unwinds the model, or one of its layers, behind the part that is tried."""


def try_parts(model: nn.Module, stack: DecoderStack, vllm_config: VllmConfig) -> None:
    """Refuse a model of which start-up would refuse any weights, as far as that can be tried.

    Args:
        model: without weights.
        stack: its layers.
        vllm_config: of one rank.

    Raises:
        RefusedError: as start-up does.
    """
    if vllm_config.model_config.using_transformers_backend():
        return  # its layers are given angles that the rest of the model makes
    kernels = FastOps(model)
    for attempt in (_try_rotations, _try_loop):
        why = None
        running = set_forward_context(None, vllm_config, skip_compiled=True)
        # What cannot be run without the rest of the model is left to start-up.
        with suppress(Exception), running, kernels.preferred():
            why = attempt(model, stack, vllm_config)
        if why is not None:
            raise RefusedError(f"{why}{WITHOUT}")


def _try_rotations(_: nn.Module, stack: DecoderStack, vllm_config: VllmConfig) -> str | None:
    """What is wrong with rotations or values of the first layer of a kind."""
    chosen = _one_of_each_kind(stack, vllm_config.model_config.max_model_len)
    trial: Any = _Trial(stack, chosen, vllm_config)
    with _weights(trial.stack.layers, trial.device), in_the_place_of(trial.stack.attention, _stop):
        try:
            prove_rotations(trial)
        except RopeError as error:
            return str(error)
    return None


def _try_loop(model: nn.Module, stack: DecoderStack, vllm_config: VllmConfig) -> str | None:
    """Which layer is not given what the one in front of it has left."""
    config = vllm_config.model_config
    shape, device = (_TOKENS, config.get_hidden_size()), vllm_config.device_config.device
    generator = torch.Generator().manual_seed(0)
    signature = inspect.signature(stack.layers[0].forward)
    left: list[torch.Tensor] = []
    changed: list[int] = []

    def hand_on(*args: Any, **kwargs: Any) -> Any:
        given: Any = arguments_of(signature, args, kwargs)["hidden_states"]
        if left and not torch.equal(given.float(), left[-1].float()):
            changed.append(len(left))
        if changed or len(left) + 1 == len(stack.layers):
            raise _Reached
        random = torch.randn(2, *shape, generator=generator).to(device, config.dtype)
        left.append(random[0].clone())
        return tuple(random) if "residual" in signature.parameters else random[0]

    positions = torch.arange(_TOKENS, device=device)
    if stack.position_rows is not None:
        positions = positions.expand(stack.position_rows, -1)
    given = {
        "input_ids": torch.ones(_TOKENS, dtype=torch.int32, device=device),
        "positions": positions,
        "inputs_embeds": torch.zeros(shape, dtype=config.dtype, device=device),
        "intermediate_tensors": None,
    }
    with suppress(_Reached), in_the_place_of(stack.layers, hand_on):
        model(**given)
    if not changed:
        return None
    return (
        f"{type(model).__name__} changes between layers {changed[0] - 1} and {changed[0]} what one "
        "hands on to the other, and a pass does not"
    )


def _stop(*_: Any, **__: Any) -> None:
    raise _Reached


def _one_of_each_kind(stack: DecoderStack, max_model_len: int) -> list[int]:
    kinds: dict[Any, int] = {}
    for index, (layer, attention) in enumerate(zip(stack.layers, stack.attention, strict=True)):
        rotary = frozenset(id(it) for it in layer.modules() if isinstance(it, MODULES))
        shape = attention.num_kv_heads, attention.head_size
        kinds.setdefault((type(layer), kind_of(attention, max_model_len), rotary, shape), index)
    return [*kinds.values()]


class _Chosen(NamedTuple):
    """Decoder layers, and the attention of each."""

    layers: list[nn.Module]
    attention: list[nn.Module]


class _Trial:
    """What the proof asks of start-up's `Scratch`: tokens that enter each of some layers alike.

    Args:
        whole: the model's layers.
        chosen: numbers of some.
        vllm_config: of one rank.
    """

    def __init__(self, whole: DecoderStack, chosen: list[int], vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        self._whole, self._chosen = whole, chosen
        self.stack = _Chosen(
            *([found[it] for it in chosen] for found in (whole.layers, whole.attention))
        )
        self.device = vllm_config.device_config.device
        self.max_model_len = model.max_model_len
        self.count = _TOKENS
        self.distance = min(_FARTHEST, self.max_model_len - self.count)
        named = inspect.signature(whole.layers[0].forward).parameters
        self._position_names = [it for it in named if "position" in it and it != "positions"]
        self._entering = _random((self.count, model.get_hidden_size()), model.dtype, self.device)

    def forward(self, distance: int = 0) -> None:
        """Run each as far as its keys and values, with positions from `distance` on."""
        positions = torch.arange(distance, distance + self.count, device=self.device)
        if self._whole.position_rows is not None:
            positions = positions.expand(self._whole.position_rows, -1)
        inputs = LayerInputs(positions, [dict.fromkeys(self._position_names, positions)])
        for index in self._chosen:
            state = LayerState(self._entering.clone(), None)
            with suppress(_Reached):
                self._whole.run(index, index + 1, inputs, state)

    def unrounded(self) -> AbstractContextManager[None]:
        """No cache is written."""
        return nullcontext()


def _random(shape: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Numbers of norm 1 by row; those of large tensors come again, elsewhere in each row."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(min(math.prod(shape), _NUMBERS), generator=generator)
    if len(shape) > 1:
        numbers /= shape[-1] ** 0.5
    repeated = numbers.to(dtype).repeat(-(-math.prod(shape) // len(numbers)))
    return repeated[: math.prod(shape)].reshape(tuple(shape)).to(device)


@contextmanager
def _weights(layers: list[nn.Module], device: Any) -> Iterator[None]:
    """Meanwhile modules of these layers have random weights once they are run."""

    def fill(module: nn.Module, _: Any) -> None:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(it.is_meta for it in own):
            return
        if isinstance(module, MODULES) and max(it.numel() for it in own) > _LARGEST_TABLE:
            raise NotImplementedError(f"a table of {max(it.numel() for it in own)} angles")
        module.to_empty(device=device, recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data.copy_(_random(tensor.shape, tensor.dtype, device))
        if isinstance(module, MODULES):
            _fill_table(module)
        elif hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)

    modules = dict.fromkeys(it for layer in layers for it in layer.modules())
    handles = [module.register_forward_pre_hook(fill) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _fill_table(rotary: nn.Module) -> None:
    """The cosines and sines that a module has from its class."""
    table = read(rotary).table
    for name, buffer in rotary.named_buffers(recurse=False):
        if buffer.shape != table.shape:
            raise NotImplementedError(f"{type(rotary).__name__} has {name}, beside its angles")
        buffer.copy_(table)
