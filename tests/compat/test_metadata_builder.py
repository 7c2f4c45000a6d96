# SPDX-License-Identifier: Apache-2.0
"""A pass has a metadata builder of its own, with room for its rows, which takes no row for a
decode; the runner's configuration and builder stay as they are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from vllm_segreuse.compat.metadata_builder import private_builder

CPU = torch.device("cpu")


class Builder:
    """What all of vLLM's builders have in common."""

    reorder_batch_threshold: int | None = None

    def __init__(self, spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.given = (spec, layer_names, vllm_config, device)


class FlashInferBuilder(Builder):
    """Takes rows of few tokens, which the runner moves to the front, for decodes."""

    reorder_batch_threshold = 1


def config() -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=512),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, static_forward_context={"layer": 1}
        ),
        model_config="model",
    )


def made(kind: type[Builder], vllm_config: Any) -> Any:
    backend = SimpleNamespace(get_builder_cls=lambda: kind)
    return private_builder(backend, "spec", ["layer"], vllm_config, 300, CPU)


def test_it_has_room_for_the_rows_of_a_pass_and_no_cuda_graphs() -> None:
    spec, names, given, device = made(Builder, config()).given
    assert (spec, names, device) == ("spec", ["layer"], CPU)
    assert given.scheduler_config.max_num_seqs == 300
    assert given.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    assert given.scheduler_config.max_num_batched_tokens == 512
    assert given.compilation_config.static_forward_context == {"layer": 1}
    assert given.model_config == "model"


def test_the_runners_configuration_stays_as_it_is() -> None:
    ours, original = config(), config()
    made(FlashInferBuilder, ours)
    assert ours == original


@pytest.mark.parametrize(("kind", "threshold"), [(Builder, None), (FlashInferBuilder, 0)])
def test_every_row_of_a_pass_is_prefill(kind: type[Builder], threshold: int | None) -> None:
    assert made(kind, config()).reorder_batch_threshold == threshold
    assert FlashInferBuilder.reorder_batch_threshold == 1, "the runner's own still sorts its rows"


def test_no_row_counts_as_a_decode_for_vllm() -> None:
    """As FlashInfer's builder splits a batch."""
    from vllm.v1.attention.backends.utils import split_decodes_and_prefills

    starts = torch.tensor([0, 1, 9, 10], dtype=torch.int32)
    rows: Any = SimpleNamespace(
        max_query_len=8,
        num_reqs=3,
        num_actual_tokens=10,
        query_start_loc_cpu=starts,
        is_prefilling=None,
    )
    threshold = made(FlashInferBuilder, config()).reorder_batch_threshold
    decodes, prefills, *_ = split_decodes_and_prefills(rows, decode_threshold=threshold)
    assert (decodes, prefills) == (0, 3)
    decodes, prefills, *_ = split_decodes_and_prefills(rows, decode_threshold=1)
    assert (decodes, prefills) == (1, 2)
