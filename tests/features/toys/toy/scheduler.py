# SPDX-License-Identifier: Apache-2.0
"""Greets requests that ask for it."""

from __future__ import annotations

from toy.options import ToyRequest, ToyServer
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Arriving, Ending, Feature
from vllm_segreuse.scheduling.making import Making


class Greeting(Feature):
    """Of one engine."""

    name = "toy"

    def __init__(self, core: Core) -> None:
        self._stats = core.stats
        self._left = ToyServer.of(core.config).toy_greetings
        self._greeted: set[str] = set()
        self.calls = {"toy": lambda: {"left": self._left}}

    def admit(self, arriving: Arriving) -> None:
        """Greet it."""
        if self._left and ToyRequest.of(arriving.options).toy:
            self._left -= 1
            self._greeted.add(arriving.request.request_id)
            self._stats.inc("toy_greetings_total")

    def finished(self, ending: Ending) -> None:
        """Say so."""
        if ending.request.request_id in self._greeted:
            self._greeted.remove(ending.request.request_id)
            ending.add(greeting="hello")


def start(making: Making) -> Greeting:
    """That of an engine."""
    return Greeting(making.core)
