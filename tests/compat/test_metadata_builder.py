# SPDX-License-Identifier: Apache-2.0
"""A pass has a metadata builder of its own, with room for its rows, which takes no row for a
decode; the runner's configuration and builder stay as they are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from vllm_segreuse.compat.metadata_builder import build_rows, private_builder

CPU = torch.device("cpu")


class Builder:
    """What all of vLLM's builders have in common."""

    reorder_batch_threshold: int | None = None

    def __init__(self, spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.given = (spec, layer_names, vllm_config, device)

    def build(self, prefix_len: int, rows: Any) -> tuple[int, Any, int | None]:
        return prefix_len, rows, self.reorder_batch_threshold


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


def built(kind: type[Builder], decoded: bool) -> Any:
    return build_rows(made(kind, config()), "rows", decoded)  # type: ignore[arg-type]


@pytest.mark.parametrize("decoded", [False, True])
def test_rows_of_a_pass_are_all_prefill_or_all_decodes(decoded: bool) -> None:
    assert built(Builder, decoded) == (0, "rows", None), "its backend knows no difference"
    assert built(FlashInferBuilder, decoded) == (0, "rows", int(decoded))
    assert FlashInferBuilder.reorder_batch_threshold == 1, "the runner's own still sorts its rows"


@pytest.mark.parametrize(
    ("lengths", "decoded", "expected"),
    [([1, 8, 1], False, (0, 3)), ([1, 1, 1], False, (0, 3)), ([1, 1, 1], True, (3, 0))],
)
def test_vllm_counts_them_so(lengths: list[int], decoded: bool, expected: tuple[int, int]) -> None:
    """As the builders of FlashInfer and of MLA split a batch."""
    from vllm.v1.attention.backends.utils import split_decodes_and_prefills

    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows: Any = SimpleNamespace(
        max_query_len=max(lengths),
        num_reqs=3,
        num_actual_tokens=sum(lengths),
        query_start_loc_cpu=starts,
        is_prefilling=None,
    )
    *_, threshold = built(FlashInferBuilder, decoded)
    decodes, prefills, *_ = split_decodes_and_prefills(rows, decode_threshold=threshold)
    assert (decodes, prefills) == expected
