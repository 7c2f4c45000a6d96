# SPDX-License-Identifier: Apache-2.0
"""`vllm/lora/model_manager.py`: the adapter of a pass's tokens, for the time of a chunk.

vLLM tells its layers once per step which adapter each token of the batch has, and does so before it
calls connectors. A chunk of a pass has other tokens. The step's mapping is put back behind it, as
the step's forward and its sampling read it.

Obsolete when the mapping of tokens to adapters is part of the forward context. None filed that we
know of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Adapters:
    """LoRA adapters of a loaded model; does nothing where LoRA is not enabled.

    Args:
        model: vLLM's manager of its adapters is an attribute of it.
    """

    def __init__(self, model: Any) -> None:
        self._manager: Any = getattr(model, "lora_manager", None)

    @contextmanager
    def applied(self, lora_id: int, num_tokens: int) -> Iterator[None]:
        """Has the model's layers apply an adapter to all tokens of a chunk.

        Args:
            lora_id: see `ReusePlan`. The adapter is loaded.
            num_tokens: of the chunk.
        """
        if self._manager is None:
            yield
            return
        from vllm.lora.layers import LoRAMapping

        before = self._manager._last_mapping
        try:
            mapping = LoRAMapping((lora_id,) * num_tokens, (lora_id,), is_prefill=True)
            self._manager.set_adapter_mapping(mapping)
            yield
        finally:
            if self._has_loaded(before):
                self._manager.set_adapter_mapping(before)

    def _has_loaded(self, mapping: Any | None) -> bool:
        """Whether all adapters of a mapping are still loaded: that of an earlier step, which
        nothing reads any more, may have others."""
        if mapping is None:
            return False
        wanted = {*mapping.index_mapping, *mapping.prompt_mapping} - {0}
        return wanted <= set(self._manager.lora_index_to_id)
