# SPDX-License-Identifier: Apache-2.0
"""Adapters of requests that a feature makes of others, which have ended: nobody has loaded these
adapters for them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


def is_there(adapter: LoRARequest | None) -> bool:
    """Whether the folder of an adapter is where vLLM looks for it; None, and a name that may be one
    of a hub, count as there. A worker that does not find an adapter ends the engine: it may have
    been unloaded, and its folder removed, since the request ended."""
    path = "" if adapter is None else os.path.expanduser(adapter.lora_path)
    return not os.path.isabs(path) or os.path.exists(path)
