# SPDX-License-Identifier: Apache-2.0
"""What the host knows of a pass's tokens, and when it has to ask the device."""

import numpy as np
import pytest
import torch

from vllm_segreuse.prefill import tokens as tokens_module
from vllm_segreuse.prefill.tokens import HostTokens, Index, TokenTable, row_starts, upload

CPU = torch.device("cpu")


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that the host would wait for, as it would for a GPU."""
    monkeypatch.setattr(tokens_module, "host_reads", lambda device: False)


def table(host: HostTokens | None = None) -> TokenTable:
    positions, request = torch.tensor([3, 4, 6, 7]), torch.tensor([0, 0, 0, 1])
    return TokenTable(positions + 100, positions, request, positions * 2, host)


def known() -> HostTokens:
    return HostTokens(np.array([3, 4, 6, 7]), np.array([0, 0, 0, 1]))


def test_the_host_reads_what_the_cpu_computes() -> None:
    assert tokens_module.host_reads(CPU)
    assert not tokens_module.host_reads(torch.device("meta"))
    index = Index.computed(torch.tensor([1, 3]))
    assert index.host is not None
    part = table().take(index)
    assert part.host is not None
    assert part.host.positions.tolist() == [4, 7]
    assert part.host.request.tolist() == [0, 1]


@pytest.mark.usefixtures("behind")
def test_what_the_device_has_chosen_only_the_device_knows() -> None:
    tokens = table(known())
    assert Index.known(np.array([1, 3]), CPU).host.tolist() == [1, 3]  # type: ignore[union-attr]
    chosen = Index.computed(torch.tensor([1, 3]))
    assert chosen.host is None
    assert tokens.take(chosen).host is None
    assert table(None).host is None
    assert table(None).take(Index.known(np.array([1, 3]), CPU)).host is None
    for index in (Index.known(np.array([1, 3]), CPU), slice(1, 4, 2)):
        part = tokens.take(index)
        assert part.host is not None
        assert part.host.positions.tolist() == part.positions.tolist() == [4, 7]
        assert part.host.request.tolist() == part.request.tolist() == [0, 1]
        assert part.slots.tolist() == [8, 14]
        assert part.token_ids.tolist() == [104, 107]


@pytest.mark.usefixtures("behind")
def test_rows_are_found_by_asking_the_device_once() -> None:
    tokens = table(None)
    assert row_starts(tokens).tolist() == [True, False, True, True]
    assert tokens.host is not None
    assert tokens.host.positions.tolist() == [3, 4, 6, 7]
    assert tokens.host.request.tolist() == [0, 0, 0, 1]
    assert tokens.read_host() is tokens.host


def test_an_upload_is_the_array_and_of_its_type() -> None:
    for dtype in (np.int32, np.int64, np.bool_):
        array = np.array([1, 0, 1, 1], dtype)[::2]
        uploaded = upload(array, CPU)
        assert uploaded.tolist() == array.tolist()
        assert uploaded.numpy().dtype == dtype
    assert Index.known(np.array([1, 3], np.int32), CPU).device.dtype == torch.int64
