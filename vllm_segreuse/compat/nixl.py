# SPDX-License-Identifier: Apache-2.0
"""vLLM's `nixl/base_worker.py`: engines that reuse segments shake hands with each other only.

NIXL hands a request's blocks to another engine, which gives all of them exact names. Ours gives
names to what is exact only, and is told how far that is; an engine without it is not. vLLM refuses
engines whose hash of what has to agree is another: here segment reuse is part of it.

Obsolete when connectors can add to that hash. None filed that we know of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_segreuse.compat.patching import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROTOCOL = 1
"""Of what a prefill engine tells a decode engine; it grows when that changes."""


def install(is_hosted: Callable[[VllmConfig], bool]) -> None:
    """Wrap the function where workers call it, once. Other engines' hashes stay what they are.

    Args:
        is_hosted: whether the configuration of a NIXL connector is that of one beside ours.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    wrap(base_worker, "compute_nixl_compatibility_hash", _hash, is_hosted)


def _hash(
    original: Callable[..., str], is_hosted: Callable[[VllmConfig], bool]
) -> Callable[..., str]:
    def compute_nixl_compatibility_hash(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> str:
        found = original(vllm_config, *args, **kwargs)
        if not is_hosted(vllm_config):
            return found
        return hashlib.sha256(f"{found} segreuse={PROTOCOL}".encode()).hexdigest()

    return compute_nixl_compatibility_hash
