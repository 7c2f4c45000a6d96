# SPDX-License-Identifier: Apache-2.0
"""Where a prompt departs from an earlier one."""

import numpy as np
import pytest

from segreuse_extras.explain import edits
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
    longer = edit(index, SYSTEM + text(9, 1.5) + TURN[SIZE:] + MORE + [7], len(SYSTEM))
    assert longer == Edit(len(SYSTEM), SIZE, round(1.5 * SIZE), count - SIZE)


def test_text_that_is_replaced_by_as_many_tokens_is_an_edit() -> None:
    """As another date is: what is behind it stands where it stood."""
    index = index_of(SYSTEM + TURN + MORE)
    count = (len(SYSTEM + TURN + MORE) // SIZE) * SIZE - len(SYSTEM)
    whole = edit(index, SYSTEM + text(9, 1) + TURN[SIZE:] + MORE + [7], len(SYSTEM))
    assert whole == Edit(len(SYSTEM), SIZE, SIZE, count - SIZE)
    within = SYSTEM + TURN[:1] + [8] + TURN[2:] + MORE + [7]
    assert edit(index, within, len(SYSTEM)) == Edit(len(SYSTEM) + 1, 1, 1, count - 2)


def test_an_edit_begins_at_its_first_token() -> None:
    index = index_of(SYSTEM + TURN + MORE)
    for odd in range(SIZE + 1):
        prompt = SYSTEM + TURN[:odd] + text(9, 1) + TURN[odd:] + MORE + [7]
        found = edit(index, prompt, len(SYSTEM))
        assert found is not None
        assert found.at == len(SYSTEM) + odd
        assert found.new_tokens - found.gone_tokens == SIZE


def test_what_vllm_has_not_hit_and_is_there_all_the_same_is_no_edit() -> None:
    index = index_of(SYSTEM + TURN + MORE)
    prompt = SYSTEM + TURN + MORE + [7]
    assert edit(index, prompt, 0) is None
    assert edit(index, prompt, len(SYSTEM)) is None
    pieces = ContentFinder(index, 4).find(prompt_of(prompt), len(SYSTEM), len(prompt) - 1).pieces
    behind = pieces.where(pieces.destination >= len(SYSTEM + TURN))
    assert len(behind)
    assert edit_of(index, prompt_of(prompt), behind, len(SYSTEM)) is None


def test_restored_text_in_front_of_an_edit_is_not_gone() -> None:
    """A finder searches behind what is restored: it is in no piece."""
    index = index_of(SYSTEM + TURN + THOUGHT + MORE)
    prompt = SYSTEM + TURN + MORE + [7]
    stop = len(prompt) - 1
    pieces = ContentFinder(index, 4).find(prompt_of(prompt), len(SYSTEM + TURN), stop).pieces
    found = edit_of(index, prompt_of(prompt), pieces, len(SYSTEM))
    assert found is not None
    assert found[:3] == (len(SYSTEM + TURN), len(THOUGHT), 0)


def test_text_that_stayed_behind_restored_text_is_no_edit_but_what_follows_it_may_be() -> None:
    index = index_of(SYSTEM + TURN + THOUGHT + MORE)
    prompt = prompt_of(SYSTEM + TURN + MORE + [7])
    stop = len(prompt.tokens) - 1
    pieces = ContentFinder(index, 4).find(prompt, len(SYSTEM) + SIZE, stop).pieces
    assert pieces.destination[0] == pieces.position[0] == len(SYSTEM) + SIZE
    found = edit_of(index, prompt, pieces, len(SYSTEM))
    assert found is not None
    assert found[:3] == (len(SYSTEM + TURN), len(THOUGHT), 0)


def test_known_text_of_elsewhere_is_new_where_it_stands_now() -> None:
    index = index_of(SYSTEM + THOUGHT + TURN + MORE, text(8, 2))
    found = edit(index, SYSTEM + text(8, 2) + TURN + MORE + [7], len(SYSTEM))
    assert found is not None
    assert found[:3] == (len(SYSTEM), len(THOUGHT), 2 * SIZE)
    assert found.found_tokens >= len(TURN)


def test_text_in_another_order_is_gone_where_it_stood() -> None:
    index = index_of(SYSTEM + text(5, 2) + text(6, 3) + TURN)
    found = edit(index, SYSTEM + text(6, 3) + text(5, 2) + TURN + [7], len(SYSTEM))
    assert found == Edit(len(SYSTEM), 2 * SIZE, 0, len(text(5, 2) + text(6, 3) + TURN))


def test_a_template_that_all_prompts_begin_with_is_no_earlier_prompt() -> None:
    index = index_of(SYSTEM + TURN + MORE)
    first = SYSTEM[: SIZE - 1]
    assert edit(index, [*first, 8, *SYSTEM[SIZE:], *TURN, *MORE, 7], 0) is None


def test_so_many_segments_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [text(20 + i, 1) for i in range(4)]
    index = index_of(SYSTEM + THOUGHT + TURN + MORE, *others)
    prompt = SYSTEM + [t for other in others for t in other] + TURN + MORE + [7]
    assert edit(index, prompt, len(SYSTEM)) is not None
    monkeypatch.setattr(edits, "_MOST_SEGMENTS", 4)
    assert edit(index, prompt, len(SYSTEM)) is None


def test_a_document_from_elsewhere_is_no_edit() -> None:
    index = index_of(SYSTEM + text(8, 3), text(6, 2) + TURN)
    assert edit(index, SYSTEM + TURN + [7], len(SYSTEM)) is None
    assert edit(index, THOUGHT + TURN + [7], 0) is None
    assert edit(index, [*SYSTEM, 7], len(SYSTEM)) is None


def test_behind_evicted_blocks_nothing_is_known() -> None:
    index = index_of(SYSTEM + THOUGHT + TURN + MORE)
    index.remove([len(SYSTEM) // SIZE])
    assert edit(index, SYSTEM + TURN + MORE + [7], len(SYSTEM)) is None


def test_of_moved_text_whose_blocks_are_in_no_index_nothing_is_known() -> None:
    index = index_of(SYSTEM + THOUGHT + TURN + MORE)
    prompt = prompt_of(SYSTEM + TURN + MORE + [7])
    pieces = ContentFinder(index, 4).find(prompt, len(SYSTEM), len(prompt.tokens) - 1).pieces
    assert edit_of(index, prompt, pieces, len(SYSTEM)) is not None
    index.remove([int(pieces.block[0])])
    assert edit_of(index, prompt, pieces, len(SYSTEM)) is None


def test_text_that_stood_in_front_of_what_stays_is_no_edit() -> None:
    """It is there once more: nothing was taken out in front of it."""
    index = index_of(SYSTEM + TURN + MORE)
    prompt = SYSTEM + TURN + text(9, 1) + SYSTEM + [7]
    assert edit(index, prompt, len(SYSTEM + TURN)) is None


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
