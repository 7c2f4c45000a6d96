# SPDX-License-Identifier: Apache-2.0
"""`vllm/model_executor/layers/mamba/mamba_mixer2.py`: what layers of Mamba-2 scan is shown to the
observer of `gdn_attention`, and on CPUs no state is wanted from within a scan.

Of such layers, too, vLLM keeps nothing by which a state could be composed.

Where prefix caching is on, vLLM 0.32 reads a prompt up to its end in one step, and has the mixer
store the state at the last block's end on the way (`num_prefill_checkpoint_blocks`). Its kernel of
CPUs gives no state but the last (`ops/cpu/mamba_ssm.py`): each longer prompt ends the engine with
an IndexError. Without these checkpoints steps end there, as those of other models with states.

Obsolete when vLLM keeps of segments how they change a state (none filed that we know of), and
stores states from within a scan on CPUs, too (a part of it is vllm-project/vllm#54505).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_segreuse.compat.gdn_attention import running, showing
from vllm_segreuse.compat.patching import signature_with, wrap


def install() -> None:
    """Wrap methods of the mixer, and the kernel that it calls, once."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    wrap(mamba_mixer2.MambaMixer2, "conv_ssm_forward", _noting)
    wrap(mamba_mixer2.MambaMixer2, "get_kv_cache_spec", _without_checkpoints)
    names = "x", "dt", "B", "C", "cu_seqlens", "out", "initial_states", "state_dtype"
    wrap(mamba_mixer2, "mamba_chunk_scan_combined_varlen", showing, names)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.forward_context import get_forward_context

    signature_with(original, "projected_states")

    def noting(self: Any, projected_states: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = get_forward_context().attn_metadata
        if not metadata:  # vLLM measures its memory
            return original(self, projected_states, *args, **kwargs)
        inputs = projected_states[:, self.tped_intermediate_size :][:, : self.tped_conv_size]
        with running(self.prefix, inputs, metadata[self.prefix].num_decode_tokens):
            return original(self, projected_states, *args, **kwargs)

    return noting


def _without_checkpoints(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_kv_cache_spec(*args: Any, **kwargs: Any) -> Any:
        from vllm.platforms import current_platform

        spec = original(*args, **kwargs)
        if not current_platform.is_cpu() or not getattr(spec, "num_prefill_checkpoint_blocks", 0):
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    return get_kv_cache_spec
