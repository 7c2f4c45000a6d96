# SPDX-License-Identifier: Apache-2.0
"""What workers have proven of a model's images."""

from __future__ import annotations

from vllm_segreuse.prefill.feature import MakingWorker, WorkerFeature


class ProvenImages(WorkerFeature):
    """Of one worker.

    Args:
        merge_size: patches of an image per token in a row, and in a column.
    """

    name = "images"

    def __init__(self, merge_size: int) -> None:
        self._merge_size = merge_size

    def fact(self) -> int:
        """The scheduler's half tells images apart by it."""
        return self._merge_size


def start(making: MakingWorker) -> ProvenImages | None:
    """That of a worker; None: the model's images are not reused."""
    merge_size = making.runtime.merge_size
    return None if merge_size is None else ProvenImages(merge_size)
