# SPDX-License-Identifier: Apache-2.0
"""Entries in the second tier: held while all of their records are there, in whatever order those
come, go and are shared."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bench.integrity import check_integrity
from tests.cache.keeping import Journal
from vllm_segreuse.features.knowledge.kept import KeptEntries

A, B, C = b"a", b"b", b"c"
NOWHERE, HOST, DISK, BOTH = (False, False), (True, False), (False, True), (True, True)


@pytest.fixture
def kept() -> KeptEntries:
    return KeptEntries()


def test_an_entry_is_held_once_all_parts_are_known_and_all_records_there(kept: KeptEntries) -> None:
    kept.keep("doc", 0, 2, [A, B])
    kept.placed(A, *HOST)
    kept.placed(B, *HOST)
    assert kept.held() == {}, "the other part is not known"
    kept.keep("doc", 1, 2, [C])
    assert kept.held() == {}, "a record is still being stored"
    kept.placed(C, *HOST)
    assert kept.held() == {"doc": "host"}


@pytest.mark.parametrize(
    ("places", "held"),
    [
        ((HOST, BOTH), {"doc": "host"}),
        ((HOST, DISK), {"doc": "disk"}),
        ((DISK, DISK), {"doc": "disk"}),
        ((BOTH, NOWHERE), {}),
    ],
)
def test_where_an_entry_is(
    kept: KeptEntries, places: list[tuple[bool, bool]], held: dict[str, str]
) -> None:
    for key in (A, B):
        kept.placed(key, *BOTH)  # of nobody: ignored
    kept.keep("doc", 0, 1, [A, B])
    assert kept.held() == {}
    for key, place in zip((A, B), places, strict=True):
        kept.placed(key, *BOTH)
        kept.placed(key, *place)
    assert kept.held() == held


def test_a_record_of_two_entries_is_let_go_with_the_second(kept: KeptEntries) -> None:
    kept.keep("one", 0, 1, [A, B])
    kept.keep("two", 0, 1, [B, C])
    for key in (A, B, C):
        kept.placed(key, *HOST)
    assert kept.owners([B]) == {"one", "two"}
    assert sorted(kept.release(["one", "never there"])) == [A]
    assert kept.held() == {"two": "host"}
    assert B in kept
    assert A not in kept
    assert sorted(kept.release(["two"])) == [B, C]
    assert kept.records() == []


def test_a_new_entry_counts_records_that_are_there_for_another(kept: KeptEntries) -> None:
    kept.keep("one", 0, 1, [A])
    kept.placed(A, *DISK)
    kept.keep("two", 0, 1, [A, A])
    assert kept.held() == {"one": "disk", "two": "disk"}


def test_an_entry_in_other_parts_replaces_the_old_one(kept: KeptEntries) -> None:
    kept.keep("doc", 0, 1, [A, B])
    kept.placed(A, *HOST)
    assert kept.keep("doc", 0, 2, [A]) == [B]
    assert kept.keep("doc", 0, 2, [A]) == []
    assert kept.held() == {}
    kept.keep("doc", 1, 2, [A])
    assert kept.held() == {"doc": "host"}, "a record stays where it is"
    check_integrity(kept)


def test_after_a_restart_only_what_is_whole_on_disk_is_held() -> None:
    journal = Journal()
    before = KeptEntries(journal)
    before.keep("whole", 0, 1, [A])
    before.keep("torn", 0, 1, [A, B])
    before.keep("half", 1, 2, [A])
    before.keep("deleted", 0, 1, [A])
    before.release(["deleted"])

    after = KeptEntries(journal)
    assert after.restore(journal.read(), {A}.__contains__) == [B]
    assert after.held() == {"whole": "disk"}
    assert [entry for entry, *_ in journal.read()] == ["whole"], "the others are forgotten"
    after.placed(A, *BOTH)
    assert after.held() == {"whole": "host"}


def test_a_restart_finds_the_last_cut_of_an_entry() -> None:
    journal = Journal()
    before = KeptEntries(journal)
    before.keep("doc", 1, 2, [B])
    before.keep("doc", 0, 1, [A])
    after = KeptEntries(journal)
    after.restore(journal.read(), {A}.__contains__)
    assert after.held() == {"doc": "disk"}


class Machine(RuleBasedStateMachine):
    """Any order of events and restarts, beside a model that looks at each record."""

    names = st.sampled_from("xyz")
    keys = st.lists(st.sampled_from([b"1", b"2", b"3", b"4", b"5"]), min_size=1, max_size=3)

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal()
        self.kept = KeptEntries(self.journal)
        self.parts: dict[str, list[list[bytes] | None]] = {}
        self.places: dict[bytes, tuple[bool, bool]] = {}

    def owned(self) -> set[bytes]:
        parts = (part for entry in self.parts.values() for part in entry)
        return {key for part in parts if part for key in part}

    def drop(self, gone: Sequence[bytes], before: set[bytes]) -> None:
        assert sorted(gone) == sorted(before - self.owned())
        self.places = {key: place for key, place in self.places.items() if key in self.owned()}

    @rule(name=names, part=st.integers(0, 1), parts=st.integers(1, 2), keys=keys)
    def keep(self, name: str, part: int, parts: int, keys: list[bytes]) -> None:
        part = min(part, parts - 1)
        before = self.owned()
        known = self.parts.get(name)
        if known is None or len(known) != parts or known[part] not in (None, keys):
            self.parts[name] = [None] * parts
        self.parts[name][part] = keys
        self.drop(self.kept.keep(name, part, parts, keys), before)

    @rule(names=st.lists(names))
    def release(self, names: list[str]) -> None:
        before = self.owned()
        for name in names:
            self.parts.pop(name, None)
        self.drop(self.kept.release(names), before)

    @rule(keys=keys, on_host=st.booleans(), on_disk=st.booleans())
    def place(self, keys: list[bytes], on_host: bool, on_disk: bool) -> None:
        for key in keys:
            self.kept.placed(key, on_host, on_disk)
            if key in self.owned():
                self.places[key] = on_host, on_disk

    @rule()
    def restart(self) -> None:
        before = self.owned()
        self.places = {key: (False, on_disk) for key, (_, on_disk) in self.places.items()}
        self.parts = {name: self.parts[name] for name in self.held()}
        self.kept = KeptEntries(self.journal)
        on_disk = {key for key, (_, on_disk) in self.places.items() if on_disk}
        self.drop(self.kept.restore(self.journal.read(), on_disk.__contains__), before)

    def held(self) -> dict[str, str]:
        held = {}
        for name, parts in self.parts.items():
            if all(parts):
                places = [self.places.get(k, NOWHERE) for part in parts if part for k in part]
                if all(map(any, places)):
                    held[name] = "host" if all(on_host for on_host, _ in places) else "disk"
        return held

    @invariant()
    def agrees(self) -> None:
        check_integrity(self.kept)
        assert self.kept.held() == self.held()
        assert set(self.kept.records()) == self.owned()


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=25)
