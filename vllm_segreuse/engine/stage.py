# SPDX-License-Identifier: Apache-2.0
"""Which of a model's decoder layers this process has, under pipeline parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Stage(NamedTuple):
    """A pipeline stage.

    Attributes:
        number: of the stage, from 0 on.
        num_stages: how many there are.
        first, stop: its layers, `[first, stop)`.
        num_layers: of the model.
    """

    number: int
    num_stages: int
    first: int
    stop: int
    num_layers: int

    @classmethod
    def alone(cls, num_layers: int) -> Stage:
        """The only one, with all layers."""
        return cls(0, 1, 0, num_layers, num_layers)

    @property
    def is_first(self) -> bool:
        """Whether it has the embeddings."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples."""
        return self.number == self.num_stages - 1


def stage_of(vllm_config: VllmConfig, found: int) -> Stage:
    """That of this worker.

    Args:
        found: decoder layers that it has.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    count = parallel.pipeline_parallel_size
    if count == 1:
        return Stage.alone(found)
    first, stop = model.get_layers_start_end_indices(parallel)
    assert stop - first == found, (first, stop, found)
    number = parallel.rank // parallel.tensor_parallel_size % count
    return Stage(number, count, first, stop, model.get_total_num_hidden_layers())


def layers_of_stages(vllm_config: VllmConfig) -> list[range]:
    """The layers of each stage, in order. Within one go a pass chooses tokens by those of the
    first."""
    from vllm.distributed.utils import get_pp_indices

    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    count = vllm_config.parallel_config.pipeline_parallel_size
    return [range(*get_pp_indices(num_layers, stage, count)) for stage in range(count)]
