# SPDX-License-Identifier: Apache-2.0
"""Errors put into one engine of a `World`, each once, where an error of ours could come from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.parts import parts_of

if TYPE_CHECKING:
    from tests.stateful.world import World


class InjectedError(Exception):
    """Not a fault of anybody's."""


class _Silence(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Keep everything but the traces of what was injected."""
        return not (record.exc_info and isinstance(record.exc_info[1], InjectedError))


_silence = _Silence()

SITES = (
    *("add", "search", "match", "recipe", "prefix", "pin"),
    *("insert", "listed", "missing", "count", "release"),
    *("see", "store", "stored", "load", "left"),
)
"""Places in the scheduler's half: within `add`, `match`, `_account` and `finished`, and where
blocks are named. "search" and "listed" are those of similar segments; the next four those of the
second tier: blocks are evicted, rows are reserved, they are written, plans read them. "left": the
search for what an earlier turn has left."""

OTHERS = ("allocation", "planned", "pass")
"""An allocation is refused, or that of a request with a plan; the worker's pass fails."""


class Faults:
    """Arms one error at a time; the place that is reached next raises it."""

    def __init__(self, world: World) -> None:
        logging.getLogger("vllm.segreuse").addFilter(_silence)
        self.armed: set[str] = set()
        self.raised: dict[str, int] = dict.fromkeys((*SITES, *OTHERS), 0)
        self._world = world
        side, pool = world.side, world.pool
        self._wrap(parts_of(side).planner, "add", "add", before=False)
        self._wrap(parts_of(side).planner, "_match", "match")
        self._wrap(parts_of(side).methods, "recipe", "recipe")
        self._wrap(pool, "prefix_state", "prefix")
        self._wrap(pool, "pin", "pin")
        self._wrap(world.index, "insert", "insert")
        self._wrap(world.index, "missing", "missing")
        self._wrap(side.parts.accounts, "_count", "count")
        self._wrap(side.parts.accounts, "carried_out", "count", before=False)
        self._wrap(parts_of(side).namespaces, "release", "release", before=False)
        if parts_of(side).feature["similar"].similar is not None:
            self._wrap(parts_of(side).feature["similar"].similar.store, "slots", "search")
            self._wrap(parts_of(side).feature["similar"].similar.store, "inserted", "listed")
        if parts_of(side).tier is not None:
            self._wrap(parts_of(side).tier.catalogue, "see", "see", before=False)
            self._wrap(parts_of(side).tier.manager, "prepare_store", "store", before=False)
            self._wrap(parts_of(side).tier.manager, "complete_store", "stored")
            self._wrap(parts_of(side).tier.manager, "prepare_load", "load")
        self._wrap(parts_of(side).conversations, "found", "left")
        allocate = world.manager.allocate_slots

        def refusing(*args: Any, **kwargs: Any) -> Any:
            planned = kwargs.get("num_external_computed_tokens", 0) > 0
            refused = self._strikes("allocation") or (planned and self._strikes("planned"))
            return None if refused else allocate(*args, **kwargs)

        world.manager.allocate_slots = refusing

    def arm(self, site: str) -> None:
        """The next call of `site` fails: one of `SITES` or of `OTHERS`."""
        if site == "pass":
            self._world.worker.fail_next_pass = True
            self.raised["pass"] += 1
        else:
            self.armed.add(site)

    def disarm(self) -> None:
        """Nothing fails any more."""
        self.armed.clear()

    def _strikes(self, site: str) -> bool:
        if site not in self.armed:
            return False
        self.armed.discard(site)
        self.raised[site] += 1
        return True

    def _wrap(self, owner: Any, name: str, site: str, before: bool = True) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            strikes = self._strikes(site)
            if strikes and before:
                raise InjectedError(site)
            result = inner(*args, **kwargs)
            if strikes:
                raise InjectedError(site)
            return result

        setattr(owner, name, faulty)
