# SPDX-License-Identifier: Apache-2.0
"""Documents in a second tier: what it holds is not computed again, and nothing else is served."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bench.integrity import check_integrity
from tests.cache.keeping import FakeTier
from tests.knowledge import fake_engine
from tests.knowledge.fake_engine import BLOCK_SIZE, FakeEngine
from tests.knowledge.test_service import documents, statuses
from vllm_segreuse.features.knowledge import siblings
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.database import IN_MEMORY
from vllm_segreuse.features.knowledge.errors import NoRoomError
from vllm_segreuse.features.knowledge.schemas import AddDocuments, CreateBase, WarmDocuments
from vllm_segreuse.features.knowledge.service import KnowledgeService
from vllm_segreuse.features.knowledge.store import Store, entry_name

SHAPE = Shape(block_size=BLOCK_SIZE, max_prompt_tokens=63, chunk_tokens=20)
A, B, C = [*range(10, 25)], [*range(30, 75)], [*range(80, 90)]

Test = Callable[[KnowledgeService, FakeEngine], Awaitable[None]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "manifest.sqlite"


def run(
    test: Test,
    tier: FakeTier,
    path: Path | str = IN_MEMORY,
    limit: int = 40,
    model: str = "model",
    shape: Shape = SHAPE,
) -> FakeEngine:
    """One run of a server on this tier."""

    async def main() -> FakeEngine:
        engine = FakeEngine(limit, tier)
        async with fake_engine.serving(engine, shape, path, model) as service:
            await service.create_base(CreateBase(name="base", context="none"))
            await test(service, engine)
            check_integrity(engine.pool)
        return engine

    return asyncio.run(main())


async def tiers(service: KnowledgeService) -> dict[str, str | None]:
    page = await service.documents("base", None, 100)
    return {document.id: document.tier for document in page.data}


async def fill(service: KnowledgeService, engine: FakeEngine) -> None:
    await service.add("base", documents(a=A, b=B))


async def settled(service: KnowledgeService, engine: FakeEngine) -> None:
    await service.finish()


def test_what_leaves_gpu_memory_is_stored() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await fill(service, engine)
        assert await statuses(service) == {"a": "warm", "b": "warm"}
        assert await tiers(service) == {"a": "gpu", "b": "gpu"}
        engine.pool.make_free(100)
        assert await statuses(service) == {"a": "stored", "b": "stored"}
        assert await tiers(service) == {"a": "host", "b": "host"}
        tier.lose_host()
        assert await tiers(service) == {"a": "disk", "b": "disk"}
        counts = (await service.base("base")).documents
        assert (counts.stored, counts.cold, counts.warm) == (2, 0, 0)

    tier = FakeTier()
    run(test, tier)


def test_a_stored_document_is_computed_only_if_it_is_to_be_warm() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await fill(service, engine)
        engine.pool.make_free(100)
        engine.computed.clear()
        await service.add("base", documents(a=A))
        assert engine.computed == []
        (document,) = await service.warm("base", WarmDocuments(ids=["a"], wait=True))
        assert (document.status, document.tier) == ("warm", "gpu")

    run(test, FakeTier())


def test_what_fits_the_tier_only_is_taken_and_stored() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        added = await service.add("base", documents(a=A, b=B))
        assert [document.status for document in added] == ["warm", "stored"]
        assert engine.pool.num_frozen == 4
        assert (await service.stats()).blocks.limit == 20
        with pytest.raises(NoRoomError, match="knowledge bases may have 20"):
            await service.add("base", documents(c=[*range(100)]))

    run(test, FakeTier(capacity_blocks=20), limit=8)


def compressed(**content: list[int]) -> AddDocuments:
    each = [{"id": i, "token_ids": ids, "keep": 0.5} for i, ids in content.items()]
    return AddDocuments.model_validate({"documents": each, "wait": True})


def test_compressed_documents_must_fit_into_gpu_memory() -> None:
    """Whatever the tier holds: it does not take them. Others make way for them."""

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=A, b=B))
        assert await statuses(service) == {"a": "warm", "b": "stored"}
        texts = {f"c{i}": [*range(100 * i, 100 * i + 32)] for i in range(1, 4)}
        with pytest.raises(NoRoomError, match=r"GPU memory only.* need 12 KV .* may have 8 there"):
            await service.add("base", compressed(**texts))
        del texts["c3"]
        assert {d.status for d in await service.add("base", compressed(**texts))} == {"warm"}
        wanted = {"a": "stored", "b": "stored", "c1": "warm", "c2": "warm"}
        assert await statuses(service) == wanted
        await service.add("base", documents(d=C))
        assert await statuses(service) == wanted | {"d": "stored"}
        with pytest.raises(NoRoomError, match="GPU memory only"):
            await service.add("base", compressed(a=A))

    run(test, FakeTier(capacity_blocks=60), limit=8)


def test_with_less_gpu_memory_than_before_compressed_documents_stay_cold(path: Path) -> None:
    async def add(service: KnowledgeService, engine: FakeEngine) -> None:
        texts = {f"c{i}": [*range(100 * i, 100 * i + 32)] for i in range(1, 4)}
        await service.add("base", compressed(**texts))
        await service.add("base", documents(a=A))

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.finish()
        found = await statuses(service)
        assert sorted(found.values()) == ["cold", "stored", "warm", "warm"]
        assert found["a"] == "stored"

    run(add, FakeTier(capacity_blocks=60), path, limit=40)
    run(test, FakeTier(capacity_blocks=60), path, limit=8)  # it has lost everything


def test_what_the_tier_had_no_room_for_is_computed_again_once_it_has() -> None:
    tier = FakeTier(capacity_blocks=20)
    tier.room = 0

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=A))
        assert await statuses(service) == {"a": "warm"}
        engine.pool.make_free(100)
        (lost,) = engine.freezing.state()["wanted"]
        tier.room = 100
        (document,) = await service.add("base", documents(a=A))
        assert document.status == "warm"
        engine.pool.make_free(100)
        assert await statuses(service) == {"a": "stored"}
        assert engine.freezing.state()["wanted"] == []
        assert [entry for entry, *_ in tier.calls].count(lost) >= 2

    run(test, tier, limit=8)


def test_who_waits_gets_documents_that_the_tier_takes_one_after_the_other() -> None:
    """Room for one document at a time: both are stored in the end."""
    tier = FakeTier(capacity_blocks=20)
    tier.room = 4

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        async def writes() -> None:
            while True:
                await asyncio.sleep(0)
                tier.room = 9

        writing = asyncio.create_task(writes())
        added = await service.add("base", documents(a=A, b=B))
        writing.cancel()
        assert [document.status for document in added] == ["warm", "stored"]

    run(test, tier, limit=8)


def test_after_a_restart_nothing_that_is_stored_is_computed(path: Path) -> None:
    tier = FakeTier()
    run(fill, tier, path)
    tier.restart()

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.finish()
        assert await tiers(service) == {"a": "disk", "b": "disk"}

    assert run(test, tier, path).computed == []


def test_after_a_restart_what_the_tier_has_lost_is_computed(path: Path) -> None:
    tier = FakeTier()
    first = run(fill, tier, path)
    lost = first.computed[0][0]
    tier.lose(lost)
    tier.restart()

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.finish()
        assert sorted((await statuses(service)).values()) == ["stored", "warm"]

    assert {entry for entry, _ in run(test, tier, path).computed} == {lost}


def test_without_files_a_restart_computes_everything(path: Path) -> None:
    tier = FakeTier(has_disk=False)
    run(fill, tier, path)
    tier.restart()
    assert len(run(settled, tier, path).computed) == 4


def test_what_was_deleted_just_before_a_crash_is_removed_from_the_tier(path: Path) -> None:
    tier = FakeTier()
    run(fill, tier, path)
    store = Store(str(path), "model")
    store.delete("base", "a", "base", [])
    store.close()
    tier.restart()
    assert len(tier.held()) == 2
    run(settled, tier, path)
    assert [*tier.held()] == [entry_name("base", np.array([1], np.int32), np.array(B, np.int32))]


def test_what_changed_is_computed_and_its_old_text_removed(path: Path) -> None:
    tier = FakeTier()
    run(fill, tier, path)
    tier.restart()

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.add("base", documents(a=C))
        assert await statuses(service) == {"a": "warm", "b": "stored"}

    assert len(run(test, tier, path).computed) == 1
    assert len(tier.held()) == 2


def test_another_model_serves_nothing_of_the_old_one(path: Path) -> None:
    """Its tier has a fingerprint of its own; even with the same one, no document is `stored`."""
    tier = FakeTier()
    run(fill, tier, path)
    tier.restart()

    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        assert await statuses(service) == {"a": "failed", "b": "failed"}
        assert await tiers(service) == {"a": None, "b": None}

    run(test, tier, path, model="another")
    assert tier.held() == {}


def test_what_was_computed_behind_other_siblings_is_computed_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text in another context is another record; the old one is removed."""
    texts = {name: [*range(start, start + 40)] for name, start in zip("abcd", count(100, 100))}
    tier, shape = FakeTier(), Shape(BLOCK_SIZE, max_prompt_tokens=201, chunk_tokens=40)

    async def with_siblings(service: KnowledgeService, engine: FakeEngine) -> None:
        await service.create_base(CreateBase(name="family"))
        await service.add("family", documents(**texts))
        await service.finish()

    run(with_siblings, tier, path, limit=90, shape=shape)
    before = tier.held()
    tier.restart()
    assert run(settled, tier, path, shape=shape).computed == []
    monkeypatch.setattr(siblings, "SIBLING_TOKENS", 7)
    assert len(run(settled, tier, path, limit=90, shape=shape).computed) == 4
    assert len(tier.held()) == 4
    assert not tier.held().keys() & before.keys()


def test_a_reset_leaves_documents_cold_until_they_are_computed() -> None:
    async def test(service: KnowledgeService, engine: FakeEngine) -> None:
        await fill(service, engine)
        engine.pool.reset()
        tier.has_disk = False
        tier.lose_disk()
        tier.lose_host()
        assert await statuses(service) == {"a": "cold", "b": "cold"}
        await service.warm("base", WarmDocuments(wait=True))
        assert await statuses(service) == {"a": "warm", "b": "warm"}

    tier = FakeTier()
    run(test, tier)


TEXTS = [[*range(start, start + length)] for start, length in ((10, 15), (30, 45), (80, 9))]


class Machine(RuleBasedStateMachine):
    """Any order of changes, evictions, losses and restarts: what is reported is so, and what is
    there is not computed again."""

    ids = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.tier = FakeTier(capacity_blocks=60)
        self.texts: dict[str, list[int]] = {}
        self.open()
        self.do(self.service.create_base(CreateBase(name="base", context="none")))

    def do(self, work: Any) -> Any:
        return self.runner.run(work)

    def open(self) -> None:
        self.engine = FakeEngine(12, self.tier)
        store = Store(f"{self.folder.name}/manifest.sqlite", "model")
        self.service = KnowledgeService(self.engine, store, SHAPE, poll_s=1000)
        self.do(self.service.start())
        self.do(self.service.finish())

    def teardown(self) -> None:
        self.do(self.service.close())
        self.runner.close()
        self.folder.cleanup()

    def entries(self) -> dict[str, str]:
        """By document."""
        found = self.service.catalogue.bases["base"].documents
        return {document.id: document.entry for document in found.values()}

    def there(self) -> set[str]:
        return {*self.engine.pool.warm(), *self.tier.held()}

    @rule(document=ids, text=st.sampled_from(TEXTS))
    def add(self, document: str, text: list[int]) -> None:
        before, self.engine.computed = self.there(), []
        (added,) = self.do(self.service.add("base", documents(**{document: text})))
        self.texts[document] = text
        assert added.status in ("warm", "stored")
        assert not before & {entry for entry, _ in self.engine.computed}

    @rule(document=ids)
    def delete(self, document: str) -> None:
        if self.texts.pop(document, None) is not None:
            self.do(self.service.delete("base", document))

    @rule(num_blocks=st.integers(1, 12))
    def evict(self, num_blocks: int) -> None:
        self.engine.pool.make_free(num_blocks)

    @rule()
    def lose_host(self) -> None:
        self.tier.lose_host()

    @precondition(lambda self: self.tier.held())
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.tier.lose(data.draw(st.sampled_from(sorted(self.tier.held()))))

    @rule()
    def warm(self) -> None:
        found = self.do(self.service.warm("base", WarmDocuments(wait=True)))
        assert all(document.status in ("warm", "stored") for document in found)

    @rule(crashes=st.booleans())
    def restart(self, crashes: bool) -> None:
        if crashes:
            self.engine.unfreeze = self.refuse  # type: ignore[method-assign]
            for document in list(self.texts)[:1]:
                self.delete(document)
        self.do(self.service.close())
        self.tier.restart()
        before = {entry for entry in self.tier.held() if entry in self.entries().values()}
        self.open()
        computed = {entry for entry, _ in self.engine.computed}
        assert computed == set(self.entries().values()) - before

    async def refuse(self, entries: list[str]) -> None:
        raise RuntimeError("the engine is gone")

    @invariant()
    def agrees(self) -> None:
        check_integrity(self.engine.pool)
        shown = {d.id: d for d in self.do(self.service.documents("base", None, 9)).data}
        assert shown.keys() == self.texts.keys()
        warm, held = self.engine.pool.warm(), self.tier.held()
        for document, entry in self.entries().items():
            place = "gpu" if entry in warm else held.get(entry)
            status = {"gpu": "warm", None: "cold"}.get(place, "stored")
            assert (shown[document].tier, shown[document].status) == (place, status)
        assert self.there() <= set(self.entries().values()), "a deleted document is still there"


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=15)
