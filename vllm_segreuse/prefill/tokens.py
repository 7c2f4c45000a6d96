# SPDX-License-Identifier: Apache-2.0
"""Tokens of a pass, on the device and, as far as it knows them, on the host.

A GPU runs behind the host, and a host that reads one number back waits until the GPU has caught up.
Whatever follows from the plans alone is therefore computed twice, here with numpy and there with
torch. Only what was chosen by its score is known to the device alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device, in stream order; the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def host_reads(device: torch.device) -> bool:
    """Whether the host sees what the device computes without waiting for it."""
    return device.type == "cpu"


@dataclass(frozen=True)
class Index:
    """Some tokens of a batch: ascending flat indices.

    Attributes:
        device: int64 `[tokens]`.
        host: the same, or None where only the device knows them.
    """

    device: torch.Tensor
    host: np.ndarray | None

    @classmethod
    def known(cls, indices: np.ndarray, device: torch.device) -> Index:
        """Of indices that follow from the plans."""
        return cls(upload(indices.astype(np.int64), device), indices)

    @classmethod
    def computed(cls, indices: torch.Tensor) -> Index:
        """Of indices that the device has computed."""
        return cls(indices, indices.numpy() if host_reads(indices.device) else None)

    def __len__(self) -> int:
        return self.device.numel()

    def within(self, others: Index) -> np.ndarray:
        """Where these stand among tokens that contain them; the host knows both."""
        assert self.host is not None
        assert others.host is not None
        return np.flatnonzero(np.isin(others.host, self.host))

    def without(self, others: Index) -> Index:
        """Those that are not among some others; the host knows both."""
        assert self.host is not None
        assert others.host is not None
        return Index.known(np.setdiff1d(self.host, others.host), self.device.device)


class HostTokens(NamedTuple):
    """What decides how tokens are laid out, where the host knows it: int64 `[tokens]` each."""

    positions: np.ndarray
    request: np.ndarray


@dataclass
class TokenTable:
    """Active tokens of several requests, sorted by request, then by position.

    Attributes:
        token_ids: int64 `[tokens]`.
        positions: int64 `[tokens]`.
        request: index of each token's request, int64 `[tokens]`.
        slots: KV slot of each token, int64 `[tokens]`.
        host: positions and requests, or None where only the device knows which tokens these are.
        mrope_positions: int64 `[3, tokens]`, by which M-RoPE rotates; None: there are no
            images, and `positions` are.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    request: torch.Tensor
    slots: torch.Tensor
    host: HostTokens | None = None
    mrope_positions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.host is None and host_reads(self.positions.device):
            self.host = HostTokens(self.positions.numpy(), self.request.numpy())

    def __len__(self) -> int:
        return self.positions.numel()

    def take(self, index: Index | slice) -> TokenTable:
        """The given rows."""
        there: torch.Tensor | slice = index.device if isinstance(index, Index) else index
        here = index.host if isinstance(index, Index) else index
        host = None
        if self.host is not None and here is not None:
            host = HostTokens(self.host.positions[here], self.host.request[here])
        return TokenTable(
            self.token_ids[there],
            self.positions[there],
            self.request[there],
            self.slots[there],
            host,
            None if self.mrope_positions is None else self.mrope_positions[:, there],
        )

    def parts(self, size: int) -> Iterator[tuple[slice, TokenTable]]:
        """At most so many tokens at once, in order, and where they stand."""
        for begin in range(0, len(self), size):
            part = slice(begin, begin + size)
            yield part, self.take(part)

    @property
    def rotary_positions(self) -> torch.Tensor:
        """What the model is given: int64 `[tokens]`, or `[3, tokens]` beside images."""
        return self.positions if self.mrope_positions is None else self.mrope_positions

    def read_host(self) -> HostTokens:
        """Positions and requests; waits for the device where only that knows them."""
        if self.host is None:
            both = torch.stack([self.positions, self.request]).cpu().numpy()
            self.host = HostTokens(both[0], both[1])
        return self.host


def row_starts(tokens: TokenTable) -> np.ndarray:
    """bool `[tokens]`: where a contiguous run of positions of one request begins."""
    positions, request = tokens.read_host()
    starts = np.ones(len(positions), dtype=np.bool_)
    starts[1:] = (positions[1:] != positions[:-1] + 1) | (request[1:] != request[:-1])
    return starts
