# SPDX-License-Identifier: Apache-2.0
"""The index stays consistent whatever comes and goes, and holds exactly what was inserted last.

A physical block may be known in several namespaces, as long as its content is the same.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.integrity import check_integrity
from vllm_segreuse.cache import index as index_module
from vllm_segreuse.cache import matcher
from vllm_segreuse.cache.index import BlockFacts, SegmentIndex, bytes_per_block, was_before
from vllm_segreuse.cache.known import Known
from vllm_segreuse.cache.matcher import find_matches
from vllm_segreuse.cache.rolling_hash import window_hashes

BLOCKS, BLOCK_SIZE = 12, 2


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


block_ids = st.integers(0, BLOCKS - 1)
NAMESPACES = 6
namespaces = st.integers(0, NAMESPACES - 1)
inserts = st.tuples(
    st.just("insert"),
    namespaces,
    st.lists(block_ids, min_size=1, max_size=4),
    st.lists(st.integers(0, 1), min_size=8, max_size=8),  # tokens
    st.integers(0, 3),  # position, in blocks
    st.integers(-1, BLOCKS - 1),  # parent
    st.integers(0, 3),  # depth
)
operations = st.lists(
    st.one_of(
        inserts,
        inserts,
        st.tuples(st.just("share"), namespaces, st.lists(block_ids, max_size=4)),
        st.tuples(st.just("share"), namespaces, st.lists(block_ids, max_size=4)),
        st.tuples(st.just("remove"), st.lists(block_ids, max_size=3)),
        st.tuples(st.just("step")),
        st.tuples(st.just("clear")),
    ),
    max_size=30,
)


class Model:
    """block -> (tokens, position, depth), and the namespaces that know it."""

    def __init__(self) -> None:
        self.contents: dict[int, tuple] = {}
        self.namespaces: dict[int, set[int]] = {}
        self.fresh: set[int] = set()

    def insert(self, namespace: int, block: int, content: tuple) -> None:
        if self.contents.get(block) != content:
            self.contents[block], self.namespaces[block] = content, set()
            self.fresh.add(block)
        self.namespaces[block].add(namespace)

    def remove(self, block: int) -> bool:
        self.fresh.discard(block)
        self.namespaces.pop(block, None)
        return self.contents.pop(block, None) is not None


def apply(index: SegmentIndex, model: Model, operation: tuple) -> None:
    """Do one operation on the index and on the obvious model of it."""
    match operation:
        case "insert", namespace, ids, tokens, position, parent, depth:
            tokens = tokens[: len(ids) * BLOCK_SIZE]
            index.insert(namespace, ints(*ids), ints(*tokens), position * BLOCK_SIZE, parent, depth)
            for i, block in enumerate(ids):
                piece = tuple(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
                model.insert(namespace, block, (piece, (position + i) * BLOCK_SIZE, depth))
        case "share", namespace, ids:
            for block in model.contents.keys() & set(ids):
                tokens, position, depth = model.contents[block]
                index.insert(namespace, ints(block), ints(*tokens), position, ids[0], depth)
                model.insert(namespace, block, model.contents[block])
        case "remove", blocks:
            assert index.remove(blocks) == sum(map(model.remove, blocks))
        case ("step",):
            index.begin_step()
            model.fresh.clear()
        case ("clear",):
            index.clear()
            model.__init__()


def contents(index: SegmentIndex) -> dict:
    found = {}
    for block in range(index.num_blocks):
        if block in index:
            position, depth = (int(index.nodes[block][field]) for field in ("position", "depth"))
            found[block] = (tuple(index.tokens[block].tolist()), position, depth)
    return found


def is_fresh(index: SegmentIndex, block: int) -> bool:
    """Whether a block was first inserted in this step: named by vLLM, not computed yet."""
    return bool(index.nodes["born"][block] == index.step)


def is_known(index: SegmentIndex, namespace: int, block: int) -> bool:
    """Whether a block is known in a namespace."""
    return not index.missing(namespace, np.array([block])).size


@pytest.mark.parametrize("views", [1, 2, 16])
@pytest.mark.parametrize("colliding", [False, True], ids=["hashed", "all keys collide"])
@given(operations=operations)
def test_it_holds_what_was_inserted_last(colliding, views, operations):
    with pytest.MonkeyPatch.context() as patch:
        if colliding:
            patch.setattr(index_module, "window_hashes", lambda t, w: np.ones_like(t, np.uint64))
            patch.setattr(index_module, "salt_of", lambda namespace: np.uint64(0))
            patch.setattr(index_module, "window_anchors", lambda t, w: np.ones_like(t, np.uint32))
            patch.setattr(index_module, "ENTRIES_PER_BLOCK", 1)  # they move again and again
        patch.setattr(index_module, "MAX_VIEWS", views)
        index, model = SegmentIndex(BLOCKS, BLOCK_SIZE), Model()
        for operation in operations:
            apply(index, model, operation)
            check_integrity(index)
            assert contents(index) == model.contents
            assert len(index) == len(model.contents)
            assert {block for block in range(BLOCKS) if is_fresh(index, block)} == model.fresh
            for namespace in range(NAMESPACES):
                known = [b for b in range(BLOCKS) if namespace in model.namespaces.get(b, ())]
                assert [b for b in range(BLOCKS) if is_known(index, namespace, b)] == known
                assert index.population(namespace) == len(known)
                missing = index.missing(namespace, np.arange(BLOCKS, dtype=np.int32)).tolist()
                assert sorted(missing + known) == list(range(BLOCKS))


def test_churn_leaves_nothing_behind():
    rng = np.random.default_rng(4)
    index = SegmentIndex(1000, 4)
    for _ in range(2000):  # 1.5 million insertions, every id replaced 500 times in each namespace
        ids = rng.permutation(1000)[:250].astype(np.int32)
        tokens = rng.integers(0, 50, 1000).astype(np.int32)
        for namespace in rng.permutation(5)[:3].tolist():
            index.insert(namespace, ids, tokens, 0)
    check_integrity(index)
    assert index.nodes.size == 4000  # what was given back was used again
    for block in rng.permutation(1000).tolist():
        assert index.remove([block])
    assert len(index) == 0
    assert (index.heads == -1).all()
    assert not index.anchor_counts.any()


def test_a_full_anchor_counter_stays_safe(monkeypatch):
    constant = lambda tokens, width: np.zeros(max(0, tokens.size - width + 1), np.uint32)  # noqa: E731
    monkeypatch.setattr(index_module, "window_anchors", constant)
    monkeypatch.setattr(matcher, "window_anchors", constant)
    index = SegmentIndex(400, 2)
    tokens = np.arange(800, dtype=np.int32)
    index.insert(0, np.arange(400, dtype=np.int32), tokens, 0)
    index.begin_step()
    check_integrity(index)
    for block in range(399):
        index.remove([block])
    check_integrity(index)
    last = tokens[-2:]
    assert find_matches(index, 0, last, window_hashes(last, 2), 0, 2, 0).num_tokens == 2


def test_orphans_forget_an_evicted_parent_whose_id_comes_back():
    index = SegmentIndex(4, 2)
    index.insert(0, ints(0, 1), ints(1, 2, 3, 4), 0)
    index.remove([0])
    index.insert(0, ints(0), ints(8, 9), 0)
    index.begin_step()
    prompt = ints(8, 9, 3, 4)
    matches = find_matches(index, 0, prompt, window_hashes(prompt, 2), 0, 4, 0)
    assert matches.num_tokens == 4
    assert matches.num_segments == 2  # equal tokens side by side, but no common sequence
    check_integrity(index)


@pytest.mark.parametrize(
    ("parent_namespace", "parent_position"),
    [(1, 0), (0, 2), (0, 6)],
    ids=["other namespace", "not just before", "behind"],
)
def test_a_parent_that_cannot_be_one_is_taken_for_unknown(parent_namespace, parent_position):
    index = SegmentIndex(4, 2)
    index.insert(parent_namespace, ints(0), ints(1, 2), parent_position)
    index.insert(0, ints(1), ints(3, 4), 2, parent_block=0)
    assert index.nodes[1]["parent"] == -1
    check_integrity(index)


def test_a_parent_that_comes_back_is_linked_again():
    index = SegmentIndex(4, 2)
    for _ in range(2):
        index.insert(0, ints(0, 1), ints(1, 2, 3, 4), 0)
        assert index.nodes[1]["parent"] == 0
        index.remove([0])
        assert index.nodes[1]["parent"] == -1
    check_integrity(index)


def test_a_block_that_replaces_its_own_parent_has_none():
    index = SegmentIndex(1, 2)
    index.insert(0, ints(0), ints(1, 2), 0)
    index.insert(1, ints(0, 0), ints(1, 2, 1, 2), 0)
    assert index.nodes[0]["parent"] == -1
    check_integrity(index)


def test_a_further_namespace_makes_a_donor_at_once_but_not_before_the_block_is_computed():
    index, prompt = SegmentIndex(2, 2), ints(1, 2, 3, 4)

    def found(namespace: int) -> int:
        hashes = window_hashes(prompt, 2)
        return find_matches(index, namespace, prompt, hashes, 0, 4, 0).num_tokens

    index.insert(0, ints(0, 1), prompt, 0)
    index.insert(1, ints(0, 1), prompt, 0)
    assert [found(n) for n in range(4)] == [0, 0, 0, 0]
    index.begin_step()
    index.insert(2, ints(0, 1), prompt, 0)
    assert [found(n) for n in range(4)] == [4, 4, 4, 0]
    assert not is_fresh(index, 0)


@pytest.mark.parametrize(
    ("tokens", "position", "depth"),
    [((9, 9), 4, 1), ((1, 2), 2, 1), ((1, 2), 4, 0)],
    ids=["tokens", "position", "depth"],
)
def test_other_content_replaces_the_block_in_all_namespaces(tokens, position, depth):
    index = SegmentIndex(2, 2)
    for namespace in range(3):
        index.insert(namespace, ints(0), ints(1, 2), 4, depths=1)
    index.begin_step()
    index.insert(1, ints(0), ints(*tokens), position, depths=depth)
    assert [is_known(index, namespace, 0) for namespace in range(3)] == [False, True, False]
    assert is_fresh(index, 0)
    check_integrity(index)


def test_steps_are_counted_in_a_circle():
    index = SegmentIndex(1, 2)
    index.step = 2**32 - 1
    index.insert(0, ints(0), ints(1, 2), 0)
    assert is_fresh(index, 0)
    index.begin_step()
    assert index.step == 1
    assert not is_fresh(index, 0)


def test_version_changes_exactly_when_an_answer_may():
    index = SegmentIndex(4, 2)

    def changes(call, *arguments) -> bool:
        before = index.version
        call(*arguments)
        return index.version != before

    assert not changes(index.begin_step)
    assert changes(index.insert, 0, ints(0), ints(1, 2), 0)
    assert not changes(index.insert, 0, ints(0), ints(1, 2), 0)
    assert changes(index.begin_step)  # block 0 is a donor from now on
    assert not changes(index.begin_step)
    assert changes(index.insert, 1, ints(0), ints(1, 2), 0)
    assert not changes(index.insert, 1, ints(0), ints(1, 2), 0)
    assert changes(index.remove, [0])
    assert not changes(index.remove, [0])
    assert changes(index.clear)
    assert not changes(index.insert, 0, ints(), ints(), 0)


@pytest.mark.parametrize("block", [-1, 4, 10**6])
def test_ids_outside_of_the_pool_are_not_indexed(block):
    index = SegmentIndex(4, 2)
    index.insert(0, np.arange(4, dtype=np.int32), np.arange(8, dtype=np.int32), 0)
    assert block not in index
    assert not index.remove([block])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, ints(0), ints(1, 2, 3), 0), "need 2 tokens, got 3"),
        ((0, ints(0, 4), ints(1, 2, 3, 4), 0), "outside of 0..3"),
        ((0, ints(-1), ints(1, 2), 0), "outside of 0..3"),
        ((-1, ints(0), ints(1, 2), 0), "namespace -1"),
        ((0, ints(0), ints(1, 2), -2), "position -2"),
        ((0, ints(0), ints(1, 2), 0, -1, -3), "depth -3"),
    ],
)
def test_bad_insertions_change_nothing(arguments, message):
    index = SegmentIndex(4, 2)
    with pytest.raises(ValueError, match=message):
        index.insert(*arguments)
    assert len(index) == 0
    check_integrity(index)


def test_many_namespaces():
    index = SegmentIndex(1000, 2)
    for namespace in range(1000):
        index.insert(namespace, ints(namespace), ints(7, 7), 0)
    check_integrity(index)
    assert [index.population(n) for n in (0, 999, 1000)] == [1, 1, 0]
    assert np.count_nonzero(index.heads >= 0) > 700  # equal content, but no common chain


def test_an_impossible_size_is_named():
    with pytest.raises(ValueError, match="0 blocks of 16 tokens"):
        SegmentIndex(0, 16)


def test_entries_of_blocks_are_those_of_the_namespace_and_negative_ids_are_nobodys() -> None:
    index = SegmentIndex(8, 2)
    index.insert(0, np.array([0, 3], np.int32), np.array([1, 2, 3, 4], np.int32), 0)
    index.insert(1, np.array([0], np.int32), np.array([1, 2], np.int32), 0)
    asked = np.array([0, 3, -1, 5, 0], np.int32)
    mine, other = index.entries(0, asked), index.entries(1, asked)
    assert mine.tolist() == [0, 3, -1, -1, 0]
    assert other[0] == other[4] >= index.num_blocks
    assert other[1:4].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(("blocks", "per_block"), [(2**10, 316), (2**10 + 1, 364)])
@pytest.mark.parametrize("size", [16, 32])
def test_an_index_reserves_as_much_as_is_said(blocks: int, per_block: int, size: int) -> None:
    index = SegmentIndex(blocks, size)
    arrays = index.nodes, index.tokens, index.contexts, index.heads, index.anchor_counts
    known = index.known.num_bytes - Known(1).num_bytes
    reserved = (sum(array.nbytes for array in arrays) + known) / blocks
    assert reserved == pytest.approx(4 * size + per_block, abs=0.2)
    assert reserved <= bytes_per_block(size) == 4 * size + 364
    index.insert(0, ints(0), np.arange(size, dtype=np.int32), 0)
    assert index.position_offsets is None
    facts = BlockFacts(position_offsets=np.zeros(size, np.int32))
    index.insert(0, ints(1), np.arange(size, dtype=np.int32), 0, facts=facts)
    assert index.position_offsets is not None
    assert index.position_offsets.nbytes == blocks * 4 * size


def test_arrays_begin_at_a_cache_line() -> None:
    index = SegmentIndex(5, 3)
    assert [it.ctypes.data % 64 for it in (index.nodes, index.tokens)] == [0, 0]


def test_entries_that_move_begin_at_a_cache_line_and_are_twice_as_many(monkeypatch) -> None:
    monkeypatch.setattr(index_module, "ENTRIES_PER_BLOCK", 1)
    index, prompt = SegmentIndex(4, 2), np.arange(8, dtype=np.int32)
    sizes = []
    for namespace in range(4):
        index.insert(namespace, np.arange(4, dtype=np.int32), prompt, 0)
        sizes.append(index.nodes.size)
        check_integrity(index)
    assert sizes == [4, 8, 16, 16]
    assert index.nodes.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    ("step", "other", "expected"),
    [
        (5, 5, False),
        (5, 6, True),
        (6, 5, False),
        (1, 2**31, True),
        (1, 2**31 + 1, False),
        (2**32 - 1, 1, True),
        (1, 2**32 - 1, False),
    ],
)
def test_steps_are_compared_around_their_circle(step: int, other: int, expected: bool) -> None:
    assert was_before(step, other) is expected


def test_what_is_computed_already_donates_at_once_also_where_steps_begin_anew() -> None:
    for step in (1, 2, 2**32 - 1):
        index, prompt = SegmentIndex(2, 2), ints(1, 2)
        index.step = step
        index.insert(0, ints(0), prompt, 0, facts=BlockFacts(fresh=False))
        assert find_matches(index, 0, prompt, window_hashes(prompt, 2), 0, 2, 0).num_tokens == 2
        version = index.version
        index.begin_step()
        assert index.version == version, "nothing was fresh"
        assert was_before(int(index.nodes["born"][0]), index.step)


def test_a_depth_is_taken_up_to_the_largest() -> None:
    index = SegmentIndex(4, 2)
    index.insert(0, ints(0, 1), ints(1, 2, 3, 4), 0, depths=np.array([0, 127], np.int8))
    assert index.nodes["depth"][:2].tolist() == [0, 127]
    with pytest.raises(ValueError, match="depth 128 is above 127"):
        index.insert(0, ints(2), ints(1, 2), 0, depths=128)
    with pytest.raises(ValueError, match="depth -1 must not be negative"):
        index.insert(0, ints(2), ints(1, 2), 0, depths=np.array([-1], np.int8))
    assert 2 not in index


def test_images_in_front_are_known_of_each_block() -> None:
    index = SegmentIndex(6, 2)
    index.insert(0, ints(0), ints(1, 2), 0)
    assert index.position_offsets_of(ints(0)) is None
    assert index.is_text(0)
    facts = BlockFacts(position_offsets=ints(0, 0, 3, 4))
    index.insert(0, ints(1, 2), ints(-9, 5, 6, 7), 2, facts=facts)
    index.insert(0, ints(3, 4), ints(6, 7, 8, -4), 6)
    offsets = index.position_offsets_of(ints(2, 0, 1))
    assert offsets is not None
    assert offsets.tolist() == [3, 4, 0, 0, 0, 0]
    assert [index.is_text(block) for block in range(5)] == [True, False, False, True, False]
    assert index.image_tokens().tolist() == [-9, -4]
    index.remove([1])
    assert index.image_tokens().tolist() == [-4]
    index.insert(0, ints(2), ints(6, 7), 4)
    assert index.is_text(2), "it was replaced"
    index.clear()
    assert index.position_offsets is None
    assert index.image_tokens().tolist() == []


def test_contexts_are_those_of_the_last_insertion() -> None:
    index = SegmentIndex(4, 2)
    facts = BlockFacts(contexts=np.array([7, 8], np.uint64))
    index.insert(0, ints(1, 3), ints(1, 2, 3, 4), 0, facts=facts)
    assert index.contexts.tolist() == [0, 7, 0, 8]
    index.insert(1, ints(3), ints(3, 4), 2)
    assert index.contexts.tolist() == [0, 7, 0, 0]


def test_blocks_in_front_are_listed_up_to_so_many() -> None:
    index = SegmentIndex(6, 2)
    index.insert(0, ints(4, 0, 2, 5), np.arange(8, dtype=np.int32), 0)
    assert [index.ancestors(5, count).tolist() for count in (0, 1, 2, 3, 9)] == [
        [],
        [2],
        [0, 2],
        [4, 0, 2],
        [4, 0, 2],
    ]
    assert index.ancestors(4, 3).tolist() == []


@pytest.mark.parametrize("namespace", [63, 64, 65])
def test_namespaces_have_any_number(namespace: int) -> None:
    index = SegmentIndex(4, 2)
    index.insert(0, ints(0), ints(1, 2), 0)
    index.insert(namespace, ints(0, 1), ints(1, 2, 3, 4), 0)
    assert [index.population(n) for n in (0, namespace, namespace + 1)] == [1, 2, 0]
    assert [index.knows(namespace, block) for block in range(3)] == [True, True, False]
    assert [index.knows(0, block) for block in range(3)] == [True, False, False]
    check_integrity(index)
