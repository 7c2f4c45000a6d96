# SPDX-License-Identifier: Apache-2.0
"""The KV cache group that segments are found in, as vLLM's scheduler and its workers both see it.

vLLM allocates blocks by group of layers (`KVCacheConfig.kv_cache_groups`, `v1/kv_cache_interface`).
There is one group, unless vLLM's hybrid KV cache manager is on; nothing outside of this file knows
its index, or what a group must be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_segreuse.engine.supported import WITHOUT, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_OTHER_WINDOWS = (
    "layers with a sliding window have blocks of another size than the others ({} tokens), because "
    "their heads differ; remove --no-disable-hybrid-kv-cache-manager, so that vLLM keeps all of "
    "their blocks"
)
_OTHER_STATES = (
    "layers that hand a state on have blocks of another size than the others ({} tokens); leave "
    "--mamba-block-size and --mamba-cache-mode at their defaults"
)


@dataclass(frozen=True)
class KvGroup:
    """Layers whose KV lies in blocks of one table, and those beside them that have tables of their
    own: with vLLM's hybrid KV cache manager, layers that attend to a window, or hand a state on.

    Segments are found by the blocks of the first. What the others hold of the same tokens goes with
    them (`compat/block_pool.py`).

    Attributes:
        index: of the group, in vLLM's lists by group.
        specs: vLLM's `KVCacheSpec` of each attention layer, by vLLM's name of it, in the groups'
            order.
        block_size: tokens per block, in the scheduler's tables.
        others: indices of the other groups, whose blocks have as many tokens.
        windows: of each of these, tokens that vLLM keeps blocks for; None: for all.
        tables: by layer, 0 for this group's, or 1 + the number of one of the others.
        states: indices of groups whose blocks hold a state each, and KV of no token.
    """

    index: int
    specs: Mapping[str, Any]
    block_size: int
    others: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    tables: Mapping[str, int] = field(default_factory=dict)
    states: tuple[int, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Whether requests have blocks in no other group."""
        return not self.others and not self.states

    @property
    def num_tables(self) -> int:
        """Block tables of a request."""
        return 1 + len(self.others)

    def of(self, by_group: Sequence[Any]) -> Any:
        """The group's own entry of a list or tuple that vLLM keeps by group."""
        return by_group[self.index]

    def of_others(self, by_group: Sequence[Any]) -> list[Any]:
        """The entries of the others."""
        return [by_group[index] for index in self.others]


def segment_group(kv_cache_config: KVCacheConfig) -> KvGroup:
    """The group that segments are found in, whose blocks are kept for all tokens.

    Its layers may still attend to a window only: without its hybrid KV cache manager, vLLM keeps
    all blocks for layers of both kinds, if there are both. With it, there are other groups.

    Raises:
        RefusedError: the KV cache is of another shape; names what was found.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    groups = kv_cache_config.kv_cache_groups
    by_layer = [_by_layer(group) for group in groups]
    if states := groups_of_states(kv_cache_config):
        [index] = (i for i in range(len(groups)) if i not in states)
        size = groups[index].kv_cache_spec.block_size
        _check_sizes(kv_cache_config, size, _OTHER_STATES)
        return KvGroup(index, by_layer[index], size, states=states)
    known: tuple[type, ...] = FullAttentionSpec, MLAAttentionSpec
    if len(groups) > 1:
        known = FullAttentionSpec, SlidingWindowSpec
    kinds = [{type(spec) for spec in specs.values()} for specs in by_layer]
    keeping = [i for i, found in enumerate(kinds) if found and SlidingWindowSpec not in found]
    are_known = all(found and found <= {*known} for found in kinds)
    # Two groups without a window between them are of a kind that nobody has tried.
    if not keeping or not are_known or len(keeping) == len(groups) > 1:
        raise RefusedError(_other_shape(groups))
    for specs in by_layer:
        for spec in specs.values():
            _check_spec(spec)
    index = keeping[0]
    block_size = groups[index].kv_cache_spec.block_size
    _check_sizes(kv_cache_config, block_size, _OTHER_WINDOWS)
    order = [index, *(i for i in range(len(groups)) if i != index)]
    others = [next(iter(by_layer[i].values())) for i in order[1:]]
    return KvGroup(
        index,
        {name: spec for i in order for name, spec in by_layer[i].items()},
        block_size,
        tuple(order[1:]),
        tuple(it.sliding_window if isinstance(it, SlidingWindowSpec) else None for it in others),
        {name: table for table, i in enumerate(order) for name in by_layer[i]},
    )


def groups_of_states(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Indices of groups of layers that hand a state on, where all others are one group of plain
    attention; else none."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    by_layer = map(_by_layer, kv_cache_config.kv_cache_groups)
    kinds = [{type(spec) for spec in specs.values()} for specs in by_layer]
    states = tuple(i for i, found in enumerate(kinds) if found == {MambaSpec})
    rest = [found for i, found in enumerate(kinds) if i not in states]
    return states if rest == [{FullAttentionSpec}] else ()


def _check_sizes(kv_cache_config: KVCacheConfig, block_size: int, others: str) -> None:
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if len(sizes) > 1:
        raise RefusedError(others.format(", ".join(map(str, sorted(sizes)))))
    hash_block_size = kv_cache_config.hash_block_size or block_size
    if hash_block_size != block_size:
        raise RefusedError(
            f"blocks of {block_size} tokens are hashed in pieces of {hash_block_size}; leave "
            "the hash block size at its default"
        )


def _by_layer(group: KVCacheGroupSpec) -> dict[str, Any]:
    """The spec of each layer; layers whose heads differ in size have one each."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def _other_shape(groups: Sequence[KVCacheGroupSpec]) -> str:
    """What was found instead, and the way out."""
    if not groups:
        return f"no layer of the model keeps KV, as where tokens attend to later ones{WITHOUT}"
    kinds = sorted({type(spec).__name__ for it in groups for spec in _by_layer(it).values()})
    if kinds == ["SlidingWindowSpec"]:
        return (
            "every layer of the model attends to a sliding window; limit prompts to the window "
            "with --disable-sliding-window, or serve this model without --segreuse"
        )
    return (
        f"the model needs {len(groups)} KV cache groups ({', '.join(kinds)}), one group whose "
        f"blocks are kept for all tokens is supported{WITHOUT}"
    )


def _check_spec(spec: Any) -> None:
    if getattr(spec, "non_causal", False):
        raise RefusedError(f"layers of the model attend to tokens behind their own{WITHOUT}")
