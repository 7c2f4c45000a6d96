# SPDX-License-Identifier: Apache-2.0
"""Computing documents in the background, so that requests of users hardly notice.

While others use the engine, one chunk is under way at a time; an idle engine gets a few.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple

from vllm_segreuse.features.knowledge.changes import UNREADABLE
from vllm_segreuse.features.knowledge.compression import NO_COMPRESSOR, compressor
from vllm_segreuse.features.knowledge.engine import Engine, NotFrozenError
from vllm_segreuse.features.knowledge.store import Tokens
from vllm_segreuse.features.knowledge.work import Work, joined
from vllm_segreuse.plan import FreezeOrder

logger = logging.getLogger("vllm.segreuse")

AT_ONCE = 4
_LOOK_AGAIN_S = 0.02
_ATTEMPTS = 2
"""An entry may be evicted between two of its parts."""

NO_ROOM = "the frozen pool had no room for it: warm it again later"
"""What is wrong where the engine does not say it."""


class Urgency(enum.IntEnum):
    """What is computed first; within one, what was added first."""

    ASKED_FOR = 0
    BACKGROUND = 1


class _Job(NamedTuple):
    urgency: Urgency
    number: int
    entry: str


class WarmingStatus(NamedTuple):
    """What a queue of entries holds.

    Attributes:
        pending: entries that wait or are being computed.
        jobs: jobs of the queue, also those that are passed over.
        again: entries that are computed once more if what is under way fails or is for nothing.
        failed: entries that could not be computed the last time, and why.
        unwanted: entries that are still to be unfrozen, since the engine could not do it yet.
    """

    pending: frozenset[str]
    jobs: int
    again: frozenset[str]
    failed: dict[str, str]
    unwanted: frozenset[str]


class Warming:
    """The queue of entries to be computed, and who works on it.

    Args:
        engine: computes and freezes.
        work_of: what is to be computed for an entry, or None if it has gone.
        is_wanted: whether an entry still belongs to a document.
        chosen: is told which tokens of a compressed entry were chosen, by their position.
        names_of: the documents that have an entry, for the log.
    """

    def __init__(
        self,
        engine: Engine,
        work_of: Callable[[str], Awaitable[Work | None]],
        is_wanted: Callable[[str], bool],
        chosen: Callable[[str, Tokens], Awaitable[None]],
        names_of: Callable[[str], Sequence[str]] = lambda entry: (),
    ) -> None:
        self._engine = engine
        self._work_of = work_of
        self._is_wanted = is_wanted
        self._chosen = chosen
        self._names_of = names_of
        self._queue: list[_Job] = []
        self._done: dict[str, asyncio.Future[None]] = {}
        self._errors: dict[str, str] = {}
        self._numbers = count()
        self._workers: set[asyncio.Task[None]] = set()
        self._started: set[str] = set()
        self._again: set[str] = set()
        self._released: set[str] = set()  # while they were computed
        self._computing = 0
        self._urgencies: dict[str, Urgency] = {}
        self._unwanted: set[str] = set()
        self._refusals: dict[str, str] = {}
        self._said = ""
        self._compress = compressor()

    def add(self, entry: str, urgency: Urgency) -> asyncio.Future[None]:
        """Have an entry computed; done when it was, or has failed.

        One that is being computed is computed once more if that fails, or was for nothing: it was
        deleted, and has been added anew.
        """
        done = self._done.get(entry)
        if done is None:
            done = self._done[entry] = asyncio.get_running_loop().create_future()
            self._errors.pop(entry, None)
        elif entry in self._started:
            if urgency is Urgency.ASKED_FOR:
                self._again.add(entry)
            return done
        elif self._urgencies[entry] <= urgency:
            return done
        self._push(urgency, entry)
        return done

    def _push(self, urgency: Urgency, entry: str) -> None:
        # A second job of an entry, more urgent than the first, makes that one be passed over.
        self._urgencies[entry] = urgency
        heapq.heappush(self._queue, _Job(urgency, next(self._numbers), entry))
        if len(self._workers) < AT_ONCE:
            self._workers.add(asyncio.create_task(self._work()))

    def is_queued(self, entry: str) -> bool:
        """Whether it waits, or is being computed."""
        return entry in self._done

    def error(self, entry: str) -> str | None:
        """Why it could not be computed the last time."""
        return self._errors.get(entry)

    def status(self) -> WarmingStatus:
        """What it holds now."""
        return WarmingStatus(
            pending=frozenset(self._done.keys() | self._urgencies.keys()),
            jobs=len(self._queue),
            again=frozenset(self._again),
            failed=dict(self._errors),
            unwanted=frozenset(self._unwanted),
        )

    async def finish(self) -> None:
        """Wait until nothing waits or is being computed any more."""
        while self._done:
            await asyncio.wait(list(self._done.values()))

    async def let_go(self, entries: Iterable[str]) -> None:
        """Unfreeze entries that no document has any more, and forget what was wrong with them.

        If the engine cannot do it now, it is told again at every further call.
        """
        self._unwanted.update(entries)
        self._unwanted = {entry for entry in self._unwanted if not self._is_wanted(entry)}
        for entry in self._unwanted:
            self._errors.pop(entry, None)
        self._released |= self._unwanted & self._started
        telling, self._unwanted = self._unwanted, set()
        if not telling:
            return
        try:
            await self._engine.unfreeze(sorted(telling))
        except Exception as error:
            said = f"{len(telling)} documents that were removed are still frozen: {error}"
            if said != self._said:
                logger.warning("segment reuse: knowledge bases: %s; trying again", said)
            self._said = said
            self._unwanted |= telling
        else:
            self._said = ""

    async def close(self) -> None:
        """Stop; what is under way is aborted."""
        workers = list(self._workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for done in self._done.values():
            done.cancel()
        self._done.clear()

    async def _work(self) -> None:
        try:
            while self._queue:
                entry = heapq.heappop(self._queue).entry
                if entry in self._done and entry not in self._started:
                    await self._work_on(entry)
        finally:
            # Before anything is awaited: whoever adds a job next must start a worker.
            task = asyncio.current_task()
            assert task is not None
            self._workers.discard(task)

    async def _work_on(self, entry: str) -> None:
        self._started.add(entry)
        self._released.discard(entry)
        self._errors.pop(entry, None)
        try:
            await self._compute(entry)
        except Exception as error:
            self._errors[entry] = f"it could not be computed: {str(error) or type(error).__name__}"
        finally:
            self._started.discard(entry)
            self._refusals.pop(entry, None)
        if entry in self._errors:
            names = ", ".join(self._names_of(entry)) or entry
            said = self._errors[entry]
            logger.warning("segment reuse: knowledge bases: %s failed: %s", names, said)
        was_for_nothing = entry in self._errors or entry in self._released
        self._released.discard(entry)
        if entry in self._again:
            self._again.discard(entry)
            if was_for_nothing:
                self._push(Urgency.ASKED_FOR, entry)
                return
        del self._urgencies[entry]
        self._done.pop(entry).set_result(None)
        if not self._is_wanted(entry):
            await self.let_go([entry])

    async def _compute(self, entry: str) -> None:
        work = await self._work_of(entry)
        if work is None:
            if self._is_wanted(entry):
                self._errors[entry] = UNREADABLE
            return
        for _ in range(_ATTEMPTS):
            kept: list[Tokens] = []
            num_frozen = await self._parts(entry, work, kept)
            if not self._is_wanted(entry):
                return
            if num_frozen == len(work.prompts):
                try:
                    if work.compression is not None:
                        await self._chosen(entry, joined(work, kept))
                except Exception:  # nobody could name it, and what is warm is not computed again
                    await self._engine.unfreeze([entry])
                    raise
                return
            if num_frozen == 0:  # it was refused, not evicted
                break
        self._errors[entry] = self._refusals.pop(entry, NO_ROOM)

    async def _parts(self, entry: str, work: Work, kept: list[Tokens]) -> int:
        """Compute and freeze parts of an entry, in order, as long as they can be and are wanted;
        how many."""
        for part in range(len(work.prompts)):
            while self._computing and self._engine.num_others(self._computing):
                await asyncio.sleep(_LOOK_AGAIN_S)
            if not self._is_wanted(entry):
                return part
            order = FreezeOrder(entry, part, len(work.prompts), work.num_context)
            self._computing += 1
            try:
                frozen = await self._part(work, order, kept)
            except NotFrozenError as refusal:
                frozen, self._refusals[entry] = False, str(refusal)
            finally:
                self._computing -= 1
            if not frozen:
                return part
            self._refusals.pop(entry, None)
        return len(work.prompts)

    async def _part(self, work: Work, order: FreezeOrder, kept: list[Tokens]) -> bool:
        """Compute and freeze a part; of a compressed one, note in `kept` what was chosen."""
        if work.stand_ins is not None:
            tokens = work.prompts[order.part]
            return await work.stand_ins.freeze(self._engine, work.extra_key, tokens, order)
        if work.compression is None:
            prompt = work.prompts[order.part].tolist()
            return await self._engine.compute(prompt, work.extra_key, order)
        if self._compress is None:
            raise NotFrozenError(NO_COMPRESSOR)
        chosen, frozen = await self._compress(self._engine, work, order)
        kept.append(chosen)
        return frozen
