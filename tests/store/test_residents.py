# SPDX-License-Identifier: Apache-2.0
"""What an engine knows of the records on disk."""

from segreuse_store.format import StoredRecord
from segreuse_store.residents import Residents
from tests.store.records import key_of, labels_of, record


def kept(number: int, name: str = "", *labels: bytes) -> StoredRecord:
    return record(number, labels=labels)._replace(name=name or f"00/{number:032x}")


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


def test_a_record_is_claimed_once_by_each_of_its_labels() -> None:
    alice, bob = b"a" * 16, b"b" * 16
    both, hers = kept(1, "", alice, bob), kept(2, "", alice)
    residents = Residents([both, hers], labels_of)
    assert residents.num_unclaimed == 3
    assert residents.claim(alice) == [both, hers]
    assert residents.claim(alice) == residents.claim(b"c" * 16) == []
    assert residents.claim(bob) == [both]
    residents.add(new := kept(3, "", alice))
    assert residents.claim(alice) == [], "nobody has offered it"
    residents.offer(new)
    assert residents.claim(alice) == [new]
    residents.unclaim()
    assert residents.remove(both.name) == both
    assert residents.num_unclaimed == 2
    assert residents.claim(bob) == []
    assert residents.claim(alice) == [hers, new]
