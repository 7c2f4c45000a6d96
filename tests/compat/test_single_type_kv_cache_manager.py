# SPDX-License-Identifier: Apache-2.0
"""Layers with a window get blocks for all that a plan supplies, for the time of one step."""

from typing import Any

import pytest
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from bench.integrity import check_integrity
from tests.compat.managed import OPTIONS, SIZE, Managed, ids
from vllm_segreuse.compat import single_type_kv_cache_manager

WINDOW = 2 * SIZE
TOKENS = [*range(100, 100 + 8 * SIZE)]


class Hybrid(Managed):
    """Of two groups: one with a window, then one that keeps all blocks."""

    def __init__(self, num_blocks: int = 64) -> None:
        super().__init__(num_blocks, windows=(WINDOW,))

    def tables(self, request: Any) -> tuple[list[int], ...]:
        """A request's blocks, by group."""
        return self.manager.get_block_ids(request.request_id)

    def supplied(self, request: Any, tokens: int, new: int = 1) -> Any:
        """Blocks for a request of which a plan supplies so many tokens."""
        return self.manager.allocate_slots(request, new, num_external_computed_tokens=tokens)

    def prefilled(self, tokens: list[int], options: Any = OPTIONS) -> Any:
        """A request that computes its prompt in one step, and has not ended."""
        request = self.request(tokens, options)
        assert self.manager.allocate_slots(request, len(tokens)) is not None
        request.num_computed_tokens = len(tokens)
        self.side.take_step(True)
        return request

    def ends(self, request: Any) -> None:
        """It frees what it holds."""
        self.side.finished(request, self.tables(request)[1])
        self.manager.free(request)
        self.side.take_step(True)

    def check_whole(self) -> None:
        """No block is held, and no donor lacks one."""
        assert self.pool.num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        assert not self.pool.pinned
        check_integrity(self.pool.siblings)
        indexed = [block for block in range(self.pool.num_gpu_blocks) if block in self.index]
        assert self.pool.are_whole(indexed).all()


@pytest.fixture
def hybrid() -> Hybrid:
    return Hybrid()


def test_windows_have_blocks_for_all_that_a_plan_supplies(hybrid: Hybrid) -> None:
    request = hybrid.request(TOKENS)
    assert hybrid.supplied(request, len(TOKENS) - 1) is not None
    windowed, whole = hybrid.tables(request)
    assert len(windowed) == len(whole) == 8
    assert 0 not in windowed, "a pass computes tokens anywhere"
    assert not {*windowed} & {*whole}


def test_the_next_step_frees_what_a_window_has_passed(hybrid: Hybrid) -> None:
    request = hybrid.request(TOKENS)
    assert hybrid.supplied(request, len(TOKENS) - 1) is not None
    free = hybrid.pool.num_free_blocks()
    hybrid.side.take_step(True)
    request.num_computed_tokens = len(TOKENS)
    request.append_output_token_ids([1])
    assert hybrid.manager.allocate_slots(request, 1) is not None
    windowed, whole = hybrid.tables(request)
    assert windowed[:6] == [0] * 6
    assert 0 not in whole
    assert hybrid.pool.num_free_blocks() == free + 6 - 2
    hybrid.ends(request)
    hybrid.check_whole()


def test_without_a_plan_windows_are_vllms_own(hybrid: Hybrid) -> None:
    request = hybrid.prefilled(TOKENS, None)
    assert hybrid.pool.window_end is None
    request.append_output_token_ids([1])
    assert hybrid.manager.allocate_slots(request, 1) is not None
    assert hybrid.tables(request)[0][:6] == [0] * 6
    hybrid.ends(request)
    hybrid.check_whole()


def test_an_allocation_that_fails_leaves_windows_as_they_were(hybrid: Hybrid) -> None:
    hybrid.hold_all_but(9)
    request = hybrid.request(TOKENS)
    assert hybrid.supplied(request, len(TOKENS) - 1) is None
    assert hybrid.pool.window_end is None
    assert hybrid.tables(request) == ([], [])


def test_installing_twice_changes_nothing() -> None:
    single_type_kv_cache_manager.install()
    once = SlidingWindowManager.get_num_skipped_tokens
    single_type_kv_cache_manager.install()
    assert SlidingWindowManager.get_num_skipped_tokens is once


def test_donors_are_pinned_and_released_with_their_windows(hybrid: Hybrid) -> None:
    request = hybrid.prefilled(TOKENS)
    whole = hybrid.tables(request)[1]
    windowed = hybrid.tables(request)[0]
    hybrid.ends(request)
    free = hybrid.pool.num_free_blocks()
    assert hybrid.pool.idle(whole[:2]) == {*whole[:2], *windowed[:2]}
    hybrid.pool.pin(whole[:2])
    hybrid.pool.pin(whole[:1])
    assert hybrid.pool.num_free_blocks() == free - 4
    assert hybrid.pool.idle(whole[:3]) == {whole[2], windowed[2]}
    hybrid.pool.evict_blocks({windowed[0]})  # its name; it is still held
    hybrid.pool.unpin(whole[:2])
    hybrid.pool.unpin(whole[:1])
    hybrid.check_whole()


def test_donors_last_as_long_as_all_of_their_blocks(hybrid: Hybrid) -> None:
    """Whoever takes a windowed block ends the donations of the block beside it."""
    request = hybrid.prefilled(TOKENS)
    windowed, whole = hybrid.tables(request)
    hybrid.ends(request)
    assert all(block in hybrid.index for block in whole)
    taken = hybrid.hold_all_but(11)  # of the sixteen blocks, those freed first
    lost = {*ids(taken)}
    for one, other in zip(whole, windowed, strict=True):
        assert (one in hybrid.index) == (one not in lost and other not in lost)
    assert 0 < sum(block in hybrid.index for block in whole) < 8
    hybrid.pool.free_blocks(taken)
    hybrid.check_whole()


def test_blocks_of_windows_are_evicted_in_their_turn(hybrid: Hybrid) -> None:
    """vLLM names few of them, and takes nameless ones first."""
    document = hybrid.prefilled(TOKENS)
    windowed, whole = hybrid.tables(document)
    document.append_output_token_ids([1])
    assert hybrid.manager.allocate_slots(document, 1) is not None  # most of them are freed
    others = hybrid.hold_all_but(hybrid.pool.num_free_blocks() - 20)
    assert all(block in hybrid.index for block in whole)
    assert not {*windowed} & {*ids(others)}
    hybrid.pool.free_blocks(others)
    hybrid.ends(document)
    hybrid.check_whole()


def test_a_block_freed_without_a_name_ends_the_donation_too(hybrid: Hybrid) -> None:
    """Of a request without extra keys vLLM's mask leaves most windowed blocks nameless."""
    request = hybrid.prefilled(TOKENS, None)
    windowed, whole = hybrid.tables(request)
    assert hybrid.pool.are_whole(whole).all()
    hybrid.ends(request)
    taken = hybrid.hold_all_but(hybrid.pool.num_free_blocks() - 3)
    assert {*ids(taken)} <= {*windowed}
    assert hybrid.pool.are_whole(whole).sum() == 5
    hybrid.pool.free_blocks(taken)
    hybrid.check_whole()


def test_what_a_request_needs_is_counted_in_all_groups(hybrid: Hybrid) -> None:
    """A prefix hit counts once in the one group, and by its window in the other."""
    first = hybrid.prefilled(TOKENS)
    hybrid.ends(first)
    again = hybrid.request([*TOKENS[: 6 * SIZE], *range(3 * SIZE)])
    blocks, hit, _ = hybrid.manager.get_computed_blocks(again)
    assert hit == 6 * SIZE
    state = hybrid.pool.prefix_state(again, hit, 10 * SIZE, 0)
    before = hybrid.pool.num_free_blocks()
    given = hybrid.manager.allocate_slots(
        again, 1, hit, blocks, num_external_computed_tokens=4 * SIZE - 1
    )
    assert given is not None
    assert before - hybrid.pool.num_free_blocks() == state.blocks_needed
    hybrid.ends(again)
    hybrid.check_whole()


def test_exact_blocks_without_their_windows_are_not_copied(hybrid: Hybrid) -> None:
    request = hybrid.prefilled(TOKENS)
    windowed, whole = hybrid.tables(request)
    hybrid.ends(request)
    again = hybrid.request(TOKENS)
    assert hybrid.pool.resident_blocks(again, 0, 8).tolist() == whole
    hybrid.pool.evict_blocks({windowed[3]})
    expected = [*whole[:3], -1, *whole[4:]]
    assert hybrid.pool.resident_blocks(again, 0, 8).tolist() == expected


def test_a_prefix_hit_donates_what_is_whole_of_it(hybrid: Hybrid) -> None:
    """Whoever computed it: of requests without extra keys windows go first."""
    first = hybrid.prefilled(TOKENS, None)
    whole = hybrid.tables(first)[1]
    hybrid.ends(first)
    taken = hybrid.hold_all_but(hybrid.pool.num_free_blocks() - 3)
    assert len(hybrid.index) == 0
    again = hybrid.request([*TOKENS, 1, 2, 3, 4])
    blocks, hit, _ = hybrid.manager.get_computed_blocks(again)
    assert hit == len(TOKENS) - SIZE, "where the same prompt would go on"
    assert hybrid.manager.allocate_slots(again, SIZE + 4, hit, blocks) is not None
    tables = hybrid.tables(again)
    hybrid.side.match(again, hit)
    hybrid.side.allocated(again, tables[1], [tables[0]])
    are_whole = hybrid.pool.are_whole(whole[:7]).tolist()
    assert {*are_whole} == {True, False}
    assert [block in hybrid.index for block in whole[:7]] == are_whole
    hybrid.pool.free_blocks(taken)
    hybrid.side.take_step(True)
    hybrid.ends(again)
    hybrid.check_whole()
