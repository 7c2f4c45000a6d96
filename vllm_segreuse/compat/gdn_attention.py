# SPDX-License-Identifier: Apache-2.0
"""`vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py`: what layers of the gated delta rule
scan is shown to an observer, who may scan parts of it once more from states of its own.

vLLM keeps of such a layer the state behind a prompt, and nothing by which the state behind another
text could be composed. The scan itself tells all of it.

Obsolete when vLLM keeps of segments how they change a state. None filed that we know of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_segreuse.compat.patching import signature_with, wrap

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Scan:
    """A layer's scan of the tokens that a step prefills; those that it decodes stand in front.

    Attributes:
        layer: vLLM's name of it.
        inputs: `[tokens, channels]`, what enters the short convolution, of all tokens of the step.
        num_decoded: how many of them are decoded.
        original: vLLM's kernel.
        arguments: its arguments, of the others.
    """

    layer: str
    inputs: torch.Tensor
    num_decoded: int
    original: Callable[..., Any]
    arguments: dict[str, Any]


Observer = Callable[[Scan], None]

_observer: Observer | None = None
_running: tuple[str, torch.Tensor, int] | None = None


def observe(observer: Observer | None) -> None:
    """Wrap vLLM's functions, once; from here on this one is shown each scan, also those of
    `mamba_mixer2`. None: nobody is."""
    import vllm._custom_ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    global _observer
    _observer = observer
    wrap(gdn_attention, "_cpu_gdn_attention_nonspec", _noting)
    names = "query", "key", "value", "g", "beta", "cu_seqlens", "initial_state_indices"
    wrap(vllm._custom_ops, "chunk_gated_delta_rule_cpu", showing, names)


@contextmanager
def running(layer: str, inputs: torch.Tensor, num_decoded: int) -> Iterator[None]:
    """Meanwhile a layer runs; see `Scan`."""
    global _running
    _running = layer, inputs, num_decoded
    try:
        yield
    finally:
        _running = None


def showing(original: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A kernel whose calls by a layer are shown to the observer first; it has these parameters."""
    signature = signature_with(original, *names)

    def shown(*args: Any, **kwargs: Any) -> Any:
        if _observer is not None and _running is not None:
            given = dict(signature.bind(*args, **kwargs).arguments)
            _observer(Scan(*_running, original, given))
        return original(*args, **kwargs)

    return shown


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    signature_with(original, "layer", "attn_metadata_i", "mixed_qkv")

    def noting(layer: Any, attn_metadata_i: Any, mixed_qkv: Any, *args: Any, **kwargs: Any) -> Any:
        if len(mixed_qkv) == 1:
            # Of Qwen3.5 it is a part of a wider row: as it is, vLLM's kernel refuses to read a
            # prompt of one token ("expect x to be transposed").
            mixed_qkv = mixed_qkv.clone().view(-1)[None]
        with running(layer.prefix, mixed_qkv, attn_metadata_i.num_decode_tokens):
            return original(layer, attn_metadata_i, mixed_qkv, *args, **kwargs)

    return noting
