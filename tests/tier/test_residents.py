# SPDX-License-Identifier: Apache-2.0
"""The budget of the file tier, without files."""

from tests.tier.records import key_of, record
from vllm_segreuse.tier.format import Kept, about
from vllm_segreuse.tier.residents import Residents


def kept(number: int, durable: bool = False) -> Kept:
    return Kept(f"00/{number:032x}", b"", about(record(number), []), durable)


def numbers(residents: Residents) -> list[int]:
    return [int(found.name[3:], 16) for found in residents]


def test_what_is_read_is_no_victim() -> None:
    residents = Residents(2, [kept(1), kept(2)])
    residents.begin_read(key_of(1))
    residents.begin_read(key_of(1))
    residents.begin_read(key_of(2))
    residents.end_read(key_of(2))
    slot = residents.reserve(durable=False)
    assert slot is not None
    assert slot.victim == kept(2)
    assert residents.reserve(durable=True) is None
    residents.end_read(key_of(1))
    assert residents.reserve(durable=True) is None
    residents.end_read(key_of(1))
    slot = residents.reserve(durable=True)
    assert slot is not None
    assert slot.victim == kept(1)
    assert numbers(residents) == []
    assert residents.used == 2


def test_without_slots_nothing_is_stored() -> None:
    residents = Residents(0)
    assert residents.reserve(durable=True) is None


def test_durable_records_are_the_last_to_exceed_a_smaller_budget() -> None:
    residents = Residents(2, [kept(1, durable=True), kept(2), kept(3)])
    assert residents.excess() == [kept(2)]
    assert numbers(residents) == [3, 1]
    assert residents.excess() == []


def test_a_slot_ends_filled_empty_or_blocked() -> None:
    residents = Residents(3)
    for _ in range(3):
        assert residents.reserve(durable=False) is not None
    residents.fill(kept(1))
    residents.vacate()
    residents.block(kept(3))
    assert numbers(residents) == [1]
    assert residents.used == 2
    assert residents.reserve(durable=False) == (None,)
    assert residents.reserve(durable=False) == (kept(3),)
    assert residents.reserve(durable=False) == (kept(1),)
    assert residents.reserve(durable=False) is None
