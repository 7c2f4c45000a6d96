# SPDX-License-Identifier: Apache-2.0
"""Frozen parts are written through to a second tier, which has them when GPU memory has not."""

from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.integrity import check_integrity
from segreuse_extras.compressed.compression import Compression, Kept
from tests.cache.keeping import FakeTier
from tests.cache.test_frozen import TOTAL, Blocks
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.cache.rolling_hash import window_hashes
from vllm_segreuse.features.knowledge import freezing as freezing_module
from vllm_segreuse.features.knowledge.freezing import Freezing
from vllm_segreuse.features.knowledge.frozen import EntryUse, FrozenPool
from vllm_segreuse.plan import FreezeOrder
from vllm_segreuse.scheduling.health import Health
from vllm_segreuse.scheduling.tracked import Decision

SIZE = 4


class World:
    """A frozen pool of 20 blocks with a tier below it."""

    def __init__(self, limit: int = 8, tier: FakeTier | None = None) -> None:
        ticks = count()
        table = NamespaceTable(lambda namespace: False)
        self.namespace = table.intern(b"key")
        self.blocks = Blocks()
        self.pool = FrozenPool(
            self.blocks, table, TOTAL, limit, 0.9, True, lambda: float(next(ticks))
        )
        self.index = SegmentIndex(TOTAL, SIZE)
        self.tier = tier
        self.has_exact_names = True
        self.freezing = Freezing(
            *(self.pool, self.index, lambda block: self.has_exact_names, Health(), tier)
        )
        self._next = 0

    def compute(self, entry: str, part: int = 0, parts: int = 1, blocks: int = 3) -> bool:
        """A request that computes a part ends; whether its report says so."""
        ids = [(self._next + i) % TOTAL for i in range(blocks)]
        self._next += blocks
        # Another text each time, and the same again for the same part.
        tokens = np.arange(blocks * SIZE, dtype=np.int32) + 1000 * sum(entry.encode()) + 100 * part
        self.index.insert(self.namespace, np.array(ids, np.int32), tokens, 0)
        prompt = Prompt(self.namespace, tokens)
        order = FreezeOrder(entry, part, parts, 0)
        return self.freezing.finish(prompt, order, ids)

    def copy(
        self,
        entry: str,
        kept: int = SIZE + 1,
        recomputed: int = 0,
        first: int = 0,
        copied: int | None = None,
        blocks: tuple[int, ...] = (0, 1, 2),
        **plan: Any,
    ) -> bool:
        """A request that keeps tokens ends; whether its report says so.

        Args:
            recomputed: tokens of it that the workers had to compute.
            first: of the kept tokens.
            copied: tokens that were to be copied; None: those that are kept.
            blocks: that it still holds.
            plan: what of its plan is not as it should be.
        """
        prompt = Prompt(self.namespace, np.arange(3 * SIZE, dtype=np.int32))
        copied = kept if copied is None else copied
        made = SimpleNamespace(**{"start": 0, "num_reused": copied, **plan}) if copied else None
        order = FreezeOrder(entry, 0, 1, first)
        tracked: Any = SimpleNamespace(prompt=prompt, plan=made, decision=Decision())
        pool: Any = SimpleNamespace(is_exact=lambda block: self.has_exact_names)
        keeps = Kept(kept, copied, recomputed)
        make = partial(Compression(pool, self.pool, SIZE).kept_part, tracked, keeps)
        return self.freezing.finish(prompt, order, list(blocks), make)

    def ask(self, entry: str, blocks: int = 3) -> None:
        """A prompt with the text of an entry arrives."""
        tokens = np.arange(blocks * SIZE, dtype=np.int32) + 1000 * sum(entry.encode())
        self.freezing.notice(Prompt(self.namespace, tokens))

    def state(self) -> dict[str, Any]:
        check_integrity(self.pool)
        return self.freezing.state()


def test_without_a_tier_nothing_is_stored() -> None:
    world = World()
    assert world.compute("doc")
    state = world.state()
    assert (state["stored"], state["limit"]) == ({}, 8)
    assert not world.compute("large", blocks=9)


def test_each_part_that_is_frozen_is_written_through() -> None:
    tier = FakeTier()
    world = World(tier=tier)
    assert world.compute("doc", 0, 2)
    assert world.state()["stored"] == {}
    assert world.compute("doc", 1, 2, blocks=2)
    assert tier.calls == [("doc", 0, 2, 3), ("doc", 1, 2, 2)]
    assert world.state()["stored"] == {"doc": "host"}
    assert list(world.state()["warm"]) == ["doc"]


def test_a_compressed_document_is_in_gpu_memory_only() -> None:
    """The tier finds records by their text, which its kept tokens are not."""
    world = World(tier=(tier := FakeTier()))
    world.has_exact_names = False
    assert world.copy("doc")
    state = world.state()
    assert (tier.calls, [*state["warm"]], state["stored"]) == ([], ["doc"], {})
    [part] = world.pool.compressed("doc", world.namespace) or []
    assert part.block_ids == [0, 1], "without the block of the filler"
    assert part.tokens is not None
    assert part.tokens.tolist() == [*range(SIZE + 1)]
    world.pool.make_free(1)
    world.freezing.asked_for(Prompt(world.namespace, np.zeros(9, np.int32)), ["doc"])
    assert world.state()["wanted"] == ["doc"], "it is computed again"


@pytest.mark.parametrize(
    ("wrong", "exact"),
    [({"start": SIZE}, False), ({"num_reused": SIZE}, False), ({}, True)],
    ids=["behind a prefix", "too few", "exact names"],
)
def test_what_is_no_copy_is_not_frozen(wrong: dict[str, int], exact: bool) -> None:
    world = World()
    world.has_exact_names = exact
    assert not world.copy("doc", **wrong)
    assert world.state()["warm"] == {}


@pytest.mark.parametrize("blocks", [(), (0,)])
def test_what_has_lost_its_blocks_is_not_frozen(blocks: tuple[int, ...]) -> None:
    """A request that is preempted ends by the output of a step that had left before."""
    world = World()
    world.has_exact_names = False
    assert not world.copy("doc", blocks=blocks)
    assert not world.copy("doc", kept=3, first=SIZE - 1, copied=2, blocks=blocks)
    assert not world.compute("text", blocks=0)
    assert world.state()["warm"] == {}
    assert world.copy("doc", blocks=(0, 1))


def test_what_is_deleted_leaves_the_tier_too() -> None:
    world = World(tier=FakeTier())
    world.compute("doc")
    world.compute("other")
    world.freezing.forget(iter(["doc", "never there"]))
    state = world.state()
    assert [*state["warm"]] == [*state["stored"]] == ["other"]


def test_what_the_tier_holds_need_not_return_and_what_it_lost_does() -> None:
    tier = FakeTier()
    world = World(tier=tier)
    world.compute("doc")
    world.pool.make_free(1)
    world.ask("doc")
    state = world.state()
    assert (state["warm"], state["stored"], state["wanted"]) == ({}, {"doc": "host"}, [])
    tier.lose("doc")
    state = world.state()
    assert (state["stored"], state["wanted"]) == ({}, ["doc"])


def test_kept_tokens_that_were_computed_as_a_text_are_not_frozen() -> None:
    world = World()
    world.has_exact_names = False
    assert not world.copy("doc", recomputed=1)
    assert world.state()["frozen"] == 0
    assert world.copy("doc")


def test_kept_tokens_may_stand_behind_others() -> None:
    """As anchors do behind their chunk; nothing is copied for those of the first one."""
    world = World()
    world.has_exact_names = False
    assert world.copy("doc", kept=3, first=SIZE + 2, copied=2)
    (part,) = world.pool.compressed("doc", world.namespace) or []
    assert (part.block_ids, part.first) == ([1, 2], SIZE + 2)
    assert np.asarray(part.tokens).tolist() == [SIZE + 2, SIZE + 3, SIZE + 4]
    world.has_exact_names = True
    assert not world.copy("other", copied=2), "an exact block holds no copies"
    assert world.copy("other", kept=2, first=2, copied=0)
    assert not world.copy("third", copied=2, num_reused=1)


def test_what_the_frozen_pool_has_no_room_for_is_kept_whole() -> None:
    """No part of it takes GPU memory, whichever part it was that did not fit."""
    world = World(tier=FakeTier())
    world.compute("small")
    for part in range(3):
        assert world.compute("large", part, 3)
    state = world.state()
    assert [*state["warm"]] == ["small"]
    assert state["stored"] == {"small": "host", "large": "host"}
    assert state["frozen"] == 3


def test_an_entry_that_is_evicted_between_two_parts_is_kept_whole() -> None:
    world = World(tier=FakeTier())
    world.compute("doc", 0, 2)
    world.pool.make_free(1)
    world.compute("doc", 1, 2)
    assert world.state()["frozen"] == 0
    assert world.state()["stored"] == {"doc": "host"}


def test_uses_of_both_tiers_add_up() -> None:
    tier = FakeTier()
    world = World(tier=tier)
    world.compute("doc")
    world.compute("other")
    world.pool.used([0])
    tier.uses = {"doc": EntryUse(3, 1.5), "other": EntryUse(1, 9.5)}
    assert world.state()["uses"] == {"doc": [4, 2.0], "other": [1, 9.5]}


def test_documents_may_take_what_the_tier_has() -> None:
    large, small = World(tier=FakeTier(capacity_blocks=500)), World(tier=FakeTier(5))
    assert (large.state()["limit"], small.state()["limit"]) == (500, 8)
    # Those that the tier does not take have GPU memory only.
    assert (large.state()["frozen_limit"], small.state()["frozen_limit"]) == (8, 8)


def test_a_compressed_document_displaces_what_the_tier_holds() -> None:
    tier = FakeTier()
    world = World(limit=7, tier=tier)
    world.compute("held")
    tier.room = 0
    world.compute("not held")
    world.has_exact_names = False
    assert world.copy("compressed", blocks=(16, 17))
    state = world.state()
    assert (sorted(state["warm"]), [*state["stored"]]) == (["compressed", "not held"], ["held"])
    assert state["wanted"] == []
    assert not world.copy("another", kept=3 * SIZE, blocks=(18, 19, 15))
    assert sorted(world.state()["warm"]) == ["compressed", "not held"]


def test_what_is_neither_frozen_nor_kept_is_not_called_frozen() -> None:
    """The second tier is off, and GPU memory has no room."""
    tier = FakeTier()
    world = World(limit=2, tier=tier)
    tier.is_off = True
    assert not world.compute("doc")
    assert "second tier takes nothing" in (world.freezing.why_refused("doc") or "")
    assert "0 of 2 blocks" in (world.freezing.why_refused("doc") or "")
    assert world.compute("small", blocks=2), "it is frozen all the same"
    tier.is_off = False
    assert world.compute("doc"), "it is kept"
    assert world.freezing.why_refused("doc") is None


def test_each_cause_has_words_of_its_own() -> None:
    world = World(limit=4)
    assert not world.compute("large", blocks=5)
    assert "no room" in (world.freezing.why_refused("large") or "")
    assert not world.compute("later part", part=1, parts=2)
    assert "evicted" in (world.freezing.why_refused("later part") or "")
    world.has_exact_names = False
    assert not world.compute("other", blocks=2)
    assert "not exact" in (world.freezing.why_refused("other") or "")
    world.has_exact_names = True
    world.index.insert = lambda *arguments, **options: None  # type: ignore[method-assign]
    assert not world.compute("unknown", blocks=2)
    assert "2 of its 2 blocks may not donate" in (world.freezing.why_refused("unknown") or "")


@pytest.mark.parametrize(
    ("num_tokens", "first", "blocks", "probed"),
    [
        (24, 0, [10, 11, 12, 13, 14, 15], 8),
        (24, 4, [11, 12, 13, 14, 15], 12),
        (24, 5, [11, 12, 13, 14, 15], 12),
        (24, 9, [12, 13, 14, 15], 16),
        (24, 20, [15], 20),
        (24, 21, [15], None),
        (24, 23, [15], None),
        (23, 0, [10, 11, 12, 13, 14], 8),
        (23, 16, [14], 16),
        (23, 17, [14], None),
    ],
)
def test_a_part_is_found_again_by_a_block_of_its_own_in_its_middle(
    num_tokens: int, first: int, blocks: list[int], probed: int | None
) -> None:
    world = World()
    tokens = np.arange(500, 500 + num_tokens, dtype=np.int32)
    ids = [*range(10, 16)]
    full = np.array(ids[: num_tokens // SIZE], np.int32)
    world.index.insert(world.namespace, full, tokens[: len(full) * SIZE], 0)
    order = FreezeOrder("doc", 0, 1, first)
    part = world.freezing.part(Prompt(world.namespace, tokens), order, ids)
    assert (part.namespace, part.block_ids) == (world.namespace, blocks)
    if probed is None:
        assert part.probe is None
    else:
        assert part.probe == window_hashes(tokens[probed : probed + SIZE].copy(), SIZE)[0]


@pytest.mark.parametrize(("num_tokens", "first"), [(24, 24), (23, 20), (3, 0), (4, 4)])
def test_a_part_without_a_full_block_is_none(num_tokens: int, first: int) -> None:
    world = World()
    prompt = Prompt(world.namespace, np.arange(num_tokens, dtype=np.int32))
    with pytest.raises(ValueError, match=f"^no full block holds a token from {first} on$"):
        world.freezing.part(prompt, FreezeOrder("doc", 0, 1, first), [*range(6)])


def test_room_is_made_if_all_that_is_missing_can_be_had() -> None:
    world = World()
    world.compute("one", blocks=3)
    world.compute("two", blocks=2)
    for missing in (-1, 0, 6):
        assert not world.freezing.make_room(missing)
    world.blocks.pin([0])  # a request reads it
    assert not world.freezing.make_room(5), "four would be free"
    assert len(world.pool.warm()) == 2
    assert world.freezing.make_room(4)
    assert world.pool.num_frozen == 0
    assert not world.freezing.make_room(1), "there is nothing left"


@pytest.mark.parametrize(("others", "warm"), [(15, ["doc"]), (16, [])])
def test_each_step_ends_with_the_pressure_that_is_allowed(others: int, warm: list[str]) -> None:
    """18 of 20 blocks may be in use."""
    world = World()
    world.compute("doc")
    world.blocks.pin([*range(3, 3 + others)])
    world.freezing.begin_step()
    assert [*world.state()["warm"]] == warm


def test_why_something_is_not_frozen_is_a_sentence() -> None:
    world = World(limit=4)
    world.compute("small", blocks=2)
    assert not world.compute("large", blocks=3)
    assert world.freezing.why_refused("large") == (
        "the frozen pool had no room for it: 2 of 4 blocks at most are frozen, and a part of it "
        "takes 3: remove documents or raise frozen_share, and warm it again"
    )
    assert not world.compute("later", part=1, parts=2)
    assert world.freezing.why_refused("later") == (
        "parts of it were evicted, or it was removed, while the others were computed: warm it "
        "again when fewer requests run"
    )
    tier = FakeTier()
    tier.is_off = True
    off = World(limit=0, tier=tier)
    assert not off.compute("doc", blocks=1)
    assert off.freezing.why_refused("doc") == (
        "the frozen pool had no room for it: 0 of 0 blocks at most are frozen, and a part of it "
        "takes 1: remove documents or raise frozen_share, and warm it again; and the second tier "
        "takes nothing now: an error, which the log has, has ended it, or a reset of the prefix "
        "cache is under way"
    )


def test_the_causes_of_a_thousand_entries_are_known() -> None:
    freezing = World().freezing
    for number in range(1025):
        freezing.refuse(f"entry {number}", f"reason {number}")
    assert freezing.why_refused("entry 0") is None
    assert freezing.why_refused("entry 1") == "reason 1"
    assert freezing.why_refused("entry 1024") == "reason 1024"


def test_the_causes_that_were_noted_last_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezing_module, "_REFUSALS", 2)
    freezing = World().freezing
    for entry in ("first", "second", "first", "third"):
        freezing.refuse(entry, f"{entry} fails")
    assert [freezing.why_refused(entry) for entry in ("first", "second", "third")] == [
        "first fails",
        None,
        "third fails",
    ]
