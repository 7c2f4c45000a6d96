# SPDX-License-Identifier: Apache-2.0
"""The second tier: evicted blocks return from host memory and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm_segreuse.features.tier.own_prefix import OwnPrefix
from vllm_segreuse.features.tier.store import TierStore
from vllm_segreuse.plan import ReusePlan, TierDone, TierOrders
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Arriving, Feature
from vllm_segreuse.scheduling.making import Making
from vllm_segreuse.scheduling.tracked import Bypass


class Tiering(Feature):
    """Of one engine.

    Args:
        core: of the engine.
        store: its tier.
    """

    name = "tier"

    def __init__(self, core: Core, store: TierStore) -> None:
        self.store = store
        self.listeners = (store,)
        self._pool = core.pool

    def admit(self, arriving: Arriving) -> None:
        """The request finds its own prefix in the tier, too."""
        tracked, mode = arriving.tracked, arriving.tracked.mode
        self.store.recall(tracked.prompt.namespace, arriving.key)
        resident = OwnPrefix(arriving.request, self._pool, self.store.exact_entry)
        tracked.prompt = replace(tracked.prompt, resident_blocks=resident)
        may = not isinstance(mode, Bypass) or mode.restores
        tracked.restores = arriving.may_restore and may

    def end_step(self, plans: Sequence[ReusePlan], runs_model: bool) -> TierOrders | None:
        """What the workers do for it in the step."""
        self.store.note_plans(plans)
        return self.store.take_orders(runs_model)

    def reported(self, message: TierDone) -> None:
        """Orders that the workers have carried out."""
        self.store.note(message)

    def has_pending_work(self) -> bool:
        """Whether the engine has to step although no request needs it."""
        return self.store.has_pending_work

    def status(self) -> dict[str, Any]:
        """How much it holds."""
        return {"tier": self.store.counts()._asdict()}

    def close(self) -> None:
        """The engine ends."""
        self.store.close()


def start(making: Making) -> Tiering | None:
    """That of an engine; None: it has no second tier."""
    return None if making.store is None else Tiering(making.core, making.store)
