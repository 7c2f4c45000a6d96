# SPDX-License-Identifier: Apache-2.0
"""Documents that are frozen and let go while requests reuse them (a part of `soak`).

As the service of knowledge bases does, without its texts: each document is computed by a request
that carries an order to freeze its blocks, the oldest is let go as a new one comes, and one that
was given back under pressure returns once a prompt has brought it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_segreuse.plan import FreezeOrder

EXTRA_KEY = "a"
KEPT = 5
"""Documents at a time: about half of what may be frozen in the pool of `soak`."""
_FIRST_TOKEN = 1  # the one before it is the context that all documents share


class Ingestion(NamedTuple):
    """A document to be computed now, and what has become of others because of it."""

    tokens: list[int]
    order: FreezeOrder
    let_go: int
    returns: bool


class Documents:
    """The documents of one engine.

    Args:
        core: vLLM's `EngineCore`, in this process.
        tokens: makes that many tokens of text.
        length: draws the number of tokens of a new document.
    """

    def __init__(
        self, core: Any, tokens: Callable[[int], list[int]], length: Callable[[], int]
    ) -> None:
        self._core = core
        self._tokens = tokens
        self._length = length
        self._context = tokens(_FIRST_TOKEN)
        self._documents: dict[str, list[int]] = {}
        self._made = 0

    def texts(self) -> list[list[int]]:
        """Of the documents that nobody has let go, warm or not."""
        return list(self._documents.values())

    def next(self) -> Ingestion:
        """A document that a prompt has brought back, else a new one in the place of the oldest."""
        wanted = [name for name in self.state()["wanted"] if name in self._documents]
        if wanted:
            return self._ingestion(wanted[0], let_go=0, returns=True)
        let_go = list(self._documents)[: max(0, len(self._documents) - KEPT + 1)]
        self._release(let_go)
        name = f"document-{self._made}"
        self._made += 1
        self._documents[name] = self._tokens(self._length())
        return self._ingestion(name, len(let_go), returns=False)

    def end(self) -> None:
        """Let go of all."""
        self._release(list(self._documents))

    def state(self) -> dict[str, Any]:
        """`SchedulerSide.frozen`."""
        return dict(self._core.segreuse_call("frozen"))

    def _ingestion(self, name: str, let_go: int, returns: bool) -> Ingestion:
        tokens = self._context + self._documents[name]
        return Ingestion(tokens, FreezeOrder(name, 0, 1, _FIRST_TOKEN), let_go, returns)

    def _release(self, names: list[str]) -> None:
        for name in names:
            del self._documents[name]
        self._core.segreuse_call("unfreeze", names)
