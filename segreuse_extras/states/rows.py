# SPDX-License-Identifier: Apache-2.0
"""Forward contexts of tokens of one request, for models of which some layers hand a state on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_segreuse.compat.metadata_builder import build_rows, private_builder
from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.prefill.rows import RowBuilder, common_metadata
from vllm_segreuse.prefill.tokens import TokenTable

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class StateRows(RowBuilder):
    """Builds metadata of attention layers, and of those that hand a state on.

    Args:
        attention: vLLM's attention layers, by name.
        group: what is known of all groups.

    Attributes:
        running: block of each group of states that a forward reads and writes.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        attention: Mapping[str, torch.nn.Module],
        group: KvGroup,
    ) -> None:
        super().__init__(vllm_config, attention, group.specs, max_rows=1)
        self.running: Sequence[int] = ()
        self._block_size = group.block_size
        device = torch.device(vllm_config.device_config.device)
        known = vllm_config.compilation_config.static_forward_context
        self._of_states = []
        for index in group.states:
            found = kv_cache_config.kv_cache_groups[index]
            names, spec = list(found.layer_names), found.kv_cache_spec
            backend = known[names[0]].get_attn_backend()
            builder = private_builder(backend, spec, names, vllm_config, 1, device)
            self._of_states.append((names, builder))

    def metadata(self, tokens: TokenTable, block_tables: torch.Tensor) -> dict[str, Any]:
        """Metadata of each layer's backend, of consecutive tokens of one request.

        A state is in one block, whichever the position: all columns of its table name that.
        """
        metadata = super().metadata(tokens, block_tables)
        last = int(tokens.read_host().positions[-1])
        for (names, builder), block in zip(self._of_states, self.running, strict=True):
            columns = last // self._block_size + 1
            table = block_tables.new_full((1, columns), block)
            # Layers of Mamba-2 insist on an answer. With this one a single token is decoded, also a
            # prompt's first: the state in front of it is in its block in any case.
            common = common_metadata(tokens, table).replace(is_prefilling=torch.zeros(1).bool())
            metadata |= dict.fromkeys(names, build_rows(builder, common, decoded=False))
        return metadata
