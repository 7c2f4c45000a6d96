# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request hold the KV of its own tokens, for the block pool that names them."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_segreuse.plan import TO_THE_END
from vllm_segreuse.scheduling.tracked import TrackedRequest


class ExactNames:
    """What `compat.block_events.Naming` asks.

    Args:
        requests: live requests with extra keys, by id.
    """

    def __init__(self, requests: Mapping[str, TrackedRequest]) -> None:
        self._requests = requests

    def exact_ends(self, request_id: str) -> tuple[int, int] | None:
        """As known so far, and once what is restored is in place; None: a request of vLLM's own."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else tracked.exact_ends

    def restoration(self, request_id: str) -> int:
        """Number of the restoration of a request's plan; it has one where the two ends differ."""
        plan = self._requests[request_id].plan
        assert plan is not None
        assert plan.restoration is not None
        return plan.restoration.number

    def exact_stop(self, request_id: str) -> int:
        """Behind this position a request takes no exact blocks; see `TrackedRequest`."""
        tracked = self._requests.get(request_id)
        return TO_THE_END if tracked is None else tracked.exact_stop

    def allocation_failed(self, request_id: str, blocks: int) -> None:
        """A request that pins donors would wait for these for ever: it gives up as many next."""
        tracked = self._requests.get(request_id)
        if tracked is not None and tracked.plan is not None:
            tracked.allocation_failed = blocks
