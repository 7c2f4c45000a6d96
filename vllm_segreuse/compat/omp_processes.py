# SPDX-License-Identifier: Apache-2.0
"""`vllm.utils.ompmultiprocessing.OMPProcessManager`: our connector gets no core of its own.

Where a connector is configured vLLM's CPU build takes one more core per rank away from the model,
for the threads of NIXL. Ours has no threads beside the scheduler's and the workers': requests that
do not reuse anything would compute on fewer cores than without the plugin. On two cores none would
be left, and vLLM then computes on both, against its own scheduler.

Obsolete when connectors can say how many cores they need. None filed that we know of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_segreuse.compat.patching import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def install(is_ours: Callable[[Any], bool]) -> None:
    """Wrap the constructor, once. With another connector, or on a GPU, it does what it did.

    Args:
        is_ours: whether a `KVTransferConfig` (or None) names our connector.
    """
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    wrap(OMPProcessManager, "__init__", _init, is_ours)


def _init(original: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    def init(self: Any, config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        if is_ours(config.kv_transfer_config):
            config = copy.copy(config)
            config.kv_transfer_config = None
        original(self, config, *args, **kwargs)

    return init
