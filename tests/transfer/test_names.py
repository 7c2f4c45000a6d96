# SPDX-License-Identifier: Apache-2.0
"""What a sender tells bounds exact names, and where nothing is told nothing is exact; donors stay
pinned until the step that reads them is over."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segreuse_extras.transfer.scheduler import (
    EXACT_UNTIL,
    DeferredPins,
    ReceivedNames,
    Transfers,
    told_until,
)
from vllm_segreuse.plan import TO_THE_END

PROMPT = 300


def request(name: str = "r", told: Any = None, computed: int = 0) -> Any:
    params = None if told is None else {EXACT_UNTIL: told}
    return SimpleNamespace(request_id=name, kv_transfer_params=params, num_computed_tokens=computed)


class Inner:
    """Names of what the engine computes."""

    def __init__(self, ends: dict[str, tuple[int, int]] | None = None) -> None:
        self.ends = ends or {}

    def exact_ends(self, request_id: str) -> tuple[int, int] | None:
        return self.ends.get(request_id)

    def restoration(self, request_id: str) -> int:
        return 7

    def exact_stop(self, request_id: str) -> int:
        return 8

    def left_behind(self, request_id: str, start: int, stop: int) -> list[int]:
        return [start, stop]

    def written_until(self, request_id: str) -> int:
        return 9

    def allocation_failed(self, request_id: str, blocks: int) -> None:
        self.failed = (request_id, blocks)


def naming(transfers: Transfers, ends: dict[str, tuple[int, int]] | None = None) -> Any:
    return transfers.naming(Inner(ends))


@pytest.mark.parametrize(
    "params",
    [None, {}, *({EXACT_UNTIL: it} for it in (None, "96", -1, 96.0, True, [96], {}, 0))],
    ids=str,
)
def test_what_is_no_number_of_tokens_tells_nothing(params: Any) -> None:
    assert told_until(params) == 0


def test_what_is_told_bounds_a_request_of_vllms_own() -> None:
    transfers = Transfers(overlaps=False)
    names = naming(transfers)
    transfers.receives(request(told=96), PROMPT, True)
    assert names.exact_ends("r") == (96, 96)
    assert names.exact_ends("other") is None


def test_all_is_exact_where_all_that_is_received_is() -> None:
    transfers = Transfers(overlaps=False)
    names = naming(transfers)
    transfers.receives(request(told=PROMPT), PROMPT, True)
    assert names.exact_ends("r") == (TO_THE_END, TO_THE_END)
    transfers.receives(request(told=PROMPT - 1), PROMPT, True)
    assert names.exact_ends("r") == (PROMPT - 1, PROMPT - 1)


def test_a_request_that_computes_after_all_is_not_bounded() -> None:
    transfers = Transfers(overlaps=False)
    names = naming(transfers)
    transfers.receives(request(), PROMPT, True)
    assert names.exact_ends("r") == (0, 0)
    transfers.computes(request())
    assert names.exact_ends("r") is None
    assert not transfers.is_received(request())


@given(
    told=st.integers(0, 400),
    known=st.integers(0, 400),
    more=st.integers(0, 400),
    stop=st.integers(1, 400),
)
def test_no_end_is_behind_what_either_says(told: int, known: int, more: int, stop: int) -> None:
    transfers = Transfers(overlaps=False)
    names = naming(transfers, {"r": (known, known + more)})
    transfers.receives(request(told=told), stop, True)
    bound = told if told < stop else TO_THE_END
    assert names.exact_ends("r") == (min(known, bound), min(known + more, bound))


def test_all_else_is_as_it_was() -> None:
    inner = Inner()
    names = ReceivedNames(inner, {"r": 0})
    assert (names.restoration("r"), names.exact_stop("r"), names.written_until("r")) == (7, 8, 9)
    assert names.left_behind("r", 1, 2) == [1, 2]
    names.allocation_failed("r", 3)
    assert inner.failed == ("r", 3)


@pytest.mark.parametrize(
    ("ends", "told", "expected"),
    [
        (None, None, PROMPT),  # of vLLM's own
        ((96, 96), None, 96),
        ((64, 96), None, 64),  # a restoration that was not reported
        ((TO_THE_END, TO_THE_END), None, PROMPT),
        ((TO_THE_END, TO_THE_END), 32, 32),  # received itself, and handed on
        (None, 32, 32),
    ],
)
def test_what_is_told_in_turn(ends: Any, told: Any, expected: int) -> None:
    transfers = Transfers(overlaps=False)
    naming(transfers, None if ends is None else {"r": ends})
    if told is not None:
        transfers.receives(request(told=told), PROMPT, True)
    assert transfers.exact_until(request(computed=PROMPT)) == expected


def test_blocks_that_are_read_or_written_are_held_until_that_has_ended() -> None:
    transfers = Transfers(overlaps=False)
    transfers.loads(request("a"))
    transfers.sends(request("b"))
    assert [transfers.holds(name) for name in "abc"] == [True, True, False]
    assert transfers.loading({"a", "b", "c"}) == {"a"}
    ending: Any = SimpleNamespace(request=request("a"))
    transfers.finished(ending)
    assert transfers.holds("a"), "it is still written although its request was aborted"
    transfers.ended({"a"}, ())
    transfers.ended((), {"b"})
    assert not transfers.holds("a")
    assert not transfers.holds("b")
    assert transfers.status() == {"transfers": {"loading": 0, "sending": 0}}


class Pool:
    """Counts what is held."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def pin(self, block_ids: list[int]) -> None:
        self.held += block_ids

    def unpin(self, block_ids: list[int]) -> None:
        for block in block_ids:
            self.held.remove(block)

    def idle(self, block_ids: Any) -> set[int]:
        return set(block_ids) - set(self.held)

    def num_free_blocks(self) -> int:
        return 100 - len(self.held)


def test_donors_are_held_until_the_step_that_reads_them_is_over() -> None:
    pool = Pool()
    pins = DeferredPins(pool)
    for step in range(3):
        pins.pin([step])
        pins.unpin([step])
        pins.end_step()
        if step:  # two steps are under way; the outputs of the older one come
            assert pool.held == [step - 1, step]
            pins.processed()
            assert pool.held == [step]
    pins.processed()
    assert pool.held == []
    assert pins.num_free_blocks() == 100
    pins.processed()


@pytest.mark.parametrize("overlaps", [True, False])
def test_only_where_steps_overlap(overlaps: bool) -> None:
    pool, transfers = Pool(), Transfers(overlaps)
    pins = transfers.pins(pool)
    assert (pins is pool) is not overlaps
    pins.pin([1])
    pins.unpin([1])
    assert pool.held == ([1] if overlaps else [])
    transfers.end_step([], True)
    transfers.processed()
    assert pool.held == []
