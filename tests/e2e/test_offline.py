# SPDX-License-Identifier: Apache-2.0
"""Offline use as the README shows it: `LLM`, its engine in this process, and in one of its own."""

from collections.abc import Iterator
from typing import Any

import pytest

from bench.shapes import make_model
from tests.e2e.engine import BLOCK_SIZE, Prompts, engine
from tests.reports import Whole


@pytest.fixture(
    scope="module",
    params=[
        "in this process",
        pytest.param(
            "in its own",
            marks=pytest.mark.slow(
                "the engine in a process of its own, as servers have it",
                instead="e2e/test_offline e2e/test_http_api",
            ),
        ),
    ],
)
def llm(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "in this process":
        options = {"policy": "shift", "min_reused_tokens": 16}
        with engine("qwen3", options, max_model_len=1024, max_num_batched_tokens=1024) as running:
            yield running.llm
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM

        import vllm_segreuse

        running = LLM(
            model=str(make_model("qwen3")),
            max_model_len=1024,
            block_size=BLOCK_SIZE,
            enforce_eager=True,
            kv_transfer_config=vllm_segreuse.kv_transfer_config(
                policy="shift", min_reused_tokens=16
            ),
        )
        assert not hasattr(running.llm_engine.engine_core, "engine_core"), "it runs in this process"
        yield running
        running.llm_engine.engine_core.shutdown()


@pytest.fixture
def text(llm: Any) -> Prompts:
    return Prompts(llm.llm_engine.model_config.get_vocab_size(), seed=61)


def generate(llm: Any, prompts: list[list[int]], options: dict[str, Any] | None) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=3, temperature=0.0, extra_args=options)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def test_the_report_is_in_the_output(llm: Any, text: Prompts) -> None:
    document = text.tokens(8 * BLOCK_SIZE)
    generate(llm, [document], {"extra_keys": "mine"})
    prompt = text.around(document)
    (output,) = generate(llm, [prompt], {"extra_keys": "mine"})
    assert len(output.outputs[0].token_ids) == 3
    report = Whole(output.kv_transfer_params["segreuse"])
    # Of the work, the new tokens are left; a layer's share of it is rounded.
    new = len(prompt) - len(document)
    assert report.pop("computed_share") == pytest.approx(new / len(prompt), abs=1e-3)
    assert report == {
        "policy": "shift",
        "prompt_tokens": len(prompt),
        "prefix_tokens": 0,
        "reused_tokens": len(document),
        "recomputed_tokens": 0,
        "new_tokens": len(prompt) - len(document),
        "bypass_reason": None,
        "matches": 1,
    }
    assert output.num_cached_tokens == len(document)
    (other,) = generate(llm, [prompt], {"extra_keys": ["mine", "too"]})
    assert other.kv_transfer_params["segreuse"]["reused_tokens"] == 0
    (plain,) = generate(llm, [prompt], None)
    assert plain.kv_transfer_params is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"segreuse_recompute_ratio": 2}, "segreuse_recompute_ratio=2 must be a number from 0"),
        ({"segreuse_polcy": "shift"}, "unknown option 'segreuse_polcy'"),
        ({"segreuse_policy": "magic"}, "segreuse_policy='magic' must be one of auto, cacheblend, "),
        ({"extra_keys": 7}, "extra_keys=7 must be a string or a list"),
        ({"extra_keys": []}, "must be a string or a list of 1 to 16"),
        ({"extra_keys": ["a\x00b"]}, "no control characters"),
    ],
)
def test_06_a_bad_option_raises_where_it_was_given(
    llm: Any, text: Prompts, options: dict[str, Any], why: str
) -> None:
    prompts = [text.tokens(40), text.tokens(50)]
    with pytest.raises(ValueError, match=why):
        generate(llm, prompts, {"extra_keys": "mine"} | options)
    assert len(generate(llm, prompts, {"extra_keys": "mine"})) == 2


def test_06_one_bad_request_among_good_ones(llm: Any, text: Prompts) -> None:
    """Those before it were taken in already; none of them may come back later."""
    from vllm import SamplingParams

    good = SamplingParams(max_tokens=3, extra_args={"extra_keys": "mine"})
    bad = SamplingParams(max_tokens=3, extra_args={"extra_keys": {"mine": 1}})
    prompts = [{"prompt_token_ids": text.tokens(40 + i)} for i in range(3)]
    with pytest.raises(ValueError, match="extra_keys="):
        llm.generate(prompts, [good, bad, good], use_tqdm=False)
    outputs = llm.generate(prompts[2:], good, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == [42]


def test_bad_options_of_the_engine_are_named_before_it_starts() -> None:
    import vllm_segreuse

    with pytest.raises(ValueError, match=r"recompute_ratio=1\.5 must be a number from 0 to 1"):
        vllm_segreuse.kv_transfer_config(recompute_ratio=1.5)
    with pytest.raises(ValueError, match=r"unknown option 'ratio'; allowed are .*recompute_ratio"):
        vllm_segreuse.kv_transfer_config(ratio=0.5)
