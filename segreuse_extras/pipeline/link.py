# SPDX-License-Identifier: Apache-2.0
"""Messages of a pass between pipeline stages.

They have communicators of their own: those of vLLM match what is sent by its order, and the step's
own states are on their way. Each begins with three numbers that the host reads; what the device has
computed goes from device to device. Nothing that is sent is waited for within its step.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from vllm.distributed import get_pp_group

from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.prefill.tokens import Index


class MessageKind(IntEnum):
    """What a message is about."""

    STATES = 0
    PLAN_ENDS = 1
    STEP_ENDS = 2


class PlanVerdict(IntEnum):
    """How a plan has ended; of several stages, the least."""

    FAILED = 0
    """A stage could not prepare it."""

    NOT_FINITE = 1
    FINE = 2


class StageMessage(NamedTuple):
    """From the stage before.

    Attributes:
        tokens: of the batch, of `STATES`.
        state: theirs.
        verdict: int32 `[]`, of `PLAN_ENDS`: a `PlanVerdict` of all stages so far.
        figures: float32 `[n]`, of `PLAN_ENDS`: see `goes.Go`.
    """

    kind: MessageKind
    tokens: Index | None = None
    state: LayerState | None = None
    verdict: torch.Tensor | None = None
    figures: torch.Tensor | None = None


_Retained = tuple[Any, torch.Tensor]
"""A send under way, and what is sent, which must not go before."""

_Sent = list[_Retained]


class Link:
    """Between the stages that have one tensor-parallel rank's part of the layers.

    To make one is collective: every worker does, at the same place.

    Args:
        device: that has the states.

    Attributes:
        sample: what a stage hands to the next, of one token; to be set before anything is received.
    """

    sample: LayerState

    def __init__(self, device: torch.device) -> None:
        group = get_pp_group()
        self._ranks, self._own = group.ranks, group.rank_in_group
        self._device = device
        self._between_devices = group.make_sibling_device_group(group_desc="segreuse_states")
        self._between_hosts = _sibling_of_hosts(group)
        self._forward: deque[_Sent] = deque([[], []])
        self._back: deque[_Sent] = deque([] for _ in range(2 * group.world_size + 1))

    # Forward.

    def send_states(self, index: Index, state: LayerState) -> None:
        """What has left the layers here; it may change as soon as this returns."""
        known = index.host is not None
        self._send_header(MessageKind.STATES, len(index), known)
        if index.host is not None:
            self._send(torch.from_numpy(index.host).long(), self._between_hosts)
        else:
            self._send(index.device, self._between_devices)
        for tensor in state.tensors.values():
            # A copy: layers, and whoever collects chunks, write over what they were given.
            self._send(tensor.clone(), self._between_devices)

    def send_plan_ends(self, verdict: torch.Tensor, figures: torch.Tensor) -> None:
        """All of a plan's go was handed on.

        Args:
            verdict, figures: see `StageMessage`.
        """
        self._send_header(MessageKind.PLAN_ENDS, len(figures))
        self._send(verdict.to(torch.int32), self._between_devices)
        if len(figures):
            self._send(figures, self._between_devices)

    def send_step_ends(self) -> None:
        """Nothing more of this step."""
        self._send_header(MessageKind.STEP_ENDS)

    def receive(self) -> StageMessage:
        """The next message of the stage before; waits for it."""
        source = self._own - 1
        kind, count, known = self._take(torch.empty(3, dtype=torch.int64), source).tolist()
        if kind == MessageKind.STEP_ENDS:
            return StageMessage(MessageKind.STEP_ENDS)
        if kind == MessageKind.PLAN_ENDS:
            verdict = torch.empty((), dtype=torch.int32, device=self._device)
            self._take_device(verdict, source)
            figures = torch.empty(count, device=self._device)
            if count:
                self._take_device(figures, source)
            return StageMessage(MessageKind.PLAN_ENDS, verdict=verdict, figures=figures)
        if known:
            numbers = self._take(torch.empty(count, dtype=torch.int64), source)
            index = Index.known(numbers.numpy(), self._device)
        else:
            numbers = torch.empty(count, dtype=torch.int64, device=self._device)
            index = Index.computed(self._take_device(numbers, source))
        tensors = {
            name: self._take_device(each.new_empty(count, *each.shape[1:]), source)
            for name, each in self.sample.tensors.items()
        }
        return StageMessage(MessageKind.STATES, index, LayerState(**{"residual": None} | tensors))

    # Back.

    def send_endings(self, numbers: torch.Tensor) -> None:
        """From the last stage to all others: of the plans whose go has ended in this step.

        Args:
            numbers: float64 `[n]`, on the host (`endings.pack`).
        """
        for stage in range(self._own):
            self._back[-1].append(self._sent(numbers, self._between_hosts, stage))

    def receive_endings(self, count: int) -> torch.Tensor:
        """So many numbers of those that the last stage has sent; waits for them."""
        return self._take(torch.empty(count, dtype=torch.float64), len(self._ranks) - 1)

    def end_step(self) -> None:
        """Let go of what has been taken.

        What went forward in the step before has been, or is about to be: the next stage waits for
        nothing behind it. Endings are read as many steps later as there are stages, and after as
        many again vLLM has ended that step everywhere.
        """
        for sent in (self._forward, self._back):
            for work, _ in sent.popleft():
                work.wait()
            sent.append([])

    def _send_header(self, kind: MessageKind, count: int = 0, known: bool = False) -> None:
        header = torch.tensor([kind, count, known], dtype=torch.int64)
        self._send(header, self._between_hosts)

    def _send(self, tensor: torch.Tensor, group: ProcessGroup) -> None:
        self._forward[-1].append(self._sent(tensor.contiguous(), group, self._own + 1))

    def _sent(self, tensor: torch.Tensor, group: ProcessGroup, stage: int) -> _Retained:
        return torch.distributed.isend(tensor, dst=self._ranks[stage], group=group), tensor

    def _take(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        torch.distributed.recv(tensor, src=self._ranks[stage], group=self._between_hosts)
        return tensor

    def _take_device(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        torch.distributed.recv(tensor, src=self._ranks[stage], group=self._between_devices)
        return tensor


def _sibling_of_hosts(group: Any) -> ProcessGroup:
    """As `make_sibling_device_group`, for tensors of the host."""
    made = None
    for ranks in group.group_ranks:
        between = torch.distributed.new_group(ranks, backend="gloo", group_desc="segreuse_hosts")
        if group.rank in ranks:
            made = between
    assert made is not None
    return made
