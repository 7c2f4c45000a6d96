# SPDX-License-Identifier: Apache-2.0
"""Which engine a request goes to.

round_robin  one after the other
least_busy   the one that has least to do
session      the session's own
hash         by the smallest hash of a document, as `segreuse_tools.routing` and nginx do
prefix       where most of the prompt's beginning is held
documents    where most of its tokens are held, at any position

`round_robin`, `session` and `hash` know nothing of the engines but which are alive. `prefix` and
`documents` know what each holds and has to do, at once and without a fault: a bound for any real
router. They pass by engines that have more to do than the mean of all, by `bound` prompts of
average length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from bench.fleet.caches import Holders
from bench.fleet.traffic import FleetRequest, FloatArray

ROUTERS = ("round_robin", "least_busy", "session", "hash", "prefix", "documents")


class FleetView:
    """What a router may know.

    Args:
        engines: how many there are.
        bound_s: work by which an engine may be behind the mean of all.

    Attributes:
        is_alive: bool `[engines]`.
        free_at_s: when each has done what it was given.
        by_name, by_id: who holds which prefix, and which component at any position.
    """

    def __init__(self, engines: int, bound_s: float) -> None:
        self.engines = engines
        self.bound_s = bound_s
        self.is_alive = np.ones(engines, np.bool_)
        self.free_at_s: FloatArray = np.zeros(engines)
        self.by_name = Holders(engines)
        self.by_id = Holders(engines)

    def backlog_s(self, now_s: float) -> FloatArray:
        """Work that each has yet to do; of one that is dead, without end."""
        return np.where(self.is_alive, np.maximum(self.free_at_s - now_s, 0.0), math.inf)


class FleetRouter:
    """Chooses engines.

    Args:
        by: one of `ROUTERS`.
        view: of the fleet.
    """

    def __init__(self, by: str, view: FleetView) -> None:
        self._view = view
        self._round = itertools.count()
        self._choose: Callable[[FleetRequest, float], int] = {
            "round_robin": self._next,
            "least_busy": self._least_busy,
            "session": lambda request, _: self._of_hash(request.session),
            "hash": lambda request, _: self._of_hash(min(map(_mixed, request.documents))),
            "prefix": self._of_prefix,
            "documents": self._of_documents,
        }[by]

    def choose(self, request: FleetRequest, now_s: float) -> int:
        """Number of an engine that is alive."""
        return self._choose(request, now_s)

    def _next(self, request: FleetRequest, now_s: float) -> int:
        while not self._view.is_alive[at := next(self._round) % self._view.engines]:
            pass
        return at

    def _least_busy(self, request: FleetRequest, now_s: float) -> int:
        return self._where_most(self._view.by_id, [], request, now_s)

    def _of_hash(self, value: int) -> int:
        """Always the same one, as long as it lives."""
        while not self._view.is_alive[at := value % self._view.engines]:
            value = _mixed(value)
        return at

    def _of_prefix(self, request: FleetRequest, now_s: float) -> int:
        masks, everybody = [], (1 << self._view.engines) - 1
        for name in request.names:
            everybody &= self._view.by_name.mask(name)
            if not everybody:
                break
            masks.append(everybody)
        return self._where_most(self._view.by_name, masks, request, now_s)

    def _of_documents(self, request: FleetRequest, now_s: float) -> int:
        masks = [self._view.by_id.mask(id) for id in request.ids]
        return self._where_most(self._view.by_id, masks, request, now_s)

    def _where_most(
        self, holders: Holders, masks: list[int], request: FleetRequest, now_s: float
    ) -> int:
        """Of the engines within the bound the one that holds most; of several, the least busy."""
        backlog_s = self._view.backlog_s(now_s)
        least_s = backlog_s.min()
        mean_s = backlog_s[self._view.is_alive].mean()
        fitting = np.flatnonzero(backlog_s <= max(mean_s + self._view.bound_s, least_s))
        if masks:
            held = holders.tokens_held(masks, [part.tokens for part in request.parts[: len(masks)]])
            held = held[fitting]
            fitting = fitting[held == held.max()]
        backlog_s = backlog_s[fitting]
        idle = fitting[backlog_s == backlog_s.min()]
        return int(idle[request.number % len(idle)])


def _mixed(value: int) -> int:
    return hash((value, 2))
