# SPDX-License-Identifier: Apache-2.0
"""Similar segments: their index follows what requests leave behind."""

from __future__ import annotations

from vllm_segreuse.methods import Methods
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Ending, Feature


class SimilarSegments(Feature):
    """Of one engine.

    Args:
        core: of the engine.
        methods: search for similar segments, where the server has the option.
    """

    name = "similar"

    def __init__(self, core: Core, methods: Methods) -> None:
        self._health = core.health
        self._methods = methods
        self.calls = {"set_similarity": methods.set_similarity}

    def finished(self, ending: Ending) -> None:
        """Index what was cached since."""
        if ending.tracked is not None:
            with self._health.contained("the similarity index"):
                self._methods.catch_up()
