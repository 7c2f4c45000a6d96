# SPDX-License-Identifier: Apache-2.0
"""Which namespaces have drifted, by the audits of their requests.

    audits ──► the last `window` of a namespace ──► more than a tenth above `max_kl`: it has drifted
                        ▲                                       │
                        └────── after `recover_s`, empty ◄──────┘

What is kept is bounded: the namespace that was audited longest ago is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from segreuse_extras.audit.options import AuditOptions

MOST_NAMESPACES = 4096


class Drifted(NamedTuple):
    """A namespace that has drifted.

    Attributes:
        namespace: digest.
        namespace_class: of it.
        audits: that were looked at.
        above: of them, above the bound.
        until_s: by the clock, when it recovers.
    """

    namespace: int
    namespace_class: str
    audits: int
    above: int
    until_s: float


class Drifting:
    """One per engine.

    Args:
        options: of the audit.
        clock: seconds.
    """

    def __init__(self, options: AuditOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._audited: OrderedDict[int, deque[float]] = OrderedDict()
        self._drifted: OrderedDict[int, Drifted] = OrderedDict()

    def audited(self) -> list[int]:
        """Digests of the namespaces whose audits are kept, the one audited longest ago first."""
        return list(self._audited)

    def note(self, namespace: int, namespace_class: str, kl: float) -> Drifted | None:
        """An audit has ended; the namespace, if it has drifted by that."""
        bound = self._options.max_kl
        if bound is None or self.has_drifted(namespace):
            return None
        kls = self._audited.setdefault(namespace, deque(maxlen=self._options.window))
        self._audited.move_to_end(namespace)
        kls.append(kl)
        above = sum(each > bound for each in kls)
        if len(kls) < self._options.min_audits or 10 * above <= len(kls):
            _bound(self._audited)
            return None
        del self._audited[namespace]
        until_s = self._clock() + self._options.recover_s
        found = Drifted(namespace, namespace_class, len(kls), above, until_s)
        self._drifted[namespace] = found
        _bound(self._drifted)
        return found

    def has_drifted(self, namespace: int) -> bool:
        """Whether it has, and has not recovered."""
        return namespace in self._drifted and self._drifted[namespace].until_s > self._clock()

    def recovered(self) -> list[Drifted]:
        """Those that have recovered since the last call."""
        now = self._clock()
        over = [each for each in self._drifted.values() if each.until_s <= now]
        for each in over:
            del self._drifted[each.namespace]
        return over

    def all_drifted(self) -> list[Drifted]:
        """Those that have not recovered, the oldest first."""
        return [each for each in self._drifted.values() if each.until_s > self._clock()]


def _bound(by_namespace: OrderedDict[int, Any]) -> None:
    while len(by_namespace) > MOST_NAMESPACES:
        by_namespace.popitem(last=False)
