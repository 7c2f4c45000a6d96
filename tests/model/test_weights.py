# SPDX-License-Identifier: Apache-2.0
"""A model's weights are told apart from any others, and found to be the same."""

import pytest
import torch

from vllm_segreuse.model import weights
from vllm_segreuse.model.weights import ModelWeights, weights_digest


class Model(torch.nn.Module):
    """Parameters of several dtypes and odd sizes, one of them in two places, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)

        def parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
            values = torch.randn(shape, generator=draw).to(dtype)
            return torch.nn.Parameter(values, requires_grad=False)

        self.first = parameter(7, 9, dtype=torch.bfloat16)
        self.second = parameter(33, dtype=torch.float8_e4m3fn)
        self.third = parameter(3, 5, 2, dtype=torch.float32)
        self.tied = self.first
        self.register_buffer("table", torch.arange(11))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("scale", torch.tensor(2.0))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_CHUNK", 4)


def test_equal_weights_have_equal_digests() -> None:
    model, same = Model(), Model()
    assert weights_digest(model) == weights_digest(same)
    same.third.data = same.third.data.transpose(0, 1).contiguous().transpose(0, 1)
    assert weights_digest(model) == weights_digest(same), "wherever they lie"


@pytest.mark.parametrize("name", ["first", "second", "third", "table", "scale"])
def test_any_bit_of_any_weight_counts(name: str) -> None:
    model = Model()
    kept = ModelWeights(model)
    bytes_ = dict([*model.named_parameters(), *model.named_buffers()])[name].reshape(-1)
    bytes_ = bytes_.view(torch.uint8)
    for at in range(len(bytes_)):
        bytes_[at] ^= 1 << at % 8
        assert not kept.are_unchanged(), at
        bytes_[at] ^= 1 << at % 8
    assert kept.are_unchanged(), "they are as before"


@pytest.mark.parametrize("count", [2, 8], ids=["words of a chunk", "chunks"])
def test_exchanged_weights_are_others(count: int) -> None:
    model = Model()
    kept = ModelWeights(model)
    third = model.third.view(-1)
    first, second = third[:count].clone(), third[count : 2 * count].clone()
    third[:count], third[count : 2 * count] = second, first
    assert not kept.are_unchanged()


def test_the_first_of_many_weights_counts_as_the_last() -> None:
    many = torch.nn.Module()
    for number in range(200):
        many.register_buffer(f"{number:03}", torch.full((5,), number, dtype=torch.uint8))
    kept = ModelWeights(many)
    for name in ("000", "100", "199"):
        weight = many.get_buffer(name)
        weight[4] ^= 1
        assert not kept.are_unchanged(), name
        weight[4] ^= 1
    assert kept.are_unchanged()


def test_weights_of_other_lengths_are_others() -> None:
    """Zeros fill the last word of each."""
    digests = set()
    for length in range(18):
        model = torch.nn.Module()
        model.register_buffer("weight", torch.zeros(length, dtype=torch.uint8))
        digests.add(weights_digest(model))
    assert len(digests) == 18
    assert weights_digest(torch.nn.Module()) == 0


def test_weights_that_begin_between_two_words_are_read_as_any() -> None:
    bytes_ = torch.arange(33, dtype=torch.uint8)
    shifted, whole = torch.nn.Module(), torch.nn.Module()
    shifted.register_buffer("weight", bytes_[1:])
    whole.register_buffer("weight", bytes_[1:].clone())
    assert weights_digest(shifted) == weights_digest(whole)


def test_a_model_without_weights_has_a_digest() -> None:
    assert ModelWeights(torch.nn.Module()).are_unchanged()
