# SPDX-License-Identifier: Apache-2.0
"""What a GPU would run for FlashAttention and FlashInfer, in plain torch.

They check what a GPU would not: that their buffers hold what is asked for, and that what is asked
for is causal attention to all of a row's keys, since they compute nothing else.
"""

import itertools
import sys
from types import ModuleType
from typing import Any

import torch


def install(backend: str) -> None:
    """Emulate what a backend needs; nothing for one that runs as it is."""
    if backend == "FLASH_ATTN":
        install_flash_attention(3)
    elif backend == "FLASHINFER":
        _install_flashinfer()


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    starts: list[int],
    lengths: list[int],
    pages_of: list[torch.Tensor],
    scale: float,
) -> None:
    """Causal attention, row by row, aligned at the bottom right.

    Args:
        query: `[tokens, heads, channels]`.
        keys, values: `[blocks, tokens per block, KV heads, channels]`.
        starts: first token of each row, and the end.
        lengths: keys of each row.
        pages_of: blocks of each row.
    """
    group = query.shape[1] // keys.shape[2]
    for row, length in enumerate(lengths):
        mine = slice(starts[row], starts[row + 1])
        count = mine.stop - mine.start
        blocks = pages_of[row][: -(-length // keys.shape[1])].long()
        k, v = (
            part[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1).float()
            for part in (keys, values)
        )
        logits = torch.einsum("qhd,khd->hqk", query[mine].float(), k) * scale
        late = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        weights = logits.masked_fill(~late, float("-inf")).softmax(-1)
        out[mine] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)


def require_causal(
    causal: Any, window: Any = None, soft_cap: float | None = None, alibi: Any = None
) -> None:
    """What `attend` computes is what the caller wants.

    Args:
        causal: as backends pass it; a tensor would be causality row by row.
        window: sizes to the left and to the right, -1 for none.
        soft_cap: 0 or None for none.
        alibi: slopes.
    """
    assert causal is True, f"attention with causal={causal} is asked for, emulated is causal"
    assert window is None or set(window) <= {-1}, f"a window of {window} is not emulated"
    assert not soft_cap, f"a soft cap of {soft_cap} is not emulated"
    assert alibi is None, "ALiBi is not emulated"


def write(
    key: torch.Tensor, value: torch.Tensor, keys: Any, values: Any, slots: torch.Tensor, *_: Any
) -> None:
    """`reshape_and_cache_flash`."""
    slots = slots[slots >= 0]
    block, offset = slots // keys.shape[1], slots % keys.shape[1]
    keys[block, offset] = key[: len(slots)]
    values[block, offset] = value[: len(slots)]


def schedule_bytes(rows: int) -> int:
    """int32 elements of FlashAttention 3's scheduler metadata."""
    return 1 + (rows + 3) // 4 * 4 * 4


def install_flash_attention(version: int) -> None:
    from vllm.v1.attention.backends import fa_utils

    def get_scheduler_metadata(**given: Any) -> torch.Tensor:
        require_causal(given["causal"], given.get("window_size"))
        return torch.full((schedule_bytes(given["batch_size"]),), given["max_seqlen_k"]).int()

    def flash_attn_varlen_func(**given: Any) -> None:
        require_causal(
            given["causal"],
            given.get("window_size"),
            given.get("softcap"),
            given.get("alibi_slopes"),
        )
        starts, lengths = given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist()
        if version == 3:
            schedule = given["scheduler_metadata"]
            assert schedule.numel() == schedule_bytes(len(lengths))
            assert schedule[0] == given["max_seqlen_k"], "another batch's schedule"
        attend(
            given["q"],
            given["k"],
            given["v"],
            given["out"],
            starts,
            lengths,
            list(given["block_table"]),
            given["softmax_scale"],
        )

    names = {
        "get_flash_attn_version": lambda *_, **__: version,
        "is_flash_attn_varlen_func_available": lambda: True,
        "get_scheduler_metadata": get_scheduler_metadata,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "reshape_and_cache_flash": write,
        "compile_flash_attn_varlen_func_from_specs": None,
    }
    for name, function in names.items():
        setattr(fa_utils, name, function)


class Wrapper:
    """FlashInfer's wrappers for paged caches: planned once, run by every layer."""

    def __init__(self, workspace: torch.Tensor, layout: str, **_: Any) -> None:
        self._layout = layout

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        **given: Any,
    ) -> None:
        self._starts, self._lengths = qo_indptr.tolist(), seq_lens.tolist()
        ends = paged_kv_indptr.tolist()
        indices = paged_kv_indices.clone()
        self._pages = [indices[a:b] for a, b in itertools.pairwise(ends)]
        require_causal(given["causal"], [given["window_left"]], given["logits_soft_cap"])
        # vLLM compares these with what its layers want.
        self._causal, self._sm_scale = given["causal"], given["sm_scale"]
        self._window_left = given["window_left"]
        self._logits_soft_cap = given["logits_soft_cap"] or 0.0

    def run(self, query: torch.Tensor, cache: Any, *, out: torch.Tensor, **_: Any) -> None:
        keys, values = cache
        if self._layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        lengths = self._lengths
        attend(query, keys, values, out, self._starts, lengths, self._pages, self._sm_scale)


def _seq_lens(indptr: torch.Tensor, last: torch.Tensor, page_size: int) -> torch.Tensor:
    return (indptr[1:] - indptr[:-1] - 1).clamp(min=0) * page_size + last


def _plan_decode(wrapper: Wrapper, **given: Any) -> None:
    indptr = given["indptr_cpu"]
    rows = torch.arange(len(indptr), dtype=torch.int32)
    given |= {"causal": True, "seq_lens": given["seq_lens_cpu"]}
    wrapper.plan(rows, indptr, given.pop("indices"), given.pop("seq_lens"), **given)


def _install_flashinfer() -> None:
    import vllm.utils.flashinfer  # noqa: F401 (which finds that it is not installed)

    faked = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
    for name in faked:
        sys.modules[name] = ModuleType(name)
    package = sys.modules["flashinfer"]
    for name in (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
    ):
        setattr(package, name, type(name, (Wrapper,), {}))
    for name in ("BatchAttentionWithAttentionSinkWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        setattr(package, name, type(name, (), {}))
    package.get_seq_lens = _seq_lens  # type: ignore[attr-defined]
    package.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping = None  # type: ignore[attr-defined]
    for module, names in {
        "decode": ("fast_decode_plan", "trtllm_batch_decode_with_kv_cache"),
        "prefill": ("trtllm_batch_context_with_kv_cache",),
        "utils": ("FP4Tensor",),
    }.items():
        for name in names:
            setattr(sys.modules[f"flashinfer.{module}"], name, None)
    from vllm.v1.attention.backends import flashinfer

    for name in faked:
        del sys.modules[name]
    flashinfer.fast_plan_decode = _plan_decode
    flashinfer.get_flashinfer_layout_string = lambda layout: (
        "HND" if layout.name.endswith("HNC") else "NHD"
    )
    operators = torch.library.Library("_C_cache_ops", "FRAGMENT")
    operators.define(
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) k, Tensor(b!) v, "
        "Tensor slots, str dtype, Tensor k_scale, Tensor v_scale) -> ()"
    )
    operators.impl("reshape_and_cache_flash", write, "CPU")
    _install_flashinfer.kept = operators  # type: ignore[attr-defined]
