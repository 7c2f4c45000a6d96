# SPDX-License-Identifier: Apache-2.0
"""Whatever happens in whatever order: no plan reads a row of other tokens, nothing leaks."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.tier.world import SIZE, World
from vllm_segreuse.plan import Tier

DOCUMENTS = 6
PARTS = 3  # blocks of a document
SEEDS = st.integers(0, 2**32 - 1)


def document(number: int) -> list[int]:
    """Documents begin alike: their first blocks have equal names."""
    first = number % 2 * 100
    return [*range(first, first + SIZE), *range(1000 * number, 1000 * number + 2 * SIZE)]


class Tiered(RuleBasedStateMachine):
    """Ranks carry out steps, and report them, whenever they do; files, too."""

    @initialize(
        ranks=st.integers(1, 3), files=st.booleans(), rows=st.integers(2, 8), zeroise=st.booleans()
    )
    def begin(self, ranks: int, files: bool, rows: int, zeroise: bool) -> None:
        self.world = World(9, rows, ranks, files, most_files=rows, wait_ms=10, zeroise=zeroise)
        self.held: dict[str, list[int]] = {}  # requests of this step with a plan
        self.numbers = iter(range(10**6))
        self.deleted: dict[int, bytes] = {}  # keys of blocks that were of deleted documents then

    @rule(number=st.integers(0, DOCUMENTS - 1), depth=st.integers(0, 1))
    def compute(self, number: int, depth: int) -> None:
        self.computed(self.world.compute(document(number), depth=depth))

    def computed(self, blocks: list[int]) -> list[int]:
        """These blocks hold something else than before."""
        for block in blocks:
            self.deleted.pop(block, None)
        return blocks

    @rule(number=st.integers(0, DOCUMENTS - 1))
    def keep(self, number: int) -> None:
        """It is a document of a knowledge base."""
        blocks = self.computed(self.world.compute(document(number)))
        self.world.end_step()
        self.world.tier.documents.keep(str(number), 0, 1, blocks)

    @rule(number=st.integers(0, DOCUMENTS - 1))
    def delete(self, number: int) -> None:
        """Some of its blocks may be there several times, or be those of other documents."""
        kept = self.world.tier.documents
        names = self.names()
        before = {block for block in names if kept.is_durable(names[block])}
        kept.release([str(number)])
        self.deleted |= {block: names[block] for block in before - self.durable(names)}

    @rule(number=st.integers(0, DOCUMENTS - 1))
    def delete_one_of_many_blocks(self, number: int) -> None:
        """Whoever has computed it once more has left blocks of the same names."""
        self.keep(number)
        self.compute(number, 0)
        self.end_step()
        self.delete(number)
        self.evict(3)
        self.evict(7)

    def names(self) -> dict[int, bytes]:
        """Keys of the blocks that have one."""
        keys = {block: self.world.key_of(block) for block in self.world.names}
        return {block: key for block, key in keys.items() if key is not None}

    def durable(self, names: dict[int, bytes]) -> set[int]:
        """Blocks whose records documents have."""
        kept = self.world.tier.documents
        return {block for block, key in names.items() if kept.is_durable(key)}

    @rule(seed=SEEDS)
    def evict(self, seed: int) -> None:
        """A block that was of a deleted document is not stored."""
        names = self.names()
        durable = self.durable(names)
        chosen = random.Random(seed).sample(sorted(names), min(len(names), seed % 4))
        waited = {seen.key for seen in self.world.tier.waiting}
        self.world.evict(chosen)
        stored = {seen.block for seen in self.world.tier.waiting if seen.key not in waited}
        gone = {block for block in chosen if self.deleted.get(block) == names[block]}
        assert not (gone - durable) & stored, "a deleted document comes back"

    @rule(
        numbers=st.lists(st.integers(0, DOCUMENTS - 1), min_size=1, max_size=3), sends=st.booleans()
    )
    def ask(self, numbers: list[int], sends: bool) -> None:
        prompt = [token for number in numbers for token in (7, *document(number))]
        request_id = str(next(self.numbers))
        pieces = self.world.hold(request_id, prompt)
        if pieces is None:
            self.waits = request_id, prompt
            self.world.tier.left(request_id)
            return
        rows = set(pieces.block[pieces.source == Tier.HOST].tolist())
        assert all(0 <= row < self.world.region.num_chunks for row in rows)
        if sends:
            self.world.send(request_id, prompt, pieces)
        else:
            self.world.tier.let_go(request_id)
        self.world.tier.left(request_id)

    @rule(number=st.integers(0, DOCUMENTS - 1))
    def wait_and_ask(self, number: int) -> None:
        """A request that waits for files while steps go by."""
        request_id, prompt = str(next(self.numbers)), document(number)
        for _ in range(4):
            pieces = self.world.hold(request_id, prompt)
            if pieces is not None:
                self.world.send(request_id, prompt, pieces)
                break
            self.world.end_step()
            if self.world.files is not None:
                self.world.files.work()
            self.world.now_s += 0.004
        self.world.tier.left(request_id)

    @rule()
    def end_step(self) -> None:
        self.world.end_step()

    @rule(seed=SEEDS, fails=st.booleans())
    def run_a_rank(self, seed: int, fails: bool) -> None:
        random.Random(seed).choice(self.world.ranks).run(fails and seed % 3 == 0)

    @rule(seed=SEEDS)
    def report_of_a_rank(self, seed: int) -> None:
        self.world.tier.note(random.Random(seed).choice(self.world.ranks).report())

    @precondition(lambda self: self.world.files is not None)
    @rule(fails=st.booleans())
    def files_work(self, fails: bool) -> None:
        assert self.world.files is not None
        self.world.files.work(fails)

    @precondition(lambda self: self.world.files is not None and self.world.files.content)
    @rule(seed=SEEDS)
    def a_file_is_lost(self, seed: int) -> None:
        assert self.world.files is not None
        self.world.files.lose(random.Random(seed).choice(list(self.world.files.content)))

    @precondition(lambda self: self.world.now_s > 0)
    @rule()
    def reset(self) -> None:
        self.world.reset()
        self.deleted.clear()

    @rule()
    def time_passes(self) -> None:
        self.world.now_s += 0.004

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(3):
            self.world.step()
            if self.world.files is not None:
                self.world.files.drain_jobs()
        self.world.step()
        self.world.check_idle()


TestTiered = Tiered.TestCase
