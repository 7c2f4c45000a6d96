# SPDX-License-Identifier: Apache-2.0
"""Where a prompt departs from an earlier one."""

import numpy as np
import pytest

from segreuse_extras.explain.edits import Edit, edit_of
from segreuse_extras.viewer.words import verdict
from tests.cache.test_contexts import prompt_of
from tests.cache.test_planner import SIZE
from tests.cache.test_same_context import MORE, SYSTEM, THOUGHT, TURN, index_of, text
from tests.explain.reports import REPORT
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import SegmentIndex


def edit(index: SegmentIndex, tokens: list[int], start: int) -> Edit | None:
    prompt = prompt_of(tokens)
    found = ContentFinder(index, 4).find(prompt, start, len(tokens) - 1)
    return edit_of(index, prompt, found.pieces, start)


def test_dropped_text_is_gone_and_what_is_behind_it_is_found() -> None:
    index = index_of(SYSTEM + THOUGHT + TURN + MORE)
    found = edit(index, SYSTEM + TURN + MORE + [7], len(SYSTEM))
    last = (len(SYSTEM + THOUGHT + TURN + MORE) // SIZE) * SIZE - len(SYSTEM + THOUGHT)
    assert found == Edit(len(SYSTEM), len(THOUGHT), 0, last)


def test_inserted_and_replaced_text_is_new() -> None:
    index = index_of(SYSTEM + TURN + MORE)
    count = (len(SYSTEM + TURN + MORE) // SIZE) * SIZE - len(SYSTEM)
    inserted = SYSTEM + THOUGHT + TURN + MORE + [7]
    assert edit(index, inserted, len(SYSTEM)) == Edit(len(SYSTEM), 0, len(THOUGHT), count)
    replaced = edit(index, SYSTEM + text(9, 1) + TURN[SIZE:] + MORE + [7], len(SYSTEM))
    assert replaced is None, "what is behind it stands where it stood"
    longer = edit(index, SYSTEM + text(9, 1.5) + TURN[SIZE:] + MORE + [7], len(SYSTEM))
    assert longer == Edit(len(SYSTEM), SIZE, round(1.5 * SIZE), count - SIZE)


def test_tokens_that_are_equal_within_a_block_are_in_front_of_the_edit() -> None:
    index = index_of(SYSTEM + TURN + MORE)
    odd = SIZE // 2
    found = edit(index, SYSTEM + TURN[:odd] + text(9, 1) + TURN[odd:] + MORE + [7], len(SYSTEM))
    assert found is not None
    assert found.at in (len(SYSTEM), len(SYSTEM) + odd)
    assert found.gone_tokens - found.new_tokens == -SIZE


def test_a_document_from_elsewhere_is_no_edit() -> None:
    index = index_of(SYSTEM + text(8, 3), text(6, 2) + TURN)
    assert edit(index, SYSTEM + TURN + [7], len(SYSTEM)) is None
    assert edit(index, THOUGHT + TURN + [7], 0) is None
    assert edit(index, [*SYSTEM, 7], len(SYSTEM)) is None


def test_behind_evicted_blocks_nothing_is_known() -> None:
    index = index_of(SYSTEM + THOUGHT + TURN + MORE)
    index.remove([len(SYSTEM) // SIZE])
    assert edit(index, SYSTEM + TURN + MORE + [7], len(SYSTEM)) is None


@pytest.mark.parametrize("start", [0, 1, 4])
def test_without_pieces_there_is_no_edit(start: int) -> None:
    index = SegmentIndex(4, SIZE)
    assert edit(index, [*range(9)], start) is None
    assert np.count_nonzero(index.nodes["born"]) == 0


def test_it_is_said_in_words() -> None:
    said = verdict(REPORT | {"edit": Edit(640, 512, 40, 5900)._asdict()})
    assert said.startswith(verdict(REPORT))
    assert said.endswith(
        " The prompt departs from an earlier one at token 640: 512 tokens that stood there are "
        "gone, 40 are new, and 5,900 behind them were found again."
    )
