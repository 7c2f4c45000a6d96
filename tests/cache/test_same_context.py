# SPDX-License-Identifier: Apache-2.0
"""With `context=same`, no reused token was computed behind text that is not in front of it."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segreuse_extras.context.finder import SameContextFinder, same_context
from tests.cache.test_contexts import NAMESPACE, hashes_of, insert, prompt_of
from tests.cache.test_planner import SIZE
from vllm_segreuse.cache.contexts import contexts_of
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import BlockFacts, SegmentIndex
from vllm_segreuse.plan import Pieces

BLOCKS = 64
DEEPEST = 4


def text(name: int, blocks: float) -> list[int]:
    """Tokens that are nowhere else."""
    return [*range(name * 1000, name * 1000 + round(blocks * SIZE))]


SYSTEM, THOUGHT, TURN, MORE = text(1, 2), text(2, 1.5), text(3, 4), text(4, 3.5)


def index_of(*sequences: Sequence[int], depth: int = 0) -> SegmentIndex:
    """An index in which these sequences donate, one after the other."""
    index, first = SegmentIndex(BLOCKS, SIZE), 0
    for tokens in sequences:
        count = len(tokens) // SIZE
        insert(index, tokens, [*range(first, first + count)], depth)
        first += count
    return index


def found(
    index: SegmentIndex, tokens: Sequence[int], start: int = 0, deepest: int = DEEPEST
) -> tuple[list[int], int]:
    """Tokens that are reused, and how many are refused."""
    finder = SameContextFinder(ContentFinder(index, deepest), index)
    pieces = finder.find(prompt_of(tokens), start, len(tokens) - 1).pieces
    where = [row[0] + i for row in pieces.rows() for i in range(row[1])]
    return [tokens[i] for i in where], finder.refused


def test_what_was_computed_behind_a_thought_is_refused_once_it_is_dropped() -> None:
    index = index_of(SYSTEM + THOUGHT + TURN + MORE)
    reused, refused = found(index, SYSTEM + TURN + MORE)
    assert reused == SYSTEM
    assert refused >= len(TURN)


def test_what_stands_behind_new_text_is_reused() -> None:
    index = index_of(SYSTEM + TURN + MORE)
    reused, refused = found(index, SYSTEM + THOUGHT + TURN + text(9, 2) + MORE + [7])
    whole = (len(SYSTEM + TURN + MORE) // SIZE) * SIZE
    assert reused == (SYSTEM + TURN + MORE)[:whole]
    assert refused == 0


def test_new_text_within_a_block_leaves_what_is_behind_it() -> None:
    donor = SYSTEM + TURN
    index = index_of(donor)
    for at in range(1, len(donor) - 1):
        reused, refused = found(index, [*donor[:at], 5, *donor[at:], 7])
        assert refused == 0
        # Fewer tokens than a block are found beside a whole one only.
        assert set(reused) <= set(donor)
        assert len(reused) >= len(donor) - SIZE
    reused, _ = found(index, [*donor[: SIZE // 2], 6, *donor[SIZE // 2 + 1 :], 7])
    assert reused == donor[: SIZE // 2] or not reused, "a token in the first block is gone"


def test_a_document_that_begins_its_own_sequence_is_reused_anywhere() -> None:
    index = index_of(TURN)
    assert found(index, THOUGHT + TURN + [7]) == (TURN, 0)


def test_another_order_is_another_context() -> None:
    index = index_of(SYSTEM + TURN + text(5, 2) + text(6, 2))
    reused, refused = found(index, SYSTEM + TURN + text(6, 2) + text(5, 2) + [7])
    # The fifth text was read behind the system and the turn, which are there; the sixth is not.
    assert reused == SYSTEM + TURN + text(5, 2)
    assert refused == len(text(6, 2))


def test_kv_that_was_computed_behind_reused_kv_is_refused() -> None:
    index = index_of(TURN, depth=1)
    assert found(index, THOUGHT + TURN + [7]) == ([], len(TURN))
    assert found(index, THOUGHT + TURN + [7], deepest=0) == ([], 0)


def test_behind_an_evicted_block_only_the_beginning_of_the_prompt_is_known() -> None:
    donor = TURN + MORE
    index = index_of(donor)
    index.remove([4])
    reused, refused = found(index, [*donor[: 4 * SIZE], 5, *donor[4 * SIZE :], 7])
    assert reused[: 4 * SIZE] == TURN
    assert set(reused[4 * SIZE :]) <= set(donor[4 * SIZE : 5 * SIZE])
    assert refused
    # In its place, its context has a name.
    assert donor[6 * SIZE] in found(index, [*donor, 7])[0]


def test_similar_pieces_are_refused() -> None:
    index = index_of(TURN)
    row = [[0, SIZE, 0, 0, 0]]
    prompt = prompt_of(TURN)
    assert same_context(index, prompt, Pieces.from_table(row)).all()
    assert not same_context(index, prompt, Pieces.from_table(row, is_similar=True)).any()


def test_another_donors_block_does_not_continue_a_sequence() -> None:
    """Equal positions do not make two blocks neighbours."""
    index = index_of(text(5, 1) + TURN, text(6, 1) + MORE)
    prompt = prompt_of(text(5, 1) + MORE + [7])
    second = 1 + len(TURN) // SIZE  # block of the second sequence's beginning
    rows = [[0, SIZE, 0, 0, 0], [SIZE, SIZE, second + 1, 0, SIZE]]
    assert same_context(index, prompt, Pieces.from_table(rows)).tolist() == [True, False]


def test_whoever_ends_there_does_not_stand_in_front_of_an_evicted_block() -> None:
    index = index_of(text(5, 1), text(6, 1) + MORE)
    index.remove([1])
    prompt = prompt_of(text(5, 1) + MORE + [7])
    rows = [[0, SIZE, 0, 0, 0], [SIZE, SIZE, 2, 0, SIZE]]
    assert same_context(index, prompt, Pieces.from_table(rows)).tolist() == [True, False]


SOME = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@given(SOME, SOME, st.integers(0, 3), st.integers(0, 2 * SIZE))
def test_nothing_is_reused_that_was_computed_behind_what_is_not_there(
    donor: list[int], prompt: list[int], odd: int, start: int
) -> None:
    """Of texts of 1.5 to 3 blocks, in any order, some of them more than once."""
    of = {name: text(name, 1.5 + 0.25 * name)[odd:] for name in range(1, 7)}
    sequence = [token for name in donor for token in of[name]][: BLOCKS * SIZE]
    tokens = [token for name in prompt for token in of[name]] + [7]
    index = SegmentIndex(BLOCKS, SIZE)
    count = len(sequence) // SIZE
    if count:
        contexts = contexts_of(hashes_of(sequence), np.arange(count, dtype=np.int32))
        content = np.array(sequence[: count * SIZE], np.int32)
        ids = np.arange(count, dtype=np.int32)
        index.insert(NAMESPACE, ids, content, 0, facts=BlockFacts(contexts=contexts))
        index.begin_step()
    start = min(start, len(tokens) - 1)
    finder = SameContextFinder(ContentFinder(index, DEEPEST), index)
    pieces = finder.find(prompt_of(tokens), start, len(tokens) - 1).pieces
    for destination, length, _, _, position in pieces.rows():
        for i in range(length):
            assert is_within(sequence[: position + i], tokens[: destination + i])


def is_within(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether tokens are in others, in their order."""
    rest = iter(whole)
    return all(token in rest for token in part)


@pytest.mark.parametrize("value", ["all", "", 1, None, ["same"], {}])
def test_other_values_are_refused(value: object) -> None:
    from vllm_segreuse.config import ConfigError, SegReuseConfig

    with pytest.raises(ConfigError, match=r"context=.* must be any or same"):
        SegReuseConfig.from_options({"context": value})
