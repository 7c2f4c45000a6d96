# SPDX-License-Identifier: Apache-2.0
"""What workers have proven of a model's images."""

from __future__ import annotations

from segreuse_extras.images.proof import prove_images
from vllm_segreuse.compat.model_runner import loaded_model
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
    parts = making.runtime.parts
    if parts is None:
        return None
    merge_size = prove_images(loaded_model(), making.vllm_config.model_config, parts)
    return None if merge_size is None else ProvenImages(merge_size)
