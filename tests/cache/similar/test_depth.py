# SPDX-License-Identifier: Apache-2.0
"""How far up similar tokens are moved: as their equal left context allows, counted one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segreuse_extras.similar import finder as finder_module
from segreuse_extras.similar.depth import EVERYTHING, Depths, left_contexts
from segreuse_extras.similar.options import SimilarityOptions
from tests.cache.similar.test_fill import NAMESPACE, SIZE, TEXT, index
from tests.cache.similar.worlds import World
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.plan import ALL_LAYERS, Pieces

DEPTHS = Depths.of({"8": 2, "16": 5, "all": "full_prefix"})


def contexts(
    held: SegmentIndex,
    tokens: list[int],
    table: list[list[int]],
    most: int = 100,
    everything: bool = True,
) -> list[int]:
    rows = np.array(table, np.int32)
    entries = held.entries(NAMESPACE, np.ascontiguousarray(rows[:, 2]))
    prompt = np.array(tokens, np.int32)
    return left_contexts(held.nodes, held.tokens, prompt, rows, entries, most, everything).tolist()


def test_equal_tokens_in_front_are_counted_over_blocks() -> None:
    tokens = [7, *TEXT[1:12]]
    assert contexts(index(), tokens, [[8, 4, 7, 0, 48], [5, 1, 6, 1, 45]]) == [7, 4]
    assert contexts(index(), tokens, [[8, 4, 7, 0, 48]], most=3) == [3]


def test_a_token_that_differs_ends_it() -> None:
    assert contexts(index(), [*TEXT[:3], 7, *TEXT[4:8]], [[4, 4, 6, 0, 44]]) == [0]
    assert contexts(index(), [*TEXT[:2], 7, *TEXT[3:8]], [[4, 4, 6, 0, 44]]) == [1]


def test_it_ends_where_the_donors_blocks_are_gone() -> None:
    held = index()
    held.remove([5])
    assert contexts(held, TEXT[:12], [[8, 4, 7, 0, 48]]) == [4]


def test_everything_is_equal_only_from_the_same_beginning() -> None:
    from_the_beginning = index(position=0)
    row = [4, 4, 6, 0, 4]
    assert contexts(from_the_beginning, TEXT[:8], [row]) == [EVERYTHING]
    assert contexts(from_the_beginning, TEXT[:8], [row], most=2) == [EVERYTHING]
    assert contexts(from_the_beginning, TEXT[:8], [row], most=2, everything=False) == [2]
    assert contexts(from_the_beginning, [7, *TEXT[1:8]], [row]) == [3]
    assert contexts(index(), TEXT[:8], [[4, 4, 6, 0, 44]]) == [4], "its donor had more in front"
    assert contexts(from_the_beginning, TEXT[4:8], [[0, 4, 6, 0, 4]]) == [0]


def split(table: list[list[int]], contexts: list[int], depths: Depths = DEPTHS) -> Pieces:
    begins = np.arange(len(table)) == 0
    return depths.split(np.array(table, np.int32), begins, np.array(contexts, np.int32))


def test_tokens_go_deeper_the_more_is_equal_in_front() -> None:
    found = split([[10, 8, 5, 0, 40], [18, 4, 6, 0, 48]], [0, 8])
    assert found.rows() == [[12, 3, 5, 2, 42], [15, 3, 5, 5, 45], [18, 4, 6, 0, 48]]
    assert found.layers.tolist() == [8, 16, 16]
    assert found.is_similar.all()
    assert len(found.segments(0).first) == 1, "of one sequence"


def test_only_the_first_part_of_a_run_begins_it() -> None:
    table, contexts = [[10, 8, 5, 0, 40], [18, 4, 6, 0, 48]], [4, 8]
    two = DEPTHS.split(
        np.array(table, np.int32), np.array([True, True]), np.array(contexts, np.int32)
    )
    assert two.rows() == [[10, 1, 5, 0, 40], [11, 7, 5, 1, 41], [18, 4, 6, 0, 48]]
    assert two.begins.tolist() == [True, False, True]
    assert two.segments(0).first.tolist() == [10, 18]


def test_all_layers_only_behind_an_equal_prefix() -> None:
    found = split([[10, 8, 5, 0, 10]], [EVERYTHING])
    assert found.layers.tolist() == [ALL_LAYERS]
    assert found.rows() == [[10, 8, 5, 0, 10]]


def test_without_cuts_tokens_are_moved_at_all_layers_or_computed() -> None:
    table = {"8": 2, "all": 6}
    assert split([[10, 8, 5, 0, 40]], [0], Depths.of(table)).layers.tolist() == [8, ALL_LAYERS]
    whole = split([[10, 8, 5, 0, 40]], [0], Depths.of(table).without_cuts())
    assert (whole.rows(), whole.layers.tolist()) == ([[16, 2, 5, 6, 46]], [ALL_LAYERS])
    assert len(split([[10, 8, 5, 0, 40]], [9], Depths.of({"8": 2}).without_cuts())) == 0


def test_what_is_asked_of_the_left_context_bounds_the_comparison() -> None:
    assert DEPTHS.reach == (5, True)
    assert Depths.of({"8": 2, "all": 64}).reach == (64, False)
    assert Depths.of({"all": "full_prefix"}).reach == (0, True)


@given(st.data())
def test_each_token_is_as_deep_as_a_loop_over_the_table_says(data: st.DataObject) -> None:
    limits = sorted(data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)))
    table: dict[str, int | str] = {str(4 * i + 4): limit for i, limit in enumerate(limits)}
    text = data.draw(st.lists(st.integers(0, 1), min_size=3 * SIZE, max_size=3 * SIZE))
    prompt = data.draw(st.lists(st.integers(0, 1), min_size=3 * SIZE, max_size=3 * SIZE))
    begin = data.draw(st.sampled_from([0, 40]))
    held = SegmentIndex(10, SIZE)
    held.insert(NAMESPACE, np.arange(5, 8, dtype=np.int32), np.array(text, np.int32), begin)
    same = [i for i in range(len(text)) if text[i] == prompt[i]]
    rows = [[i, 1, 5 + i // SIZE, i % SIZE, begin + i] for i in same]
    if not rows:
        return
    depths = Depths.of(table)
    found = split(rows, contexts(held, prompt, rows, *depths.reach), depths)
    deep = {row[0]: layers for row, layers in zip(found.rows(), found.layers.tolist(), strict=True)}
    for i in same:
        equal = 0
        while equal < i and text[i - equal - 1] == prompt[i - equal - 1]:
            equal += 1
        if equal == i and not begin:
            equal = 12  # all there is
        allowed = [int(layer) for layer, limit in table.items() if int(limit) <= equal]
        assert deep.get(i, 0) == max(allowed, default=0)


def test_contexts_are_those_of_a_loop_over_the_tokens() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        position = int(rng.choice([0, SIZE, 40]))
        held = SegmentIndex(10, SIZE)
        text = rng.integers(0, 2, 3 * SIZE).astype(np.int32)
        held.insert(NAMESPACE, np.array([5, 0, 6], np.int32), text, position)
        first = 0
        if rng.random() < 0.2:  # what is in front of the third block is gone
            held.remove([0])
            first = 2 * SIZE
        at, prompt = int(rng.integers(first, 3 * SIZE)), rng.integers(0, 2, 3 * SIZE)
        shift = int(rng.integers(-at, 3 * SIZE - at))
        prompt[max(0, shift) : at + shift] = text[max(0, -shift) : at]
        if rng.random() < 0.5:
            prompt[int(rng.integers(0, 3 * SIZE))] ^= 1
        equal = 0
        while equal < min(at - first, at + shift) and (
            text[at - equal - 1] == prompt[at + shift - equal - 1]
        ):
            equal += 1
        block = (5, 0, 6)[at // SIZE]
        row = [at + shift, 1, block, at % SIZE, position + at]
        most, everything = int(rng.integers(0, 7)), bool(rng.random() < 0.5)
        alike = position == shift
        expected = equal if everything and alike else min(equal, most)
        if alike and expected == at + shift:
            expected = EVERYTHING
        assert contexts(held, prompt.tolist(), [row], most, everything) == [expected]


def test_a_finder_leaves_out_what_its_table_does_not_allow() -> None:
    world = World(w_exact={"8": 2, "16": 5})
    wording = [world.words(12) for _ in range(20)]
    world.cache(world.records(wording))
    prompt = world.arrive(world.records(wording))
    found = world.find(prompt).pieces
    assert set(found.layers.tolist()) == {8, 16}
    assert 0 < found.num_tokens == found.num_similar
    moved = prompt.tokens.size // 14 * 10
    assert moved * 0.8 < found.num_tokens <= moved, "two tokens of each part are computed"
    fixed = world.find(world.arrive(world.records(wording))).num_tokens
    assert fixed > 0
    world.finder = world.finder.without_cuts()
    assert world.find(world.arrive(world.records(wording))).num_tokens == 0


def test_no_request_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        finder_module, "left_contexts", lambda *given: calls.append(1) or left_contexts(*given)
    )
    finder_module.warm_up(SimilarityOptions())
    assert calls


@pytest.mark.parametrize(
    ("table", "cuts"), [(None, ()), ({"all": 4}, ()), ({16: 3, "all": 4, "8": 0}, (8, 16))]
)
def test_states_are_kept_at_the_layers_of_the_table(table: object, cuts: tuple[int, ...]) -> None:
    assert SimilarityOptions(w_exact=table).cuts == cuts  # type: ignore[arg-type]
