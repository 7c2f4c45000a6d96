# SPDX-License-Identifier: Apache-2.0
"""What must hold of a `World` between any two events."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash

from bench.integrity import check_integrity, frozen_namespaces, frozen_parts
from tests.parts import parts_of
from tests.stateful import compressing, isolated
from tests.stateful.worker import APPROXIMATE, Identity
from vllm_segreuse.cache.namespace import namespace_key

if TYPE_CHECKING:
    from tests.stateful.world import World

_OWN_NAME = b"segreuse:"


def check(world: World) -> None:
    """AssertionError with what is wrong."""
    _check_references(world)
    _check_planner(world)
    _check_exact_names(world)
    _check_index(world)
    _check_rows(world)
    _check_windows(world)
    _check_frozen(world)


def check_idle(world: World) -> None:
    """Nothing runs: nothing is held, nothing is remembered of anybody."""
    pool = world.pool
    free, frozen = pool.get_num_free_blocks(), world.frozen.num_frozen
    assert free + frozen == pool.num_gpu_blocks - 1, "blocks are still held"
    assert not parts_of(world.side).core.requests, "requests that ended are still tracked"
    references = parts_of(world.side).namespaces.references().total()
    references -= frozen_namespaces(world.frozen).total()
    assert references == world.lost_namespaces + _held_by_tier(world)
    assert not pool.awaited, f"names that nobody will report on: {pool.awaited}"
    tier = parts_of(world.side).tier
    if tier is not None and tier.is_open:
        counts = tier.counts()
        assert (counts.holds, counts.steps, counts.jobs) == (0, 0, 0), counts
        assert not _held_by_tier(world), "namespaces of records that are shown are still held"
    compressing.check_idle(world)
    if world.setup.isolated:
        isolated.check_idle(world)
    recorder, audits = world.worker.recorder, world.side.call("audits")
    kept = recorder.num_held
    assert not audits["failed"], "an error has ended the audits"
    assert kept <= audits["under_way"], f"the worker keeps logits of {kept} requests: {audits}"


def _check_references(world: World) -> None:
    """Blocks are held by live requests as often as these have them; the rest is free, once."""
    tables: dict[str, list[Any]] = {}
    for manager in world.manager.coordinator.single_type_managers:
        tables |= {name: table for name, table in manager.req_to_blocks.items() if table}
    strangers = tables.keys() - world.scheduler.requests.keys()
    assert not strangers, f"requests that ended hold blocks: {sorted(strangers)}"
    assert not world.scheduler.deferred_frees, "frees are deferred, which nothing asked for"
    held = Counter(block.block_id for table in tables.values() for block in table)
    held.update(block.block_id for block in world.held)
    held.update(world.frozen.block_ids)
    if world.setup.isolated:
        held.update(isolated.held_blocks(world))
    pool = world.pool
    counts = {b.block_id: b.ref_cnt for b in pool.blocks if b.ref_cnt and not b.is_null}
    assert counts == held, f"references {counts}, but held are {dict(held)}"
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(set(free)) == len(free) == pool.get_num_free_blocks(), f"free queue {free}"
    assert not held.keys() & set(free), "a block is free and held"
    assert len(free) + len(held) == pool.num_gpu_blocks - 1, "a block is neither free nor held"


def _check_planner(world: World) -> None:
    """Between steps there is no plan and no pin, admission is open, the ended are forgotten."""
    planner, namespaces = parts_of(world.side).planner, parts_of(world.side).namespaces
    assert not planner.planned, f"plans without blocks, or not taken: {planner.planned}"
    assert not planner.budget.tokens, "compute of plans that are gone"
    assert not planner.admission_closed, "admission is closed between steps"
    tracked = parts_of(world.side).core.requests.keys()
    assert tracked <= world.scheduler.requests.keys(), "requests that ended are tracked"
    references = namespaces.references().total() - world.lost_namespaces
    references -= frozen_namespaces(world.frozen).total() + _held_by_tier(world)
    assert references == len(tracked), f"{references} references for {len(tracked)} requests"


def _held_by_tier(world: World) -> int:
    """References on namespaces that the tier holds: of records that are not shown yet."""
    tier = parts_of(world.side).tier
    if tier is None:
        return 0
    held = tier.catalogue.held.counts()
    if not tier.health.broken:  # after an error, those that are left are held until a reset
        seen = [record.last_seen for record in tier.catalogue if record.last_seen is not None]
        wanted = Counter(n for found in [*tier.waiting, *seen] for n in found.namespaces)
        assert held == wanted, f"the tier holds namespaces {held}, and needs {wanted}"
    return held.total()


def _check_exact_names(world: World) -> None:
    """A block with a name that a token sequence hashes to holds the exact KV of that sequence."""
    pool, worker = world.pool, world.worker
    listed = pool.cached_block_hash_to_block
    names = 0
    for block in pool.blocks:
        if block.block_hash is None:
            continue
        names += 1
        assert listed.contain(block.block_hash, block.block_id), f"{block} is not to be found"
        name = get_block_hash(block.block_hash)
        if name.startswith(_OWN_NAME):
            continue
        first = block.block_id * worker.block_size
        history = worker.history[first : first + worker.block_size].tolist()
        wanted = world.named[name]
        assert history == wanted, (
            f"block {block.block_id} (epoch {worker.epoch[block.block_id]}) has the exact name of "
            f"histories {wanted}, but holds {history}; {APPROXIMATE} is approximate"
        )
    values = listed._cache.values()
    entries = sum(len(found) if isinstance(found, dict) else 1 for found in values)
    assert entries == names, f"{entries} entries of vLLM's prefix cache for {names} named blocks"


def _check_index(world: World) -> None:
    """What the index says of a block is what the block holds, and who knows it has seen it."""
    if parts_of(world.side).health.broken:
        return  # neither kept up to date nor read, until a reset empties it
    index, worker, size = world.index, world.worker, world.pool.hash_block_size
    entries = np.flatnonzero(index.nodes["born"])
    nodes = index.nodes[entries]
    nodes = nodes[nodes["block"] < world.pool.num_gpu_blocks]
    if not len(nodes):
        return
    blocks = nodes["block"]
    for block in np.unique(blocks).tolist():
        assert world.pool.blocks[block].block_hash is not None, f"block {block} has no name"

    def of(tags: np.ndarray) -> np.ndarray:
        return tags.reshape(-1, size)[blocks]

    _none_of(blocks, (of(worker.token) != index.tokens[blocks]).any(axis=1), "other tokens")
    positions = nodes["position"][:, None] + np.arange(size)
    _none_of(blocks, (of(worker.position) != positions).any(axis=1), "other positions")
    _none_of(blocks, of(worker.copied).any(axis=1), "copied tokens, which never donate")
    _none_of(blocks, of(worker.depth).max(axis=1) > nodes["depth"], "a deeper provenance")
    _none_of(blocks, nodes["depth"] > world.setup.max_depth, "a provenance too deep to donate")
    inexact = (of(worker.history) == APPROXIMATE).any(axis=1)
    _none_of(blocks, inexact & (nodes["depth"] == 0), "approximate KV under depth 0")
    namespaces = parts_of(world.side).namespaces
    knows = {*zip(blocks.tolist(), nodes["namespace"].tolist(), strict=True)}
    for namespace in range(namespaces.digests.size):  # who has no entries now, too
        known_blocks = index.known.table(namespace)[:, 0].tolist()
        knows |= {(b, namespace) for b in known_blocks if 0 <= b < world.pool.num_gpu_blocks}
    for block, namespace in knows:
        known = worker.known_to[block]
        seen = any(
            identity.keys and namespaces.find(_key(identity)) == namespace for identity in known
        )
        assert seen, f"namespace {namespace} never saw block {block}, known to {known}"


def _check_rows(world: World) -> None:
    """What is known of a record is what its row holds."""
    tier, rows, size = (
        parts_of(world.side).tier,
        world.worker.rows,
        world.worker.block_size,
    )
    if tier is None or not tier.is_open:
        return
    chunks = tier.rows.chunks
    for record in tier.catalogue:
        if not (record.in_host and record.shown):
            continue
        row = chunks[record.key].chunk_id
        held = {name: tags[row * size : (row + 1) * size] for name, tags in rows.tags.items()}
        assert held["token"].tolist() == record.about.tokens.tolist(), f"row {row}: other tokens"
        positions = range(record.about.position, record.about.position + size)
        assert held["position"].tolist() == [*positions], f"row {row}: other positions"
        assert held["depth"].max() <= record.about.depth, f"row {row}: deeper"
        assert record.about.depth or (held["history"] != APPROXIMATE).all(), f"row {row}: not exact"


def _check_windows(world: World) -> None:
    """Windows of similar text end in blocks that donate."""
    finder = parts_of(world.side).feature["similar"].similar
    if finder is None or parts_of(world.side).health.broken:
        return
    kept = finder.store.windows
    blocks = kept.block[kept.block >= 0].tolist()
    assert len(kept) == len(blocks), f"{len(blocks)} windows, but len() is {len(kept)}"
    gone = {block for block in blocks if block not in world.index}
    assert not gone, f"windows of blocks that are not indexed: {sorted(gone)}"


def _check_frozen(world: World) -> None:
    """What is frozen is exact and indexed, unless it was compressed, and what was to be frozen."""
    pool = world.pool
    check_integrity(world.frozen)
    compressing.check_entries(world)
    # An error over one entry may leave another of the same block, until a reset.
    is_broken = parts_of(world.side).health.broken
    for block in () if is_broken else _exact_frozen(world):
        name = pool.blocks[block].block_hash
        assert name is not None, f"frozen block {block} has no name"
        assert not get_block_hash(name).startswith(_OWN_NAME), f"frozen block {block} is not exact"
        assert block in world.index, f"frozen block {block} is not indexed"
    longest = -(-world.scheduler.max_model_len // world.worker.block_size)
    assert pool.num_gpu_blocks - 1 - world.frozen.num_frozen >= min(
        longest, pool.num_gpu_blocks - 1
    ), "the longest request does not fit beside frozen blocks"


def _exact_frozen(world: World) -> set[int]:
    """Frozen blocks that hold a text itself, and not what was made of it."""
    parts = itertools.chain.from_iterable(frozen_parts(world.frozen).values())
    return {block for part in parts if part.tokens is None for block in part.block_ids}


def _none_of(blocks: np.ndarray, wrong: np.ndarray, what: str) -> None:
    assert not wrong.any(), f"indexed blocks {np.unique(blocks[wrong]).tolist()} hold {what}"


@functools.cache
def _key(identity: Identity) -> bytes:
    # The product's own key: whether it separates what it must is checked by who reads what.
    assert identity.keys is not None
    lora = (identity.lora, "/adapters/1") if identity.lora else None
    return namespace_key(identity.keys, identity.salt, lora, ())
