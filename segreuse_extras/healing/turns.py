# SPDX-License-Identifier: Apache-2.0
"""Turns of conversations that wait for being computed in full.

turn      | exact | moved, or computed behind moved text | not computed
healing           | a part | a part | a part              up to the last whole block

Each part is a request of one token behind the prefix hit of the parts before it, so vLLM does the
work, and names the blocks. Parts are short: who arrives meanwhile waits for one of them at most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from segreuse_extras.healing.metrics import Outcome

if TYPE_CHECKING:
    from vllm.v1.request import Request

MOST_WAITING = 64


class Turn(NamedTuple):
    """Tokens of a request, in whole blocks.

    Attributes:
        request: vLLM's.
        num_blocks: those that are meant.
    """

    request: Request
    num_blocks: int

    def begins(self, request: Request) -> bool:
        """Whether the prompt of a request goes on with this turn: equal chained hashes mean equal
        text, salt and adapter."""
        last = self.num_blocks - 1
        names = request.block_hashes
        return last < len(names) and names[last] == self.request.block_hashes[last]


class Unhealed:
    """Of one engine. The turn that has waited longest goes first: its user is the next to write.

    Args:
        count: is told what becomes of turns.
    """

    def __init__(self, count: Callable[[Outcome], None]) -> None:
        self._count = count
        self._waiting: OrderedDict[str, Turn] = OrderedDict()  # by the id of its request

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next(self) -> Turn | None:
        """The one that is healed now."""
        return next(iter(self._waiting.values()), None)

    def add(self, turn: Turn) -> None:
        """A turn has ended."""
        self._waiting[turn.request.request_id] = turn
        if len(self._waiting) > MOST_WAITING:
            self.end("forgotten")

    def goes_on(self, request: Request) -> None:
        """A prompt has arrived: the turns that it begins with need no healing any more."""
        for request_id in [i for i, it in self._waiting.items() if it.begins(request)]:
            del self._waiting[request_id]
            self._count("overtaken")

    def end(self, outcome: Outcome) -> None:
        """The one that is healed now waits no more."""
        self._waiting.popitem(last=False)
        self._count(outcome)

    def reset(self) -> None:
        """Nothing is cached any more."""
        while self._waiting:
            self.end("forgotten")
