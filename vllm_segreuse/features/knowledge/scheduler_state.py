# SPDX-License-Identifier: Apache-2.0
"""What the scheduler reports of frozen entries, and what follows from it: uses are counted and
saved, and entries that prompts want back are computed again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from vllm_segreuse.features.knowledge.catalogue import Catalogue
from vllm_segreuse.features.knowledge.engine import Engine
from vllm_segreuse.features.knowledge.errors import UnavailableError
from vllm_segreuse.features.knowledge.warming import Urgency, Warming

_LAST_WORD_S = 2.0
"""For which a closing service waits for the scheduler."""

logger = logging.getLogger("vllm.segreuse")

Uses = list[tuple[str, int, float | None]]
"""(entry, hits, last use)"""


class SchedulerState:
    """Asked whenever somebody wants to know, and in the background.

    Args:
        engine: whose scheduler.
        catalogue: counts what is used.
        warming: computes what should return.
        write_uses: writes uses into the manifest; raises UnavailableError.
        poll_s: how often it is asked in the background.
    """

    def __init__(
        self,
        engine: Engine,
        catalogue: Catalogue,
        warming: Warming,
        write_uses: Callable[[Uses], Awaitable[None]],
        poll_s: float,
    ) -> None:
        self._engine = engine
        self._catalogue = catalogue
        self._warming = warming
        self._write_uses = write_uses
        self._poll_s = poll_s
        self._unsaved: set[str] = set()
        self._poller: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def read(self) -> dict[str, Any]:
        """The frozen pool as it is; what was used meanwhile is counted."""
        state = await self._engine.frozen()
        self.changed(self._catalogue.count_uses(state["uses"]))
        for name in state["wanted"]:
            if name in self._catalogue.entries and self._warming.error(name) is None:
                self._warming.add(name, Urgency.BACKGROUND)
        return state

    def changed(self, entries: Iterable[str]) -> None:
        """What was counted of these entries is not in the manifest yet."""
        self._unsaved.update(entries)

    async def save_uses(self) -> None:
        """Write what was counted since the last time into the manifest.

        Raises:
            UnavailableError: it could not be written; the next time tries it again.
        """
        names, self._unsaved = self._unsaved, set()
        known = {n: e for n, e in self._catalogue.entries.items() if n in names}
        uses = [(name, entry.hits, entry.last_used) for name, entry in known.items()]
        if uses:
            try:
                await self._write_uses(uses)
            except BaseException:
                self._unsaved |= names
                raise

    # In the background.

    def start_polling(self) -> None:
        """From now on, until `stop`."""
        self._poller = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        """Ask no more by itself."""
        self._closing.set()
        if self._poller is not None:
            await asyncio.wait({self._poller}, timeout=_LAST_WORD_S)
            self._poller.cancel()

    async def save_the_last_uses(self) -> None:
        """Ask a last time, and write what was counted; nothing is raised."""
        try:
            state = await asyncio.wait_for(self._engine.frozen(), _LAST_WORD_S)
            self.changed(self._catalogue.count_uses(state["uses"]))
        except Exception as error:  # it has stopped before us
            logger.debug("segment reuse: the last uses of documents are not known: %s", error)
        try:
            await self.save_uses()
        except UnavailableError as error:
            logger.error("segment reuse: knowledge bases: uses are not counted: %s", error)

    async def _poll(self) -> None:
        reported = ""
        while not await self._closes_within(self._poll_s):
            try:
                await self._warming.let_go(())
                if self._catalogue.entries:
                    await self.read()
                    await self.save_uses()
            except Exception as error:  # the next caller gets it, too
                if str(error) != reported:
                    reported = str(error)
                    logger.warning("segment reuse: knowledge bases: %s", reported)

    async def _closes_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()
