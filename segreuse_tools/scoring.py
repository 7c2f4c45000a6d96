# SPDX-License-Identifier: Apache-2.0
"""For routers of several servers: how much of a request's documents each of them holds.

    scorer = Scorer({"a": "http://10.0.0.1:8000", "b": "http://10.0.0.2:8000"}, token)
    scorer.scores(document_digests(["travel.md", "faq.md"], "handbook"))
    # {"a": 4211.0, "b": 0.0}

Servers are asked for all that they hold (`GET /plugins/segreuse/v1/holdings`), not for each
request: an answer is remembered for a while. Only documents of knowledge bases are known. Imports
neither torch nor vLLM.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx
from pydantic import ValidationError

from segreuse_extras.viewer.asking import authorized, root_of
from segreuse_tools.knowledge.client import checked_token
from vllm_segreuse.features.knowledge.schemas import PREFIX, Holdings, Tier

logger = logging.getLogger("vllm.segreuse")

WEIGHTS: Mapping[Tier, float] = {"gpu": 1.0, "host": 0.8, "disk": 0.4}
"""Worth of a token by the place where its KV is. Where copies are slow, give smaller ones."""

SESSION_TOKEN_HEADER = "x-session-token"
"""By which llm-d's `session-affinity-scorer` finds the pod that a request belongs to."""


class Scorer:
    """One per router. It may be used by several threads: the worst is that a server is asked twice.

    Args:
        servers: URL of each server, by name; `/v1` at its end does no harm.
        token: the administrator's; white space around it does not count.
        weights: of a token, by place.
        max_age_s: for so long what a server has answered counts.
        timeout_s: a server that has not answered by then holds nothing until it is asked again.
        transport: of the requests; None: the network.
        clock: seconds.

    Raises:
        ValueError: no header can carry the token, or a URL is none of HTTP.
    """

    def __init__(
        self,
        servers: Mapping[str, str],
        token: str,
        weights: Mapping[Tier, float] = WEIGHTS,
        *,
        max_age_s: float = 2.0,
        timeout_s: float = 1.0,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers = {name: root_of(url) for name, url in servers.items()}
        self._weights = weights
        self._max_age_s = max_age_s
        self._clock = clock
        self._client = httpx.Client(
            headers=authorized(checked_token(token)), timeout=timeout_s, transport=transport
        )
        # By server: when it was asked, and weighted tokens by digest.
        self._known: dict[str, tuple[float, dict[str, float]]] = {
            name: (float("-inf"), {}) for name in self._servers
        }
        # At once: several that do not answer cost the time of one.
        self._threads = ThreadPoolExecutor(max(1, len(self._servers)))

    def scores(self, digests: str | Iterable[str]) -> dict[str, float]:
        """Tokens of these documents that each server holds, weighted by their place.

        A server with several engines (`--data-parallel-size`) counts with what each of them holds
        on average: its own balancer chooses among them.

        Args:
            digests: of the documents (`routing.document_digests`), or of a single one.
        """
        wanted = [digests] if isinstance(digests, str) else [*dict.fromkeys(digests)]
        now = self._clock()
        stale = [name for name in self._servers if now - self._known[name][0] >= self._max_age_s]
        for name, held in zip(stale, self._threads.map(self._ask, stale), strict=True):
            self._known[name] = now, held
        return {
            name: sum(self._known[name][1].get(digest, 0.0) for digest in wanted)
            for name in self._servers
        }

    def best(self, digests: str | Iterable[str]) -> str | None:
        """The server that holds most of them; None: no server holds any."""
        scores = self.scores(digests)
        name = max(scores, key=scores.__getitem__, default=None)
        return None if name is None or not scores[name] else name

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        self._client.close()

    def _ask(self, name: str) -> dict[str, float]:
        """Weighted tokens of each document of a server, by digest."""
        try:
            answer = self._client.get(f"{self._servers[name]}{PREFIX}/holdings")
            answer.raise_for_status()
            engines = Holdings.model_validate_json(answer.content).engines
        except (httpx.HTTPError, ValidationError) as error:
            logger.warning("segment reuse: %s does not say what it holds: %s", name, error)
            return {}
        held: dict[str, float] = {}
        for engine in engines:
            for digest, document in engine.documents.items():
                worth = document.tokens * self._weights[document.tier] / len(engines)
                held[digest] = held.get(digest, 0.0) + worth
        return held


def session_token(pod: str) -> dict[str, str]:
    """The header by which llm-d sends a request to a pod.

    Args:
        pod: as llm-d names endpoints: namespace, slash, name of the pod, and `-rank-0`.
    """
    return {SESSION_TOKEN_HEADER: base64.b64encode(pod.encode()).decode()}
