# SPDX-License-Identifier: Apache-2.0
"""The loaded model as a stack of decoder layers of which any range can be run on any tokens.

vLLM's dense decoder models share one loop, `hidden_states, residual = layer(positions,
hidden_states, residual)` (e.g. `model_executor/models/qwen2.py`). Running the layers ourselves,
rather than editing the model's forward, needs no lasting hook and gives the one primitive every
policy is made of: *run layers [a, b) on these tokens*. That the loop really is all there is between
the layers is proven at start-up by comparing with the model's own forward (`prefill/checks.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.sequence import IntermediateTensors

from vllm_segreuse.model import token_kv
from vllm_segreuse.model.layer_state import LayerInputs, LayerState
from vllm_segreuse.model.modules import (
    UnsupportedModelError,
    arguments_of,
    find_layers,
    in_the_place_of,
    num_writing,
)


class _EmbeddingsReady(BaseException):
    """Unwinds the model's forward once the first decoder layer is about to run."""


class _KeysReady(BaseException):
    """Unwinds a decoder layer once its keys and values are about to be attended to."""


class _KvWritten(BaseException):
    """Unwinds the model's forward once no layer is left that writes KV."""


class DecoderStack:
    """Decoder layers of a loaded vLLM model, in order, with their attention layers: those of one
    pipeline stage, if there are several.

    Layers that share the KV of others (`kv_sharing_target_layer_name`) stand behind all that write
    theirs. Nothing that is cached depends on them, so they are no part of the stack, and whatever
    runs it ends in front of them, as a pass ends in the last layer behind its keys and values.

    Args:
        model: the loaded model.
        attention_by_name: its `Attention` layers that have KV of their own.
        position_rows: see `positions.position_rows`.
        sharing: those that share the KV of others.
        hands_on: whether another stage has the layers behind these.

    Attributes:
        layers: decoder layers that write KV.
        attention: the vLLM `Attention` layer inside each decoder layer.
        position_rows, hands_on: as given.
        behind: decoder layers that share the KV of these.
        takes_positions: whether each is given positions, as vLLM's own layers are, and has its
            rotary module in itself; else it is given what it rotates by.
    """

    def __init__(
        self,
        model: nn.Module,
        attention_by_name: Mapping[str, nn.Module],
        position_rows: int | None = None,
        sharing: Mapping[str, nn.Module] | None = None,
        hands_on: bool = False,
    ) -> None:
        self._model = model
        self.position_rows = position_rows
        self.hands_on = hands_on
        self._handed: LayerState | None = None
        layers, attention = find_layers(model, {**attention_by_name, **(sharing or {})})
        count = num_writing(attention, sharing or {})
        self.layers, self.behind = layers[:count], layers[count:]
        self.attention = attention[:count]
        parameters = inspect.signature(self.layers[0].forward).parameters
        if not any("position" in name for name in parameters):
            raise UnsupportedModelError(
                f"{type(self.layers[0]).__name__}.forward takes ({', '.join(parameters)}) and no "
                "positions: its keys are not rotated by theirs, and cannot be moved"
            )
        if "hidden_states" not in parameters:
            raise UnsupportedModelError(
                f"{type(self.layers[0]).__name__}.forward takes ({', '.join(parameters)}), "
                "not (hidden_states, ...)"
            )
        self._signature = inspect.signature(self.layers[0].forward)
        self.takes_positions = "positions" in parameters
        self._has_residual = "residual" in parameters
        self._carries_residual = self._has_residual
        self._of_all: Mapping[str, object] | None = None
        self._runs_dry = False
        self._is_batched = False
        self._returns_tuple: bool | None = None
        self._note_once_run()

    def __len__(self) -> int:
        return len(self.layers)

    def _note_once_run(self) -> None:
        """Note what a layer returns when the model first runs: that of a layer without a residual
        may come in a tuple."""

        def note(_: nn.Module, __: object, output: object) -> None:
            self._returns_tuple = isinstance(output, tuple)
            handle.remove()

        handle = self.layers[0].register_forward_hook(note)

    def sample_of_handed(self, dtype: torch.dtype, device: torch.device) -> LayerState:
        """What one stage hands to the next, of a single token: of the right shape and type.

        Raises:
            UnsupportedModelError: the model hands on more than states of its layers.
        """
        make = getattr(self._model, "make_empty_intermediate_tensors", None)
        if make is None:
            raise UnsupportedModelError(f"{type(self._model).__name__} has no pipeline stages")
        made = make(batch_size=1, dtype=dtype, device=device).tensors
        if not {"hidden_states"} <= made.keys() <= {"hidden_states", "residual"}:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} hands {', '.join(made)} from one pipeline stage to "
                "the next, and a pass hands on hidden_states and residual"
            )
        return LayerState(**{"residual": None} | made)

    @contextmanager
    def given(self, handed: LayerState) -> Iterator[None]:
        """Meanwhile the model runs on what an earlier stage has handed on of the same tokens. That
        state is spent."""
        self._handed = handed
        try:
            yield
        finally:
            self._handed = None

    def _run_model(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """The model's own forward, on what it is `given`."""
        more: dict[str, IntermediateTensors | None] = {}
        if self._handed is not None:
            more["intermediate_tensors"] = IntermediateTensors(self._handed.tensors)
        elif "intermediate_tensors" in inspect.signature(self._model.forward).parameters:
            more["intermediate_tensors"] = None  # some models have no default (InternLM2)
        return self._model(input_ids=token_ids, positions=positions, **more)

    def embed(
        self, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[LayerState, LayerInputs]:
        """What the model itself hands to its first decoder layer for these tokens, and what its
        layers are given beside it.

        Must run inside a forward context with `skip_compiled=True`.
        """
        given = self._dry_run(token_ids, positions)
        hidden_states, residual = given[0]["hidden_states"], given[0].get("residual")
        assert isinstance(hidden_states, torch.Tensor)
        assert residual is None or isinstance(residual, torch.Tensor)
        self._is_batched = hidden_states.ndim > 2  # transformers' layers take a batch of one
        hidden_states = hidden_states[0] if self._is_batched else hidden_states
        further = [_further(of_layer) for of_layer in given]
        self._of_all = further[0] if len(further) == 1 else None
        return LayerState(hidden_states, residual), LayerInputs(positions, further)

    def inputs(self, token_ids: torch.Tensor, positions: torch.Tensor) -> LayerInputs:
        """What the layers are given of these tokens beside a state that they already have.

        Must run where `embed` may, if it `asks_model`.
        """
        if self._of_all is not None:
            return LayerInputs(positions, [self._of_all])
        return self.embed(token_ids, positions)[1]

    @property
    def asks_model(self) -> bool:
        """Whether only the model's own forward tells what layers are given beside a state: it is
        something else of each token, or was never told."""
        return self._of_all is None

    def _dry_run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> list[dict[str, object]]:
        """Arguments of the layers in the model's own forward, by name, while each layer hands on
        the state that it is given, and computes nothing.

        Where the first is given nothing else of each token, these are its alone: what it is given
        then, all are, whatever their tokens.
        """
        found: list[dict[str, object]] = []

        def note(*args: object, **kwargs: object) -> object:
            given = arguments_of(self._signature, args, kwargs)
            found.append(given)
            of_tokens = self._of_tokens(given, len(token_ids))
            if not of_tokens or len(found) == len(self.layers):
                raise _EmbeddingsReady
            return self._returned(given["hidden_states"], given.get("residual"))

        self._runs_dry = True
        try:
            with in_the_place_of(self.layers, note):
                self._run_model(token_ids, positions)
        except _EmbeddingsReady:
            pass
        finally:
            self._runs_dry = False
        return found

    def _of_tokens(self, given: Mapping[str, object], count: int) -> list[str]:
        """Names of what a layer is given of each token beside its state and position.

        Raises:
            UnsupportedModelError: it cannot be told what is whose.
        """
        names: list[str] = []
        alike = self._has_residual or self._returns_tuple is not None
        for name, value in _further(given).items():
            # Cosines and sines come in a tuple.
            values = value if isinstance(value, tuple | list) else (value,)
            tensors = [each for each in values if isinstance(each, torch.Tensor)]
            alike = alike and all(count in each.shape[:2] for each in tensors)
            names += [name] if tensors else []
        if names and not alike:
            raise UnsupportedModelError(
                f"{type(self.layers[0]).__name__}.forward takes more than hidden states of each "
                f"token ({', '.join(names)})"
            )
        return names

    def _returned(self, hidden_states: object, residual: object) -> object:
        """What a layer returns that leaves this state."""
        if self._has_residual:
            return hidden_states, residual
        return (hidden_states,) if self._returns_tuple else hidden_states

    def report_input(self, index: int, keep: Callable[[torch.Tensor, LayerState], None]) -> None:
        """Have a layer report, from here on, what enters it: positions `[tokens]`, and the state.

        Whoever runs it; but for compiled models, which call no hooks.

        Raises:
            UnsupportedModelError: layers are given no such positions.
        """
        if not self.takes_positions:
            raise UnsupportedModelError(
                f"{type(self.layers[0]).__name__}.forward takes no positions by which what enters "
                "it could be kept for similarity.w_exact; remove that"
            )

        def report(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._runs_dry:
                return
            given = self._signature.bind(*args, **kwargs).arguments
            positions = given["positions"]
            state = LayerState(given["hidden_states"], given.get("residual"))
            if index:  # Gemma 4's layers take a residual, and return none
                self._carries_residual = state.residual is not None
            keep(positions.view(-1, positions.shape[-1])[0], state)

        self.layers[index].register_forward_pre_hook(report, with_kwargs=True)

    def state_of(self, stream: torch.Tensor, index: int) -> LayerState:
        """A state with which layer `index` adds up to this residual stream `[tokens, hidden]`."""
        if not (self._carries_residual and index):
            return LayerState(stream, None)
        return LayerState(torch.zeros_like(stream), stream)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's own forward, all layers that write KV; what `embed` and `run` together must
        reproduce.

        The tensors are of the types, shapes and alignment that the runner's have: compiled code
        takes all three for granted. Positions are `[tokens]`, or of each row.

        Returns:
            The hidden states behind the last layer and norm; what enters the first layer that
            shares KV, if there are any; those that are handed on, if other stages follow.
        """
        if self.hands_on:
            return self.forward_to_next(token_ids, positions).hidden_states
        return self.forward_for_drafts(token_ids, positions)[0]

    def forward_to_next(self, token_ids: torch.Tensor, positions: torch.Tensor) -> LayerState:
        """The same, of a stage that others follow; what it hands on."""
        output = self._run_model(token_ids.to(torch.int32, copy=True), positions.clone())
        assert isinstance(output, IntermediateTensors)
        return LayerState(**{"residual": None} | output.tensors)

    def forward_for_drafts(
        self, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The same, and what enters each of `auxiliary_layers`, which EAGLE-3 drafts are given."""
        if self.position_rows is not None and positions.ndim == 1:
            positions = positions.expand(self.position_rows, -1)
        return self.forward_of(token_ids.to(torch.int32, copy=True), positions.clone())

    def forward_of(
        self, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The same on these very tensors: CUDA graphs read where they were captured."""
        if self.behind:
            return self._up_to_sharing(token_ids, positions), []
        output = self._run_model(token_ids, positions)
        hidden_states, auxiliary = output if isinstance(output, tuple) else (output, [])
        assert isinstance(hidden_states, torch.Tensor)
        return hidden_states, auxiliary

    def _up_to_sharing(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        caught: list[LayerState] = []

        def stop(*args: Any, **kwargs: Any) -> None:
            given = self._signature.bind(*args, **kwargs).arguments
            caught.append(LayerState(given["hidden_states"], given.get("residual")))
            raise _KvWritten

        try:
            with in_the_place_of(self.behind[:1], stop):
                self._run_model(token_ids, positions)
        except _KvWritten:
            pass
        return caught[0].stream

    @property
    def auxiliary_layers(self) -> tuple[int, ...]:
        """Layers of which the model returns what enters them, beside its output; ascending."""
        of_holder = (getattr(m, "aux_hidden_state_layers", None) for m in self._model.modules())
        return next((tuple(found) for found in of_holder if found), ())

    def output(
        self, token_ids: torch.Tensor, positions: torch.Tensor, state: LayerState
    ) -> torch.Tensor:
        """What the model makes of what leaves its last layer: as a rule, it is normalised.

        It is the model's own forward, in which each layer hands that state on. The state is spent.
        """

        def hand_on(*_: object, **__: object) -> object:
            hidden_states = state.hidden_states
            return self._returned(
                hidden_states[None] if self._is_batched else hidden_states, state.residual
            )

        with in_the_place_of(self.layers, hand_on):
            return self.forward_of(token_ids, positions)[0]

    def run(self, first: int, last: int, inputs: LayerInputs, state: LayerState) -> LayerState:
        """Run decoder layers `[first, last)` on tokens, writing their KV.

        Attention metadata and slot mapping come from the forward context in force.

        Args:
            first, last: which layers.
            inputs: of the tokens, from `embed` or `inputs`.
            state: of the tokens.
        """
        for index, layer in enumerate(self.layers[first:last], first):
            given = dict(inputs.of(index))
            if self.takes_positions:
                given["positions"] = inputs.positions
            if self._has_residual:
                hidden_states, residual = layer(
                    hidden_states=state.hidden_states, residual=state.residual, **given
                )
                state = LayerState(hidden_states, residual)
                continue
            hidden_states = state.hidden_states
            out = layer(
                hidden_states=hidden_states[None] if self._is_batched else hidden_states, **given
            )
            self._returns_tuple = isinstance(out, tuple)
            out = out[0] if self._returns_tuple else out
            state = LayerState(out[0] if self._is_batched else out, None)
        return state

    def write_kv(
        self, index: int, inputs: LayerInputs, slots: torch.Tensor, state: LayerState
    ) -> None:
        """Run a decoder layer only as far as its keys and values, and write these to `slots`.

        All that a pass needs of the last layer, whose output it does not use.
        """
        token_kv.write(self.attention[index], *self.keys_and_values(index, inputs, state), slots)

    def keys_and_values(
        self, index: int, inputs: LayerInputs, state: LayerState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[tokens, heads, channels]` of a decoder layer; no page is written.

        The state is spent: fused norms change it in place.
        """
        attention = self.attention[index]
        caught: list[torch.Tensor] = []

        def stop(*args: Any, **kwargs: Any) -> None:
            caught.extend(token_kv.given(attention, args, kwargs))
            raise _KeysReady

        try:
            with in_the_place_of([attention], stop):
                self.run(index, index + 1, inputs, state)
        except _KeysReady:
            pass
        key, value = caught
        return key, value


_STATE = ("positions", "hidden_states", "residual")


def _further(given: Mapping[str, object]) -> dict[str, object]:
    """What a layer is given beside its state and its tokens' positions."""
    return {name: value for name, value in given.items() if name not in _STATE}
