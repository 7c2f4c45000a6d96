# SPDX-License-Identifier: Apache-2.0
"""Passes by CUDA graphs read and leave what they should, and are refused where one computes
something else. That they compute what other passes do is in `test_passes.py`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.forward_context import get_forward_context

from tests.prefill.loaded import Loaded, loaded, prove, refused
from vllm_segreuse.compat.model_runner import CapturedGraphs
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.plan import Boundary, Fixed, Probed, Stock
from vllm_segreuse.prefill import checks, programs
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.graphs import CudaGraphs
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.proofs.graphs import GraphProof
from vllm_segreuse.prefill.tokens import TokenTable

Patch = pytest.MonkeyPatch
SIZES = (1, 4, 8)


class Stack:
    """Notes what a graph reads, and leaves its output where the next one overwrites it."""

    def __init__(self) -> None:
        self.read: list[tuple[list[int], list[int]]] = []
        self.output = torch.zeros(max(SIZES), 2)

    def forward_of(
        self, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        self.read.append((token_ids.tolist(), positions.tolist()))
        self.output[: len(positions)] = positions[:, None].float()
        return self.output[: len(positions)], [self.output[: len(positions), :1]]


def captured() -> CapturedGraphs:
    inputs = torch.arange(10, 20, dtype=torch.int32), torch.arange(30, 40)
    return CapturedGraphs(SIZES, *inputs, sampled_first=False)


def tokens(*positions: int) -> TokenTable:
    where = torch.tensor(positions)
    return TokenTable(where + 100, where, torch.zeros_like(where), where)


@pytest.fixture
def stack() -> Any:
    return Stack()


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8), (9, 0)])
def test_the_smallest_graph_with_room_for_a_pass(count: int, size: int, stack: Any) -> None:
    graphs = CudaGraphs(stack, captured())
    assert graphs.sizes == SIZES
    assert graphs.size_for(tokens(*range(count))) == size
    with graphs.of_at_least(5):
        assert graphs.size_for(tokens(*range(count))) == max(size, 8) * (size > 0)
    assert graphs.size_for(tokens(*range(count))) == size


@pytest.mark.parametrize(("sampled_first", "size"), [(True, 4), (False, 0)])
def test_behind_a_forward_no_graph_overwrites_what_is_sampled_from(
    stack: Any, sampled_first: bool, size: int
) -> None:
    graphs = CudaGraphs(stack, captured()._replace(sampled_first=sampled_first))
    with graphs.after_forward():
        assert graphs.size_for(tokens(1, 2)) == size
    assert graphs.size_for(tokens(1, 2)) == 4


def test_a_graph_reads_the_pass_and_the_runner_finds_its_step_again(stack: Any) -> None:
    given = captured()
    graphs = CudaGraphs(stack, given)
    hidden, [entering] = graphs.forward(tokens(5, 9), 4)
    again, _ = graphs.forward(tokens(2, 3, 4, 7), 4)
    assert stack.read == [
        ([105, 109, 0, 0], [5, 9, 0, 0]),
        ([102, 103, 104, 107], [2, 3, 4, 7]),
    ]
    assert hidden.tolist() == [[5, 5], [9, 9]], "not overwritten by the next"
    assert entering.tolist() == [[5], [9]]
    assert again[:, 0].tolist() == [2, 3, 4, 7]
    for left, before in zip(given[1:3], captured()[1:3], strict=True):
        assert torch.equal(left, before)


def test_the_runner_finds_its_step_again_behind_a_pass_that_fails(
    stack: Any, monkeypatch: Patch
) -> None:
    """The prompt of such a pass is computed in full, by that step."""
    given = captured()

    def fail(token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        assert token_ids.tolist() == [105, 109, 0, 0]
        raise RuntimeError("no memory")

    monkeypatch.setattr(stack, "forward_of", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        CudaGraphs(stack, given).forward(tokens(5, 9), 4)
    for left, before in zip(given[1:3], captured()[1:3], strict=True):
        assert torch.equal(left, before)


# The proof.


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    with loaded(tmp_path_factory.mktemp("llama")) as model:
        yield model


@pytest.fixture
def proof(llama: Loaded, monkeypatch: Patch) -> GraphProof:
    monkeypatch.setattr(checks, "may_run_compiled", lambda _: True)
    runtime = prove(llama)
    assert runtime.graphs is not None
    assert runtime.prefill.runner.graphs is None, "vLLM has captured none yet"
    return runtime.graphs


@pytest.fixture
def graphs(proof: GraphProof) -> CapturedGraphs:
    count = proof.scratch.count
    sizes = (1, 2, 16, count, count + 7)
    inputs = torch.ones(300, dtype=torch.int32), torch.ones(300).long()
    return CapturedGraphs(sizes, *inputs, sampled_first=True)


def test_passes_are_proven_as_they_run_compiled(llama: Loaded, monkeypatch: Patch) -> None:
    """Eager ones are right; compiled ones take other embeddings for the tokens."""
    embed, ran = llama.model.model.embed_tokens.forward, []

    def forward(ids: torch.Tensor) -> torch.Tensor:
        ran.append(not get_forward_context().skip_compiled)
        return embed(ids) * (3 if ran[-1] else 1)

    monkeypatch.setattr(llama.model.model.embed_tokens, "forward", forward)
    prove(llama)
    assert not any(ran)
    monkeypatch.setattr(checks, "may_run_compiled", lambda _: True)
    found = refused(lambda: prove(llama))
    assert found.startswith("the compiled sparse pass does not reproduce this model's own forward")
    assert found.endswith("start without compiled code: --enforce-eager")


def test_every_kind_of_compiled_pass_is_proven(llama: Loaded, monkeypatch: Patch) -> None:
    monkeypatch.setattr(checks, "may_run_compiled", lambda _: True)
    ran, run = set(), programs.run

    def noted(layers: LayerRunner, batch: Batch) -> Any:
        if layers.settings.compiled:
            ran.add(type(batch.program))
        return run(layers, batch)

    monkeypatch.setattr(programs, "run", noted)
    prove(llama)
    assert ran == {Fixed, Stock, Boundary, Probed}


def test_a_pass_by_each_graph_is_proven(
    proof: GraphProof, graphs: CapturedGraphs, monkeypatch: Patch
) -> None:
    ran: list[int] = []
    forward_of = DecoderStack.forward_of

    def noted(self: Any, token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        if token_ids.data_ptr() == graphs.token_ids.data_ptr():
            ran.append(len(token_ids))
        return forward_of(self, token_ids, positions)

    monkeypatch.setattr(DecoderStack, "forward_of", noted)
    proof.prove(graphs)
    assert ran == list(graphs.sizes)
    layers = proof.layers
    assert layers.graphs is not None
    assert layers.graphs.size_for(tokens(3, 4, 5)) == 16, "and passes to come use them"


def test_blocks_that_vllm_has_warmed_up_with_are_cleared(
    proof: GraphProof, graphs: CapturedGraphs
) -> None:
    """They may hold anything: NaN behind the tokens makes NaN of attention to these."""
    for layer in proof.layers.stack.attention:
        layer.kv_cache.fill_(float("nan"))
    proof.prove(graphs)


@pytest.mark.parametrize("what", ["token ids", "positions", "of 16"])
def test_graphs_that_read_something_else_are_refused(
    what: str, proof: GraphProof, graphs: CapturedGraphs, monkeypatch: Patch
) -> None:
    """As they would if the runner had captured them on other buffers."""
    forward_of = DecoderStack.forward_of

    def elsewhere(self: Any, token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        if token_ids.data_ptr() == graphs.token_ids.data_ptr():
            if what == "token ids" or (what == "of 16" and len(token_ids) == 16):
                token_ids = torch.ones_like(token_ids)
            if what == "positions":
                positions = torch.ones_like(positions)
        return forward_of(self, token_ids, positions)

    monkeypatch.setattr(DecoderStack, "forward_of", elsewhere)
    with pytest.raises(UnsupportedModelError, match="does not reproduce this model's") as found:
        proof.prove(graphs)
    # One token in the place of one changes little of all keys and values.
    assert ("of 16 tokens" in str(found.value)) == (what == "of 16")


def test_models_that_run_eagerly_have_nothing_to_prove(llama: Loaded) -> None:
    assert prove(llama).graphs is None
