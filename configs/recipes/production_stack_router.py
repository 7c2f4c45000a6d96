# SPDX-License-Identifier: Apache-2.0
# The router of vllm-project/production-stack, which sends a request to the engine that holds most
# of its documents. Start it in place of `vllm-router`, with the same options, where this package is
# installed beside it:
#   VLLM_SEGREUSE_ADMIN_TOKEN=... python production_stack_router.py --routing-logic session \
#     --session-key x-segreuse-documents --service-discovery static --static-backends ... \
#     --static-models ... --port 8001
# Clients send two headers of segreuse_tools.routing: that of digests_headers(ids, extra_keys), by
# which this router knows the documents, and that of routing_headers(ids, extra_keys), by which
# stock session routing goes where no engine holds any. Documents are those of knowledge bases;
# each engine may have all of them, or some.
#
# Not run: production-stack was not installed. Its code was read (August 2026); a test runs this
# class on a stand-in for `SessionRouter`, with two servers over HTTP.

from __future__ import annotations

import asyncio
import os
from typing import Any

from vllm_router.routers import routing_logic

from segreuse_tools.routing import DIGESTS_HEADER
from segreuse_tools.scoring import Scorer


class DocumentRouter(routing_logic.SessionRouter):
    """By documents; by the session's header where no engine holds any."""

    async def route_request(
        self,
        endpoints: list[Any],
        engine_stats: dict[str, Any],
        request_stats: dict[str, Any],
        request: Any,
        request_json: dict[str, Any],
    ) -> str:
        """URL of the engine; see `RoutingInterface` there."""
        digests = [it for it in request.headers.get(DIGESTS_HEADER, "").split(",") if it]
        if digests:
            urls = {endpoint.url for endpoint in endpoints}
            # It asks engines over HTTP now and then: not in the event loop.
            best = await asyncio.to_thread(self._scorer(urls).best, digests)
            if best is not None:
                return best
        return await super().route_request(
            endpoints, engine_stats, request_stats, request, request_json
        )

    def _scorer(self, urls: set[str]) -> Scorer:
        """Of the engines that there are now."""
        known: tuple[set[str], Scorer] | None = getattr(self, "_known", None)
        if known is None or known[0] != urls:
            token = os.environ["VLLM_SEGREUSE_ADMIN_TOKEN"]
            known = urls, Scorer({url: url for url in sorted(urls)}, token)
            self._known = known
        return known[1]


# Before `vllm_router.app` is imported, which takes the class by its name.
routing_logic.SessionRouter = DocumentRouter


if __name__ == "__main__":
    from vllm_router.app import main

    main()
