# SPDX-License-Identifier: Apache-2.0
"""What layers that hand a state on take, where their states are composed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from segreuse_extras.states.options import StatesServer
from segreuse_tools.doctor.examination import built
from vllm_segreuse.engine.supported import WITHOUT, RefusedError
from vllm_segreuse.options.server import ServerOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class ComposedStates:
    """Of a model.

    Attributes:
        layers: that hand a state on.
        map_bytes: of what one segment changes of their states.
        most_maps: that `state_bytes` holds.
        unknown: what is not known of answers behind such states.
    """

    layers: int
    map_bytes: int
    most_maps: int
    unknown: tuple[str, ...]


def composed_states(vllm_config: VllmConfig, options: ServerOptions) -> ComposedStates:
    """Of a model that is built without weights: its layers say how large a state is.

    Args:
        vllm_config: of one rank.
        options: of segment reuse.

    Raises:
        RefusedError: states of a layer are not composed, or `state_bytes` holds nothing.
        ValueError, UnexaminedError: as by `examine`.
    """
    import torch
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    from segreuse_extras.states.kinds import state_layer
    from segreuse_extras.states.layers import StateLayers
    from segreuse_extras.states.refusals import check_budget
    from vllm_segreuse.model.modules import UnsupportedModelError

    with built(vllm_config):
        layers: Any = get_layers_from_vllm_config(vllm_config, MambaBase)
        for layer in layers.values():
            kept = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
            layer.kv_cache = tuple(
                torch.empty(1, *shape, dtype=dtype, device="meta") for shape, dtype in kept
            )
        try:
            found = StateLayers([state_layer(name, it, 0) for name, it in layers.items()], 1)
        except UnsupportedModelError as error:
            raise RefusedError(f"{error}{WITHOUT}") from error
    budget = StatesServer.of(options).state_bytes
    check_budget(budget, found.map_bytes)
    most = budget // found.map_bytes
    return ComposedStates(len(found.layers), found.map_bytes, most, found.unknown)
