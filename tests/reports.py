# SPDX-License-Identifier: Apache-2.0
"""Reports of requests, as tests read them."""

from typing import Any


class Whole(dict[str, Any]):
    """A report with the fields of features that took no part, which are not sent."""

    def __missing__(self, name: str) -> Any:
        # Loaded here: it loads numba, and spawned workers import what tests import.
        from vllm_segreuse.scheduling.tracked import USUAL

        return USUAL[name]
