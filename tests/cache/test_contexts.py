# SPDX-License-Identifier: Apache-2.0
"""Reused text whose context has not changed: what it is, and what a conversation costs with it."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.test_planner import MAX_DEPTH, SIZE, World, new_only
from vllm_segreuse.cache.contexts import NOTHING, UNKNOWN, compared, contexts_of, known_until
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import BlockFacts, SegmentIndex
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.compat.block_events import NamedBlocks
from vllm_segreuse.plan import Halo, IntArray, Pieces, Recipe
from vllm_segreuse.scheduling.plan_maker import least_work
from vllm_segreuse.scheduling.tracked import TrackedRequest

NAMESPACE = 0


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    """Chained, as vLLM's are."""
    hashes, last = [], b""
    for stop in range(SIZE, len(tokens) + 1, SIZE):
        last = sha256(last + np.array(tokens[stop - SIZE : stop], np.int64).tobytes()).digest()
        hashes.append(last)
    return hashes


def prompt_of(tokens: Sequence[int]) -> Prompt:
    hashes = hashes_of(tokens)
    prompt = Prompt(NAMESPACE, np.array(tokens, np.int32))
    prompt.contexts = lambda blocks: contexts_of(hashes, blocks)
    return prompt


def insert(index: SegmentIndex, tokens: Sequence[int], blocks: list[int], depth: int = 0) -> None:
    """Full blocks of a sequence donate."""
    known = np.arange(len(blocks), dtype=np.int32)
    content = np.array(tokens[: len(blocks) * SIZE], np.int32)
    contexts = prompt_of(tokens).contexts(known)
    ids = np.array(blocks, np.int32)
    index.insert(NAMESPACE, ids, content, 0, depths=depth, facts=BlockFacts(contexts=contexts))
    index.begin_step()


def found(index: SegmentIndex, tokens: Sequence[int], start: int = 0) -> dict[int, bool]:
    """Of each position that is reused, whether its context is the same."""
    prompt = prompt_of(tokens)
    pieces = ContentFinder(index, MAX_DEPTH).find(prompt, start, len(tokens) - 1).pieces
    rows = zip(pieces.rows(), pieces.in_context.tolist(), strict=True)
    return {row[0] + i: same for row, same in rows for i in range(row[1])}


def test_the_first_block_stands_behind_nothing_and_others_behind_a_chain_of_hashes() -> None:
    hashes = hashes_of([*range(3 * SIZE)])
    contexts = contexts_of(hashes, np.array([0, 1, 2, 3, 4, 1], np.int32))
    assert contexts[0] == NOTHING
    assert contexts[4] == UNKNOWN
    assert contexts[1] == contexts[5]
    assert len(set(contexts.tolist())) == 5
    other = contexts_of(hashes_of([99, *range(1, 3 * SIZE)]), np.array([1, 2], np.int32))
    assert not set(other.tolist()) & set(contexts.tolist()), "the first token is part of all"


def test_all_of_a_hash_names_a_context() -> None:
    """Two hashes of which 64 bits are equal can be found."""
    hashes = [bytes(24) + b"%08d" % i for i in range(9)] + [
        b"%08d" % i + bytes(24) for i in range(9)
    ]
    contexts = contexts_of(hashes, np.arange(1, 19, dtype=np.int32))
    assert len(set(contexts.tolist())) == 18


@pytest.mark.parametrize(("stop", "known"), [(0, 1), (SIZE - 1, 1), (SIZE, 2), (9 * SIZE, 4)])
def test_a_context_that_reaches_behind_a_document_is_not_known(stop: int, known: int) -> None:
    prompt, blocks = prompt_of([*range(4 * SIZE)]), np.arange(4, dtype=np.int32)
    found = known_until(prompt.contexts, stop, SIZE)(blocks)
    assert found.dtype == np.uint64
    assert found[:known].tolist() == prompt.contexts(blocks)[:known].tolist()
    assert (found[known:] == UNKNOWN).all()


@given(
    donors=st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), max_size=4),
    wanted=st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    new=st.booleans(),
)
def test_context_is_the_same_where_all_in_front_is(
    donors: list[list[str]], wanted: list[str], new: bool
) -> None:
    """Of blocks a, b and c in any order: those that begin as a donor's sequence does."""
    text = {name: [10 * i + j for j in range(SIZE)] for i, name in enumerate("abc", 1)}
    index, blocks = SegmentIndex(64, SIZE), iter(range(64))
    sequences = [[token for name in names for token in text[name]] for names in donors]
    for sequence in sequences:
        insert(index, sequence, [next(blocks) for _ in range(len(sequence) // SIZE)])
    prompt = [token for name in wanted for token in text[name]] + ([7] if new else [])
    for position, same in found(index, prompt).items():
        block = position // SIZE
        behind, through = prompt[: block * SIZE], prompt[: position + 1]
        continues = any(sequence[: len(through)] == through for sequence in sequences)
        assert same == continues, (position, behind)


def test_text_that_has_moved_is_in_another_context() -> None:
    index = SegmentIndex(16, SIZE)
    text = [*range(1, 3 * SIZE + 1)]
    insert(index, text, [3, 4, 5])
    assert set(found(index, [50] * SIZE + text).values()) == {False}
    assert set(found(index, [*text, 50]).values()) == {True}
    assert set(found(index, [*text, 50], start=SIZE).values()) == {True}


def test_a_donor_of_which_no_context_is_known_is_in_another() -> None:
    index = SegmentIndex(16, SIZE)
    text = [*range(1, 2 * SIZE + 1)]
    insert(index, text, [3, 4])
    ids = np.array([3, 4], np.int32)
    index.insert(NAMESPACE, ids, np.array(text, np.int32), 0)
    assert set(found(index, [*text, 50]).values()) == {False}
    unknown = Prompt(NAMESPACE, np.array([*text, 50], np.int32))
    matches = ContentFinder(index, MAX_DEPTH).find(unknown, 0, 2 * SIZE)
    assert not compared(matches, index, unknown).pieces.in_context.any()


class Conversation:
    """Turns of one user, each with the documents of a first one in front, moved."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.blocks = iter(range(100, 240))
        document, _ = world.document(2)
        world.end_step()
        self.history = [*world.new_tokens(SIZE), *document]

    def turn(self, **fields: Any) -> TrackedRequest:
        """Ask with new text behind the history; the answer's blocks and the prompt's donate."""
        self.history += self.world.new_tokens(2 * SIZE)
        hashes = hashes_of(self.history)
        tracked = self.world.request(self.history, make_recipe=new_only, **fields)
        tracked.prompt.contexts = lambda blocks: contexts_of(hashes, blocks)
        self.world.admit(tracked, start=0)
        self.world.end_step()
        ids = [next(self.blocks) for _ in range(len(self.history) // SIZE)]
        self.world.donors.named(NamedBlocks(tracked.request_id, 0, ids, -1, self.history))
        self.world.end_step()
        return tracked

    def in_context(self, tracked: TrackedRequest) -> IntArray:
        assert tracked.plan is not None
        pieces = tracked.plan.pieces
        return np.unique(pieces.destination[pieces.in_context] // SIZE)


def test_a_conversation_stays_as_deep_as_its_first_turn(world: World) -> None:
    """More turns than `max_provenance_depth`: all but what is moved goes on being found."""
    conversation = Conversation(world)
    for turn in range(3 * MAX_DEPTH):
        tracked = conversation.turn()
        assert tracked.plan is not None
        assert tracked.plan.donor_depth == 0
        own = [0, *range(3, 3 + 2 * turn)] if turn else []
        # vLLM computes the last token of the prompt itself, so its block is not wholly reused.
        assert conversation.in_context(tracked).tolist() == own
        assert tracked.plan.num_reused == (2 + len(own)) * SIZE


def test_what_is_moved_once_more_is_one_deeper(world: World) -> None:
    conversation = Conversation(world)
    conversation.turn()
    answer = conversation.history[3 * SIZE :]
    tracked = world.request(world.new_tokens(SIZE) + answer + world.new_tokens(1))
    world.admit(tracked)
    assert tracked.plan is not None
    assert (tracked.plan.donor_depth, tracked.plan.num_reused) == (1, len(answer))


@pytest.fixture
def world() -> World:
    return World()


def the_new(recipe: Recipe) -> int:
    """Work as it is: what is reused is not computed."""
    return int(recipe.always.sum())


def the_reused(recipe: Recipe) -> int:
    """A policy that has more work with what it reuses than with new text."""
    return int((~recipe.always).sum())


@pytest.mark.parametrize(
    ("work", "document"), [(None, 2), (the_new, 2), (the_reused, 0), (lambda _: 1, 0)]
)
def test_what_is_less_work_to_compute_is_left_out_beside_the_own_history(
    world: World, work: Callable[[Recipe], int] | None, document: int
) -> None:
    conversation = Conversation(world)
    first = conversation.turn(work=work)
    assert first.plan is not None
    assert first.plan.num_reused == 2 * SIZE, "there is nothing else"
    tracked = conversation.turn(work=work)
    assert tracked.plan is not None
    assert conversation.in_context(tracked).tolist() == [0, 3, 4]
    assert tracked.plan.num_reused == (3 + document) * SIZE
    assert tracked.plan.pieces.in_context.all() == (document == 0)
    assert tracked.decision.num_segments == (2 if document == 0 else 3)
    assert set(tracked.plan.donor_blocks) == set(tracked.plan.pieces.block.tolist())
    assert world.pins.blocks == []


@pytest.mark.parametrize(("halo", "saved"), [(3, True), (4, False)])
def test_halos_are_work_beside_that_of_the_policy(halo: int, saved: bool) -> None:
    """Of ten similar segments of four tokens nothing is left by a halo of four."""
    table = [[10 * i, 4, i, 0, 100 + 20 * i] for i in range(10)]
    found = Pieces.from_table(table, is_similar=True)
    asked = new_only, the_new, found, 0, 100, 0.0, Halo(halo)
    pieces, recipe = least_work(*asked)
    assert pieces is found
    assert (recipe is not None) is saved
    turns = new_only, the_new, found, 0, 100, 0.05
    assert least_work(*turns, Halo(0))[1] is not None
    assert least_work(*turns, Halo(3))[1] is not None
    assert least_work(*turns[:-1], 3.0, Halo(3))[1] is not None, "new text is all that turns lose"


def test_where_reuse_saves_nothing_the_own_history_is_computed_too(world: World) -> None:
    """Computed in full, its blocks have exact names, which the next turn finds as its prefix."""
    conversation = Conversation(world)
    conversation.turn()

    def choosy(reused: Any, segments: Any) -> Recipe | None:
        return new_only(reused, segments) if segments.in_context.all() else None

    conversation.history += world.new_tokens(2 * SIZE)
    hashes = hashes_of(conversation.history)
    tracked = world.request(conversation.history, make_recipe=choosy, work=the_new)
    tracked.prompt.contexts = lambda blocks: contexts_of(hashes, blocks)
    world.admit(tracked, start=0)
    assert tracked.plan is None
    assert tracked.decision.reason == "nothing_saved"


def written(names: str) -> list[int]:
    """A block of text for each letter."""
    return [100 * ord(name) + i for name in names for i in range(SIZE)]


@pytest.mark.parametrize(
    ("donor", "prompt", "kept"),
    [
        ("Stabc", "Sabc.", [0, 1, 2, 3]),  # a thought is dropped
        ("Stauvbc", "Sabc.", [0, 1, 2, 3]),  # two of them, the second a longer one
        ("Sabc", "Snabc.", [0, 1, 2, 3]),  # new text in front
        ("Sabcd", "Scdab.", [0, 1, 2, 1, 2]),  # another order: c is not what a was read behind
        ("Sabab", "Sab.", [0, 1, 2]),
        ("Dabc", "Sabc.", [0, 1, 2]),  # another beginning
        ("abc", "Sabc.", [0, 1, 2]),
    ],
)
def test_as_much_of_a_context_is_kept(donor: str, prompt: str, kept: list[int]) -> None:
    index = SegmentIndex(16, SIZE)
    insert(index, written(donor), [*range(len(donor))])
    asked = prompt_of(written(prompt))
    stop = len(asked.tokens) - 1
    pieces = ContentFinder(index, MAX_DEPTH).find(asked, 0, stop).pieces
    assert (pieces.kept // SIZE).tolist() == kept
    changed = pieces.segments(0).changed
    first = np.flatnonzero(pieces.starts)
    ends = [*first[1:], len(pieces)]
    for share, one, end in zip(changed, first, ends, strict=True):
        tokens = np.arange(pieces.length[one:end].sum()) + 0.5
        both = pieces.position[one] + pieces.destination[one]
        only = 0 if pieces.in_context[one] else both - 2 * pieces.kept[one]
        began = pieces.position[one] == 0 < pieces.destination[one]
        expected = 1 if began else np.mean(only / (both + 2 * tokens))
        assert share == pytest.approx(expected, rel=1e-2)
        assert 0 <= share <= 1


def test_little_in_front_of_much_text_changes_little() -> None:
    index = SegmentIndex(16, SIZE)
    insert(index, written("Dabcdefghijkl"), [*range(13)])
    changed = {}
    for prompt in ("Sabcdefghijkl.", "Sabc."):
        asked = prompt_of(written(prompt))
        pieces = ContentFinder(index, MAX_DEPTH).find(asked, 0, len(asked.tokens) - 1).pieces
        (changed[prompt],) = pieces.segments(0).changed
    assert changed["Sabcdefghijkl."] < 0.6 * changed["Sabc."] < 0.4


@pytest.mark.parametrize(
    ("donor", "gone", "kept"),
    [("STabc", 0, [1, 2, 3]), ("STabc", 1, [0, 1, 2]), ("STaybc", 3, [2, 0, 1])],
)
def test_what_is_in_front_of_an_evicted_block_is_not_known_to_be_kept(
    donor: str, gone: int, kept: list[int]
) -> None:
    index = SegmentIndex(16, SIZE)
    insert(index, written(donor), [*range(len(donor))])
    index.remove([gone])
    asked = prompt_of(written("STnabc."))
    pieces = ContentFinder(index, MAX_DEPTH).find(asked, 0, len(asked.tokens)).pieces
    assert (pieces.kept // SIZE).tolist()[-3:] == kept


@given(
    donor=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=9, unique=True),
    prompt=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=9),
)
def test_kept_text_is_in_front_on_both_sides(donor: list[str], prompt: list[str]) -> None:
    index = SegmentIndex(16, SIZE)
    insert(index, written("".join(donor)), [*range(len(donor))])
    asked = prompt_of(written("".join(prompt)))
    pieces = ContentFinder(index, MAX_DEPTH).find(asked, 0, len(asked.tokens)).pieces
    for row, kept in zip(pieces.rows(), (pieces.kept // SIZE).tolist(), strict=True):
        there, here = donor[: row[4] // SIZE], prompt[: row[0] // SIZE]
        assert kept <= len({*there} & {*here})
        common = next(
            (i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), len(there)
        )
        assert kept >= min(common, len(here))
