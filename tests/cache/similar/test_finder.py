# SPDX-License-Identifier: Apache-2.0
"""Equal tokens of similar text are reused, from donors that still hold them; nothing else is."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segreuse_extras.explain.reasons import explain
from segreuse_extras.similar.finder import SimilarFinder, warm_up
from tests.cache.similar.worlds import FIRST_WORD, MAX_DEPTH, SIZE, VOCABULARY, World
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.plan import NO_HALO, Halo


def wording(world: World, parts: int = 20, tokens: int = 12) -> list[list[int]]:
    """Text between changing values, each part shorter than a block."""
    assert tokens < SIZE
    return [world.words(tokens) for _ in range(parts)]


def test_parts_shorter_than_a_block_are_found() -> None:
    world = World()
    parts = wording(world)
    world.cache([*world.words(40), *world.records(parts)])
    prompt = world.arrive([*world.words(13), *world.records(parts), *world.words(9)])
    assert world.content.find(prompt, 0, prompt.tokens.size - 1).num_tokens == 0
    found = world.find(prompt)
    # All of the wording but what is in the donor's last block, which is not full; no value.
    assert 0.9 * 12 * len(parts) < found.num_tokens <= 12 * len(parts)
    assert found.pieces.num_similar == found.num_tokens
    assert found.num_segments >= len(parts) - 2
    reused = found.pieces.reused(0, prompt.tokens.size)
    assert (prompt.tokens[reused] >= FIRST_WORD).all()


def test_equal_segments_come_first_and_similar_ones_fill_what_is_left() -> None:
    world = World()
    document, parts = world.words(5 * SIZE), wording(world)
    world.cache(document)
    world.cache(world.records(parts))
    prompt = world.arrive([3, *document, *world.records(parts), 4])
    equal = world.content.find(prompt, 0, prompt.tokens.size - 1)
    found = world.find(prompt)
    assert equal.num_tokens == len(document)
    kept = ~found.pieces.is_similar
    for name in ("destination", "length", "block", "offset", "position", "source"):
        assert (getattr(found.pieces, name)[kept] == getattr(equal.pieces, name)).all()
    assert found.pieces.num_similar > 200
    assert found.num_tokens == equal.num_tokens + found.pieces.num_similar
    assert found.num_segments > equal.num_segments


def test_a_similar_segment_is_reused_as_a_whole() -> None:
    world = World()
    document, parts = world.words(5 * SIZE), wording(world)
    world.cache(document)
    world.cache(world.records(parts))
    prompt = world.arrive([3, *document, *world.records(parts), 4])
    found, stop = world.find(prompt), prompt.tokens.size - 1
    pieces, segment = found.pieces, found.pieces.segment
    runs = np.bincount(segment)
    lost = int(np.flatnonzero(pieces.is_similar & (runs[segment] > 1))[0])
    for index in (0, lost):
        kept = np.arange(len(pieces)) != index
        part = world.finder.part(prompt, found, kept, 0, stop)
        assert part is not None
        gone = len(pieces) - len(part.pieces)
        assert gone == (runs[segment[index]] if pieces.is_similar[index] else 1)


def test_what_is_found_is_remembered() -> None:
    world = World()
    parts = wording(world)
    world.cache(world.records(parts))
    prompt = world.arrive(world.records(parts))
    stop = prompt.tokens.size - 1
    assert world.finder.remembered(prompt, 0, stop) is None
    found = world.finder.find(prompt, 0, stop)
    assert found.pieces.num_similar
    assert world.finder.remembered(prompt, 0, stop) is found
    world.cache(world.words(SIZE))
    assert world.finder.remembered(prompt, 0, stop) is None
    assert len(world.searches) == 1


def test_nothing_is_searched_for_within_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """There what was found is compared with what donors hold by now, and no more."""
    world = World()
    parts = wording(world)
    world.cache(world.records(parts))
    prompt = world.arrive(world.records(parts))

    def called(*args: Any) -> None:
        raise AssertionError("within schedule()")

    for name in ("look_up", "insert"):
        monkeypatch.setattr(world.store.windows, name, called)
    monkeypatch.setattr(type(VOCABULARY), "canonical", called)
    world.cache(world.words(4 * SIZE))  # what is named is listed
    assert world.find(prompt).pieces.num_similar
    assert world.find(prompt, start=2 * SIZE).pieces.destination.min() >= 2 * SIZE


def test_blocks_of_the_step_and_deep_ones_are_no_donors() -> None:
    world = World()
    parts = wording(world)
    blocks = world.cache(world.records(parts), step=False)
    prompt = world.arrive(world.records(parts))
    assert world.find(prompt).num_tokens == 0
    world.donors.begin_step()
    found = world.find(prompt)
    assert found.num_tokens
    assert found.max_depth == 0
    for block in blocks:
        world.index.nodes["depth"][block] = MAX_DEPTH
    assert world.find(prompt).max_depth == MAX_DEPTH
    world.index.nodes["depth"][blocks] = MAX_DEPTH + 1
    assert world.find(prompt).num_tokens == 0


def test_donors_that_are_evicted_between_arrival_and_schedule_are_not_used() -> None:
    world = World()
    parts = wording(world)
    blocks = world.cache(world.records(parts))
    prompt = world.arrive(world.records(parts))
    before = world.find(prompt)
    world.donors.evicted([blocks[4]])
    after = world.find(prompt)
    assert blocks[4] in before.pieces.donor_blocks
    assert after.pieces.donor_blocks == [it for it in before.pieces.donor_blocks if it != blocks[4]]
    for block in blocks:
        world.donors.evicted([block])
    assert world.find(prompt).num_tokens == 0
    assert len(world.store.windows) == 0


def test_a_block_that_holds_other_tokens_by_now_is_not_used() -> None:
    """Its id was found for the old ones; in the same namespace, at the same place."""
    world = World()
    parts = wording(world)
    blocks = world.cache(world.records(parts))
    prompt = world.arrive(world.records(parts))
    replaced = world.index.tokens[blocks].copy()
    for block in blocks:
        world.donors.evicted([block])
    replaced[:, ::2] = 5
    world.index.insert(world.mine, np.array(blocks, np.int32), replaced.reshape(-1), 0)
    world.donors.begin_step()
    assert world.find(prompt).num_tokens == 0


def test_another_namespace_finds_nothing() -> None:
    world = World()
    parts = wording(world)
    world.cache(world.records(parts), world.theirs)
    prompt = world.arrive(world.records(parts))
    assert prompt.slots is not None
    assert (prompt.slots < 0).all()
    assert world.find(prompt).num_tokens == 0
    assert world.find(world.arrive(world.records(parts), world.theirs)).num_tokens


def test_a_block_that_went_to_another_namespace_is_not_used() -> None:
    world = World()
    parts = wording(world)
    text = world.records(parts)
    blocks = world.cache(text)
    prompt = world.arrive(world.records(parts))
    for block in blocks:
        world.donors.evicted([block])
    tokens = np.array(text[: len(blocks) * SIZE], np.int32)
    world.index.insert(world.theirs, np.array(blocks, np.int32), tokens, 0)
    world.donors.begin_step()
    assert world.find(prompt).num_tokens == 0


def test_blocks_that_two_namespaces_know_are_found_by_both() -> None:
    world = World()
    parts = wording(world)
    text = world.records(parts)
    blocks = np.array(world.cache(text), np.int32)
    tokens = np.array(text[: blocks.size * SIZE], np.int32)
    world.index.insert(world.theirs, blocks, tokens, 0)
    world.store.inserted(world.theirs, blocks)
    for namespace in (world.mine, world.theirs):
        assert world.find(world.arrive(world.records(parts), namespace)).num_tokens > 200


def test_listed_blocks_that_are_gone_are_not_indexed() -> None:
    world = World()
    blocks = world.cache(world.records(wording(world)))
    for block in blocks[3:]:
        world.donors.evicted([block])
    world.store.catch_up()
    kept = world.store.windows.block
    assert set(kept[kept >= 0].tolist()) <= {*blocks[:3]}


def test_a_reset_forgets_everything() -> None:
    world = World()
    parts = wording(world)
    world.cache(world.records(parts))
    world.arrive(world.records(parts))
    assert len(world.store.windows)
    world.cache(world.records(parts))
    world.donors.reset()
    assert len(world.store.windows) == 0
    assert world.find(world.arrive(world.records(parts))).num_tokens == 0


def test_answers_are_found_too_block_by_block() -> None:
    """Blocks are named one by one while tokens are generated; windows span them all the same."""
    world = World()
    parts = wording(world)
    text = world.records(parts)
    at_once, one_by_one = World(), World()
    at_once.cache(text)
    at_once.store.catch_up()
    blocks = np.arange(len(text) // SIZE, dtype=np.int32)
    for block in blocks:
        one_by_one.index.insert(
            one_by_one.mine,
            np.array([block], np.int32),
            np.array(text[block * SIZE : (block + 1) * SIZE], np.int32),
            int(block) * SIZE,
            parent_block=int(block) - 1,
        )
        one_by_one.index.begin_step()
        one_by_one.store.inserted(one_by_one.mine, np.array([block], np.int32))
        one_by_one.store.catch_up()
    assert len(one_by_one.store.windows) == len(at_once.store.windows)
    prompt = world.records(parts)
    assert (
        one_by_one.find(one_by_one.arrive(prompt)).num_tokens
        == at_once.find(at_once.arrive(prompt)).num_tokens
        > 200
    )


def test_the_left_context_chooses_among_donors_of_the_same_text() -> None:
    world = World()
    lead, parts = world.words(150), wording(world, parts=6)
    near = world.cache([*lead, *world.records(parts), *world.words(40)])
    world.cache([*world.words(150), *world.records(parts), *world.words(40)])  # the newer one
    prompt = world.arrive([9, *lead, *world.records(parts)])
    blocks = world.find(prompt).pieces.donor_blocks
    assert blocks
    assert set(blocks) <= {*near}


def test_segments_between_anchors_are_found_wherever_they_are() -> None:
    """A short segment in other surroundings: no whole block, too small a part of any window."""
    mark = FIRST_WORD + 7
    options: dict[str, Any] = {"window_tokens": 96, "stride_tokens": 32, "threshold": 0.7}
    found = []
    for anchors in ([], [[mark]]):
        world = World(vocabulary=VOCABULARY.with_anchors(anchors), **options)
        segment = [mark, *world.words(13)]
        world.cache([*world.words(100), *segment, mark, *world.words(100)])
        prompt = world.arrive([*world.words(101), *segment, mark, *world.words(100)])
        found.append(world.find(prompt).num_tokens)
    assert found == [0, len(segment) + 1]


def test_with_a_threshold_of_one_windows_that_differ_in_values_are_found() -> None:
    world = World(threshold=1.0)
    parts = wording(world)
    world.cache(world.records(parts))
    assert world.find(world.arrive(world.records(parts))).num_tokens


def test_runs_below_the_minimum_are_computed() -> None:
    for least, found in ((12, True), (13, False)):
        world = World(min_run_tokens=least)
        parts = wording(world)
        world.cache(world.records(parts))
        assert bool(world.find(world.arrive(world.records(parts))).num_tokens) is found


def test_what_a_table_of_contexts_leaves_of_a_run_is_longer_than_the_halo() -> None:
    """Else all that is left would be computed, and the request be no longer exact for nothing."""
    for tokens, found in ((20, 0), (26, 10)):
        world = World(halo_tokens=8, w_exact={"all": 16})
        parts = [world.words(tokens) for _ in range(20)]
        world.cache(world.records(parts))
        matches = world.find(world.arrive([7, *world.records(parts)]))
        similar = matches.pieces.length[matches.pieces.is_similar]
        assert similar.sum() == (matches.pieces.num_similar if found else 0)
        assert bool(matches.pieces.num_similar) is bool(found)
        if found:
            first, stop = matches.pieces.similar_segments(0)
            assert (stop - first > 8).all()


@pytest.mark.parametrize("context", [0, 1, 5, 11, 12, 40])
def test_tokens_without_enough_equal_context_are_computed(context: int) -> None:
    """The tokens in front are equal one by one, here and in the donor."""
    world = World(min_context_tokens=context, min_run_tokens=1)
    parts = [*wording(world), world.words(70), *wording(world, parts=4)]
    lead = world.words(SIZE - 1)
    donor = [*lead, *world.records(parts)]
    world.cache(donor)
    prompt = world.arrive([*world.words(9), *world.records(parts)])
    equal = world.content.find(prompt, 0, prompt.tokens.size - 1)
    found = world.find(prompt)
    similar = found.pieces.is_similar
    assert (context < 12) is (len({*found.pieces.destination[similar].tolist()}) > 20)
    for to, length, _, _, position in np.array(found.pieces.rows())[similar].tolist():
        for i in range(length):
            here = prompt.tokens[max(0, to + i - context) : to + i].tolist()
            assert here == donor[max(0, position + i - context) : position + i]
            assert len(here) == context
    # It does not concern equal segments, whatever is in front of them.
    assert found.num_tokens - found.pieces.num_similar == equal.num_tokens


def test_unrelated_text_is_not_searched_for_long_runs() -> None:
    world = World()
    world.cache(world.words(30 * SIZE))
    assert world.find(world.arrive(world.words(500))).num_tokens == 0
    assert world.find(world.arrive([5])).num_tokens == 0
    empty = World()
    assert empty.find(empty.arrive(empty.words(500))).num_tokens == 0


def test_explain_names_what_is_similar() -> None:
    world = World()
    document, parts = world.words(5 * SIZE), wording(world, parts=5)
    world.cache(document)
    world.cache(world.records(parts))
    prompt = world.arrive([3, *document, 5, *world.records(parts), 4])
    found = world.find(prompt)
    stretches = explain(found.pieces, 0, prompt.tokens.size, lambda start, stop: "unknown")
    sources = [stretch["source"] for stretch in stretches]
    assert {"segment", "similar", "new"} == {*sources}
    similar = [stretch for stretch in stretches if stretch["source"] == "similar"]
    assert sum(stretch["tokens"] for stretch in similar) == found.pieces.num_similar
    assert all("position" in stretch for stretch in similar)


def test_the_same_windows_are_searched_under_other_options() -> None:
    world = World(threshold=0.4)
    parts = wording(world)
    world.cache(world.records(parts))
    found = world.find(world.arrive(world.records(parts))).num_tokens
    first = world.finder
    longer = world.options.model_copy(update={"halo_tokens": 12, "max_boundary_drift": 0.5})
    world.finder = first.under(longer)
    assert world.finder.halo == Halo(12, 0.5)
    assert world.find(world.arrive(world.records(parts))).num_tokens == 0 < found
    # Back again, with what was listed meanwhile.
    world.finder = world.finder.under(world.options)
    assert world.finder.halo == NO_HALO == first.halo
    assert world.finder.store.windows is first.store.windows
    other = wording(world)
    world.cache(world.records(other))
    assert world.find(world.arrive(world.records(other))).num_tokens > 0


def test_a_stricter_threshold_finds_less() -> None:
    world = World(threshold=0.2)
    parts = wording(world)
    world.cache(world.records(parts))
    half = [*parts[: len(parts) // 2], *wording(world)]
    loose = world.find(world.arrive(world.records(half))).num_tokens
    strict = world.options.model_copy(update={"threshold": 0.95})
    world.finder = world.finder.under(strict)
    assert world.find(world.arrive(world.records(half))).num_tokens < loose


def test_tokens_enter_between_layers_under_other_options() -> None:
    world = World()
    parts = wording(world)
    world.cache(world.records(parts))
    table = world.options.model_copy(update={"w_exact": {"2": 0}})
    world.finder = world.finder.under(table)
    pieces = world.find(world.arrive(world.records(parts))).pieces
    assert set(pieces.layers.tolist()) == {2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"window_tokens": 64}, "only by_default, threshold, min_run_tokens"),
        ({"threshold": 0.3}, "threshold=0.3 must be at least 0.4"),
    ],
)
def test_other_windows_are_refused(change: dict[str, Any], said: str) -> None:
    world = World(threshold=0.4)
    stricter = world.finder.under(world.options.model_copy(update={"threshold": 0.9}))
    assert stricter.under(world.options).store.options == world.options, "as it began"
    with pytest.raises(ValueError, match=said):
        stricter.under(world.options.model_copy(update=change))


def test_it_is_a_finder() -> None:
    world = World()
    finder: Finder = world.finder
    assert isinstance(finder, SimilarFinder)
    assert not finder.is_exact
    assert finder.plan_stop(world.find(world.arrive(world.words(50))), 0, 49) == 49
    warm_up(world.options)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 90)), max_size=5),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 90)), max_size=5),
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(0, 3),
)
def test_whatever_is_found_is_equal_and_alive(
    cached: list[tuple[int, int, int]],
    asked: list[tuple[int, int, int]],
    evicted: list[int],
    start: int,
) -> None:
    """`World.find` compares each piece with what its block holds, in the prompt's namespace."""
    world = World(
        64,
        window_tokens=24,
        stride_tokens=8,
        shingle_tokens=2,
        min_run_tokens=3,
        threshold=0.3,
        permutations=32,
    )
    documents = [world.records(wording(world, parts=12, tokens=6)) for _ in range(4)]

    def text(parts: list[tuple[int, int, int]]) -> list[int]:
        joined: list[int] = []
        for document, first, tokens in parts:
            joined += documents[document][first : first + tokens]
        return joined or [1]

    for i in range(2):
        world.cache(text(cached[i::2]), (world.mine, world.theirs)[i])
    prompt = world.arrive(text(asked))
    for block in evicted:
        world.donors.evicted([block])
    world.find(prompt, min(start * SIZE, prompt.tokens.size - 1))
