# SPDX-License-Identifier: Apache-2.0
"""What an engine knows of the records on disk."""

from tests.tier.records import key_of, record
from vllm_segreuse.tier.format import DiskRecord, about
from vllm_segreuse.tier.residents import Residents


def kept(number: int, name: str = "") -> DiskRecord:
    return DiskRecord(name or f"00/{number:032x}", b"", about(record(number), []), durable=False)


def test_a_record_is_found_by_its_key_and_by_its_file() -> None:
    residents = Residents([kept(1), kept(2)])
    assert residents.get(key_of(1)) == residents.named(kept(1).name) == kept(1)
    assert residents.get(key_of(3)) is residents.named("other") is None
    assert [*residents] == [kept(1), kept(2)]
    assert residents.remove(kept(1).name) == kept(1)
    assert residents.remove(kept(1).name) is None
    assert residents.get(key_of(1)) is residents.named(kept(1).name) is None
    assert len(residents) == 1


def test_a_record_that_was_replaced_is_not_removed_with_its_old_file() -> None:
    residents = Residents()
    assert residents.add(kept(1))
    assert not residents.add(kept(1, "00/new"))
    assert residents.remove(kept(1).name) is None
    assert residents.get(key_of(1)) == kept(1, "00/new")
    assert len(residents) == 1
