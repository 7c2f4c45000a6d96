# SPDX-License-Identifier: Apache-2.0
"""Segment-level KV cache reuse for vLLM.

Importing this package imports neither torch nor vLLM.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

    from vllm_segreuse.features.knowledge.schemas import NewDocument as NewDocument
    from vllm_segreuse.serve.offline import KnowledgeBase as KnowledgeBase

try:
    __version__ = metadata.version("vllm-segreuse")
except metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_LAZY = {
    "KnowledgeBase": "vllm_segreuse.serve.offline",
    "NewDocument": "vllm_segreuse.features.knowledge.schemas",
}

__all__ = ["KnowledgeBase", "NewDocument", "__version__", "kv_transfer_config"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def kv_transfer_config(**options: Any) -> "KVTransferConfig":
    """The configuration that turns segment reuse on: `LLM(..., kv_transfer_config=...)`.

    Args:
        **options: fields of `vllm_segreuse.config.SegReuseConfig`; those not given keep their
            defaults.

    Raises:
        ConfigError: an option is unknown or out of range.
        UnsupportedVersionError: this vLLM is not a supported one.
    """
    from vllm_segreuse.config.launch import kv_transfer_config

    return kv_transfer_config(options)
