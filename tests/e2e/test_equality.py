# SPDX-License-Identifier: Apache-2.0
"""Recomputing every reused token must equal vLLM without the plugin, on every supported shape.

It is the test that scattered queries get the right causal mask, positions, slots and block tables:
any mistake there changes every token behind it.
"""

from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from bench.shapes import SUPPORTED
from tests.e2e.engine import BF16_NOISE, NAMESPACE, Answer, Engine, Prompts, diagnosed, engine
from vllm_segreuse.compat import model_runner
from vllm_segreuse.prefill.graphs import CudaGraphs
from vllm_segreuse.prefill.tokens import TokenTable

EVERYTHING = NAMESPACE | {
    "segreuse_policy": "sparsex",
    "segreuse_recompute_ratio": 1.0,
    "segreuse_min_reused_tokens": 16,
}
AT_PUSH = ("llama", "llama3", "qwen3", "qwen3_moe", "gemma3", "gpt_oss", "olmo3")
"""Shapes that are compared at every push."""

MORE_SHAPES = pytest.mark.slow("another shape", instead="e2e/test_equality")

WAYS = {
    "sparse from the first layer": EVERYTHING | {"segreuse_dense_layers": 0},
    "two dense layers": EVERYTHING | {"segreuse_dense_layers": 2},
    "all layers dense": EVERYTHING | {"segreuse_dense_layers": 4, "segreuse_recompute_ratio": 0.0},
}


def prompts_for(vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Documents, and prompts made of them: odd offsets, several segments, repeats, cut segments."""
    text = Prompts(vocab_size, seed=1)
    documents = [text.tokens(n) for n in (333, 256, 97)]
    prompts = [
        text.around(documents[1], documents[0]),
        text.around(documents[2], documents[0][40:300], documents[2]),
        text.around(documents[0], gaps=(1, 3)),
        documents[1][7:] + documents[0][:-1] + text.tokens(64),
    ]
    return documents, prompts


def assert_same(ours: Answer, reference: Answer, noise: float) -> None:
    """Log-probabilities agree within `noise`; so do the tokens wherever the margin exceeds it."""
    for mine, theirs, got, wanted in zip(
        ours.logprobs, reference.logprobs, ours.token_ids, reference.token_ids, strict=True
    ):
        common = sorted(mine.keys() & theirs.keys())
        assert len(common) >= 4
        difference = max(abs(mine[t] - theirs[t]) for t in common)
        assert difference <= noise, f"log-probabilities differ by {difference:.3f} > {noise:.3f}"
        best, second = sorted(theirs.values(), reverse=True)[:2]
        if best - second > 2 * noise:
            assert got == wanted
        if got != wanted:
            return  # a tie went the other way: what follows answers another text


def check_everything(shape: str, noise: float, **arguments: Any) -> None:
    """Plain vLLM answers first; then the same prompts with every way of recomputing everything.

    Args:
        noise: see `assert_same`.
        arguments: of both engines.
    """
    with engine(shape, segreuse=False, **arguments) as plain:
        documents, prompts = prompts_for(plain.vocab_size)
        reference = plain.ask(*prompts)
    with engine(shape, **arguments) as reusing:
        check_every_way(reusing, documents, prompts, reference, noise)
        check_partial(reusing, documents, prompts)
        reusing.check_idle()


def check_every_way(
    reusing: Engine,
    documents: list[list[int]],
    prompts: list[list[int]],
    reference: list[Answer],
    noise: float,
) -> None:
    """Every way of recomputing everything answers like plain vLLM."""
    for way, options in WAYS.items():
        reusing.reset()
        reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
        together = reusing.ask(*prompts, options=options)
        for ours, theirs in zip(together, reference, strict=True):
            assert ours.report["bypass_reason"] is None, way
            assert ours.report["reused_tokens"] > 200
            assert ours.cached_tokens == ours.report["prefix_tokens"] + (
                ours.report["reused_tokens"] - ours.report["recomputed_tokens"]
            )
            assert_same(ours, theirs, noise)
    reusing.check_idle()


def check_partial(reusing: Engine, documents: list[list[int]], prompts: list[list[int]]) -> None:
    """The default policy computes a part of the documents again, and not all of them."""
    reusing.reset()
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    for answer in reusing.ask(*prompts, options=NAMESPACE):
        report = answer.report
        assert report["bypass_reason"] is None
        assert not report["in_full"]
        assert 0 < report["recomputed_tokens"] < report["reused_tokens"]
        assert report["computed_share"] < 1


@pytest.mark.shows("recompute", "partial")
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=[] if shape in AT_PUSH else [MORE_SHAPES]) for shape in SUPPORTED],
)
def test_recomputing_everything_equals_plain_vllm(shape: str) -> None:
    # In float32, where rounding hides nothing: a wrong mask or position is off by far more.
    check_everything(shape, dtype="float32", noise=2e-3)
    found = diagnosed(shape, dtype="float32")
    assert (found.works, found.reasons, found.notes) == (True, (), ())


@MORE_SHAPES
def test_a_model_of_windows_only_answers_prompts_that_fit_into_them() -> None:
    limited = {"disable_sliding_window": True, "max_model_len": 1024}
    check_everything("mistral_window", dtype="float32", noise=2e-3, **limited)


def test_recomputing_everything_equals_plain_vllm_in_bf16() -> None:
    check_everything("qwen3", dtype="bfloat16", noise=BF16_NOISE)


@pytest.mark.slow("compiled models", instead="e2e/test_equality prefill/test_graphs")
@pytest.mark.parametrize("shape", ["qwen3", "gemma3"])
def test_passes_of_a_compiled_model_answer_like_eager_ones(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a model that vLLM has compiled runs compiled passes; all other tests here are eager.

    There are no CUDA graphs on a CPU: as if there were, passes are then padded to their sizes, and
    run on the runner's input buffers.
    """
    ways = {
        "scattered tokens": NAMESPACE | {"segreuse_policy": "shift"},
        "beginnings": NAMESPACE | {"segreuse_policy": "epic"},
        "everything, scored at one layer": WAYS["sparse from the first layer"],
        "everything, scored at all layers": EVERYTHING | {"segreuse_policy": "prophet"},
    }

    def asked(reusing: Engine) -> list[list[Answer]]:
        documents, prompts = prompts_for(reusing.vocab_size)
        answers = []
        for options in ways.values():
            reusing.reset()
            reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
            answers.append(reusing.ask(*prompts, options=options))
        return answers

    with engine(shape, dtype="float32", enforce_eager=True) as reusing:
        eager = asked(reusing)
    with engine(shape, dtype="float32", enforce_eager=False) as reusing:
        compiled = asked(reusing)
        ran = padded_as_for_graphs(monkeypatch)
        padded = asked(reusing)
    assert len(ran) > len(ways)
    assert any(count < size for count, size in ran)
    for found in (compiled, padded):
        for way, ours, theirs in zip(ways, found, eager, strict=True):
            for mine, reference in zip(ours, theirs, strict=True):
                assert mine.report == reference.report, way
                assert mine.report["reused_tokens"] > 200
                assert_same(mine, reference, noise=2e-3)


def padded_as_for_graphs(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Have the runner of this process say that it has captured graphs.

    Returns:
        Tokens of each pass from here on, and of its graph, where it has one; also of the proof.
    """
    ran: list[tuple[int, int]] = []
    forward = CudaGraphs.forward

    def noted(self: CudaGraphs, tokens: TokenTable, size: int) -> Any:
        ran.append((len(tokens), size))
        return forward(self, tokens, size)

    patch.setattr(CudaGraphs, "forward", noted)
    runner = model_runner._runner()
    sizes = (1, 2, 4, *range(8, 513, 8))
    keys = {BatchDescriptor(size) for size in sizes}
    patch.setitem(runner.cudagraph_dispatcher.cudagraph_keys, CUDAGraphMode.PIECEWISE, keys)
    model_runner._once_captured.pop(runner)()
    assert [size for _, size in ran] == list(sizes), "each is proven"
    return ran


def test_the_comparison_can_fail() -> None:
    """Without recomputation the same prompts answer differently, far beyond the tolerance above."""
    with engine("qwen3", dtype="float32") as reusing:
        documents, prompts = prompts_for(reusing.vocab_size)
        reference = reusing.ask(*prompts)
        reusing.reset()
        reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
        shifted = reusing.ask(*prompts, options=NAMESPACE | {"segreuse_policy": "shift"})
        for ours, theirs in zip(shifted, reference, strict=True):
            with pytest.raises(AssertionError, match="log-probabilities differ"):
                assert_same(ours, theirs, noise=20e-3)
