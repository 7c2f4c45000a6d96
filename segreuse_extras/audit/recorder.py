# SPDX-License-Identifier: Apache-2.0
"""A worker's half of the audit: logits are kept and compared on the device, where they are.

Of an audited request a row of logits is held (4 bytes for each token of the vocabulary) until it is
compared or forgotten; the scheduler's side bounds their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from segreuse_extras.audit.messages import AuditOrders, AuditResult, Recording, Reference
from vllm_segreuse.compat.sampler import Sampled


class _Audited:
    """What is kept of a request that reuses."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.first: Tensor | None = None
        self.favourites: dict[int, Tensor] = {}

    def see(self, num_tokens: int, logits: Tensor) -> None:
        position = num_tokens - self._recording.num_prompt_tokens
        if position == 0 and self.first is None:
            self.first = logits.to(torch.float32, copy=True)
        if 0 <= position < self._recording.tokens:
            self.favourites.setdefault(position, logits.argmax())


class _Comparison:
    """A reference that runs."""

    def __init__(self, reference: Reference, audited: _Audited) -> None:
        self._reference = reference
        self._audited = audited
        self._kl: Tensor | None = None
        self._agreed: dict[int, Tensor] = {}
        self.is_done = False

    def see(self, num_tokens: int, logits: Tensor) -> None:
        """Compare one position, and have the answer's token said there."""
        position = num_tokens - self._reference.num_prompt_tokens
        if not 0 <= position < len(self._reference.answer):
            return
        if position == 0 and self._audited.first is not None:
            self._kl = divergence(logits, self._audited.first)
            self._audited.first = None
        if position in self._audited.favourites:
            self._agreed[position] = logits.argmax() == self._audited.favourites[position]
        logits.fill_(-math.inf)
        logits[self._reference.answer[position]] = 0.0
        self.is_done = position == len(self._reference.answer) - 1

    def result(self) -> AuditResult:
        """Waits for the device."""
        kl = math.nan if self._kl is None else float(self._kl)
        agreed = sum(bool(each) for each in self._agreed.values())
        return AuditResult(kl, agreed, len(self._agreed))


class Recorder:
    """One per worker."""

    def __init__(self) -> None:
        self._audited: dict[str, _Audited] = {}
        self._running: dict[str, _Comparison] = {}

    @property
    def num_held(self) -> int:
        """Requests whose logits are held."""
        return len(self._audited) + len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether no logits are wanted."""
        return not self.num_held

    def take(self, orders: AuditOrders) -> None:
        """A step begins."""
        for request_id, recording in orders.record.items():
            self._audited[request_id] = _Audited(recording)
        for request_id, reference in orders.compare.items():
            audited = self._audited.pop(reference.audited, None)
            if audited is not None:
                self._running[request_id] = _Comparison(reference, audited)
        for request_id in orders.forget:
            self._audited.pop(request_id, None)
            self._running.pop(request_id, None)

    @torch.inference_mode()
    def see(self, rows: Iterable[Sampled], logits: Tensor) -> None:
        """The model has computed a step; nothing is sampled yet.

        Args:
            rows: of the requests of the step.
            logits: `[n, vocabulary]`, as the model gave them. Rows of references are changed; all
                others are only read.
        """
        for request_id, row, num_tokens in rows:
            seen = self._audited.get(request_id) or self._running.get(request_id)
            if seen is not None:
                seen.see(num_tokens, logits[row])

    def take_results(self) -> dict[str, AuditResult]:
        """References that were compared since the last call, by id."""
        done = [request_id for request_id, each in self._running.items() if each.is_done]
        return {request_id: self._running.pop(request_id).result() for request_id in done}


def divergence(full: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence of `other` from `full`, in nats; a scalar on their device.

    Args:
        full: `[vocabulary]`, logits.
        other: the same.

    Returns:
        At least 0; NaN if one of the logits is.
    """
    expected, given = (torch.log_softmax(one.double(), -1) for one in (full, other))
    # A token that both give no chance at all adds 0, not 0 times infinity.
    terms = torch.where(expected == -math.inf, 0.0, expected.exp() * (expected - given))
    return terms.sum().clamp(min=0)
