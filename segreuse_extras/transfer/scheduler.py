# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's process knows of KV that another engine has computed, or will read.

    arrives ─► receives ─► loading ─► ended         its blocks are written by the other connector
    answered ─► sends ─► ended                      they are read, and held until that has ended

A prefill engine tells with the blocks how far their KV is exact (`EXACT_UNTIL`). Behind that no
block of the request that receives them gets an exact name, and none of it donates. Where nothing is
told, as behind a router that drops the key, nothing is exact. One that is preempted computes its
prompt itself, and all of it is exact then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from segreuse_extras.transfer.options import TransferServer
from vllm_segreuse.compat.block_events import Naming
from vllm_segreuse.options.values import is_int
from vllm_segreuse.plan import TO_THE_END, ReusePlan
from vllm_segreuse.scheduling.feature import Ending, Feature
from vllm_segreuse.scheduling.making import Making
from vllm_segreuse.scheduling.planner import BlockPins

if TYPE_CHECKING:
    from vllm.v1.request import Request

EXACT_UNTIL = "segreuse_exact_until"
"""Key of `kv_transfer_params`: so many tokens of the prompt, from its first one on, have KV that
reads nothing but their own text."""


def told_until(params: Mapping[str, Any] | None) -> int:
    """Tokens up to which KV that is received is exact, as its sender tells; 0: it does not."""
    told: Any = (params or {}).get(EXACT_UNTIL)
    return max(int(told), 0) if is_int(told) else 0


class Transfers(Feature):
    """Of one engine.

    Args:
        overlaps: whether a step is scheduled while another is under way, and blocks may be written
            by another engine meanwhile.
    """

    name = "transfer"

    def __init__(self, overlaps: bool) -> None:
        self._overlaps = overlaps
        self._received: dict[str, int] = {}
        self._set_aside: set[str] = set()
        self._loading: set[str] = set()
        self._sending: set[str] = set()
        self._naming: ReceivedNames | None = None
        self._pins: DeferredPins | None = None

    # Who names blocks, and who holds them.

    def naming(self, inner: Naming) -> Naming:
        self._naming = ReceivedNames(inner, self._received)
        return self._naming

    def pins(self, inner: BlockPins) -> BlockPins:
        if self._overlaps:
            self._pins = DeferredPins(inner)
        return self._pins or inner

    def end_step(self, plans: Sequence[ReusePlan], runs_model: bool) -> None:
        if self._pins is not None:
            self._pins.end_step()

    def processed(self) -> None:
        if self._pins is not None:
            self._pins.processed()

    def holds(self, request_id: str) -> bool:
        return request_id in self._loading or request_id in self._sending

    def exact_until(self, request: Request) -> int:
        """Tokens of a request that ends up to which its KV is exact; asked before it is forgotten
        (`finished`)."""
        assert self._naming is not None
        ends = self._naming.exact_ends(request.request_id)
        return min((int(request.num_computed_tokens), *(ends or ())))

    # What the other connector does.

    def receives(self, request: Request, stop: int, is_async: bool) -> None:
        """The other connector is to supply a request with its tokens up to `stop`.

        Args:
            is_async: whether vLLM sets it aside until it is told that they are there; else they
                are there once its first step is over, and nobody tells.
        """
        self.computes(request)
        told = told_until(request.kv_transfer_params)
        self._received[request.request_id] = TO_THE_END if told >= stop else told
        if is_async:
            self._set_aside.add(request.request_id)

    def computes(self, request: Request) -> None:
        """It supplies the request with nothing, which has no blocks yet."""
        self._received.pop(request.request_id, None)
        self._set_aside.discard(request.request_id)

    def is_received(self, request: Request) -> bool:
        """Whether the other connector supplies, or has supplied, what the request has."""
        return request.request_id in self._received

    def is_set_aside(self, request: Request) -> bool:
        """Whether vLLM sets a request aside until it has been supplied."""
        return request.request_id in self._set_aside

    def loads(self, request: Request) -> None:
        """It begins to fill the request's blocks, and tells when it has (`ended`)."""
        self._loading.add(request.request_id)

    def sends(self, request: Request) -> None:
        """It reads the blocks of a request that has ended."""
        self._sending.add(request.request_id)

    def ended(self, loaded: Iterable[str], sent: Iterable[str]) -> None:
        """It has filled, or read, the blocks of these."""
        self._loading.difference_update(loaded)
        self._sending.difference_update(sent)

    def loading(self, request_ids: Iterable[str]) -> set[str]:
        """Those of the given requests whose blocks it fills."""
        return self._loading.intersection(request_ids)

    def finished(self, ending: Ending) -> None:
        self.computes(ending.request)

    def status(self) -> Mapping[str, Any]:
        return {"transfers": {"loading": len(self._loading), "sending": len(self._sending)}}


class ReceivedNames:
    """`Naming` of an engine that receives KV.

    Args:
        inner: of what the engine computes.
        received: tokens up to which the KV of requests is exact that receive theirs, by id.
    """

    def __init__(self, inner: Naming, received: Mapping[str, int]) -> None:
        self._inner = inner
        self._received = received
        self.restoration: Callable[[str], int] = inner.restoration
        self.exact_stop: Callable[[str], int] = inner.exact_stop
        self.left_behind: Callable[[str, int, int], Sequence[int]] = inner.left_behind
        self.written_until: Callable[[str], int] = inner.written_until
        self.allocation_failed: Callable[[str, int], None] = inner.allocation_failed

    def exact_ends(self, request_id: str) -> tuple[int, int] | None:
        """No block behind what the sender has told is exact, whoever computes it."""
        ends = self._inner.exact_ends(request_id)
        stop = self._received.get(request_id)
        if stop is None:
            return ends
        known, awaited = ends or (stop, stop)
        return min(known, stop), min(awaited, stop)


class DeferredPins:
    """Pins of donors that last until the step which reads them is over.

    Steps run one behind the other, so what a step reads is not overwritten by later steps. Another
    engine writes when it likes: a block that is free may be written while a step that was scheduled
    before is still under way. vLLM frees blocks of requests late for the same reason
    (`Scheduler.defer_block_free`).

    Args:
        inner: the block pool.
    """

    def __init__(self, inner: BlockPins) -> None:
        self._inner = inner
        self._scheduled: list[int] = []
        self._under_way: deque[list[int]] = deque()
        self.pin: Callable[[list[int]], None] = inner.pin
        self.idle: Callable[[Iterable[int]], set[int]] = inner.idle
        self.num_free_blocks: Callable[[], int] = inner.num_free_blocks

    def unpin(self, block_ids: list[int]) -> None:
        """Release them once the step that is being scheduled is over."""
        self._scheduled += block_ids

    def end_step(self) -> None:
        """A step is scheduled."""
        self._under_way.append(self._scheduled)
        self._scheduled = []

    def processed(self) -> None:
        """The oldest step that is under way is over."""
        if self._under_way:
            self._inner.unpin(self._under_way.popleft())


def start(making: Making) -> Transfers | None:
    """That of an engine; None: nothing is transferred."""
    if TransferServer.of(making.core.config).beside is None:
        return None
    vllm_config = making.core.vllm_config
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return Transfers(transfer.is_kv_consumer and vllm_config.max_concurrent_batches > 1)
