# SPDX-License-Identifier: Apache-2.0
"""Similar segments whose upper layers are computed in the new context, from boundary states that
vLLM's own forward has left."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e.engine import NAMESPACE, Answer, Engine, engine
from tests.e2e.test_equality import assert_same
from tests.e2e.test_similar import OPTIONS, Agent

pytestmark = pytest.mark.patches("worker")

CUT, CONTEXT = 2, 3


@pytest.fixture(scope="module")
def reusing() -> Iterator[Engine]:
    options = {
        "similarity": {"w_exact": {CUT: CONTEXT, "all": "full_prefix"}},
        "max_provenance_depth": 0,
    }
    with engine("qwen3", segreuse=options, dtype="float32") as started:
        yield started


@pytest.fixture(autouse=True)
def forgotten(reusing: Engine) -> None:
    reusing.reset()


def ask(reusing: Engine, prompt: list[int], **options: Any) -> Answer:
    named = {f"segreuse_{name}": value for name, value in options.items()}
    return reusing.ask(prompt, options=OPTIONS | named)[0]


def states_of(reusing: Engine) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_side.backlog.prefill.states


def test_tokens_of_similar_text_enter_at_the_cut(reusing: Engine) -> None:
    agent = Agent(reusing)
    ask(reusing, agent.prompt("find the parcel"))
    prompt = agent.prompt("which order is late?")
    report = ask(reusing, prompt).report
    assert report["bypass_reason"] is None
    entering = report["entering_tokens"]
    assert entering > 0.2 * len(prompt)
    assert report["similar_tokens"] == report["reused_tokens"] == entering
    layers = reusing.llm.llm_engine.model_config.get_num_layers(
        reusing.llm.llm_engine.vllm_config.parallel_config
    )
    computed = entering * (layers - CUT) + (len(prompt) - entering) * layers
    assert report["computed_share"] == pytest.approx(computed / len(prompt) / layers, abs=1e-3)
    reusing.check_idle()


def test_the_states_are_what_full_prefill_has_there(reusing: Engine) -> None:
    """Donors that have the same context: full prefill, to what rounding leaves of it."""
    agent = Agent(reusing)
    prompt = agent.prompt("find the parcel")
    [plain] = reusing.ask(prompt)
    reusing.reset()
    ask(reusing, prompt)
    # vLLM finds no prefix any more; the segment index, and the KV, stay.
    with patch.object(reusing.pool, "get_cached_block", return_value=None):
        again = ask(reusing, prompt)
    assert again.report["prefix_tokens"] == 0
    assert again.report["reused_tokens"] > 0.9 * len(prompt)
    assert_same(again, plain, noise=2e-3)


@pytest.mark.parametrize("policy", ["shift", "epic"])
def test_a_stale_state_is_computed_in_full(reusing: Engine, policy: str) -> None:
    """Whatever may have happened to the slot: the answer is that of plain vLLM."""
    agent = Agent(reusing)
    before, prompt = agent.prompt("find the parcel"), agent.prompt("which order is late?")
    [plain] = reusing.ask(prompt)
    reusing.reset()
    ask(reusing, before)
    states_of(reusing).positions += 1
    answer = ask(reusing, prompt, policy=policy)
    assert answer.report["entering_tokens"] > 0
    assert_same(answer, plain, noise=2e-3)
    states_of(reusing).positions.fill_(-1)


@pytest.mark.parametrize("policy", ["sparsex", "focus", "cacheblend", "exact"])
def test_policies_that_choose_move_at_all_layers_or_not_at_all(
    reusing: Engine, policy: str
) -> None:
    agent = Agent(reusing)
    ask(reusing, agent.prompt("find the parcel"))
    report = ask(reusing, agent.prompt("which order is late?"), policy=policy).report
    assert report["entering_tokens"] == 0
    assert report["similar_tokens"] == 0, "no prefix is equal"


def test_answers_have_states_too(reusing: Engine) -> None:
    """vLLM computes them one by one."""
    agent = Agent(reusing)
    prompt = agent.prompt("find the parcel")
    reusing.ask(prompt, options=NAMESPACE, max_tokens=70, ignore_eos=True)
    positions = states_of(reusing).positions[0]
    written = positions[positions >= len(prompt)]
    assert sorted(written.tolist()) == list(range(len(prompt), len(prompt) + 69))


def test_memory_is_shared_with_the_kv_cache(reusing: Engine) -> None:
    states = states_of(reusing)
    slots = reusing.pool.num_gpu_blocks * 32
    assert states.cuts == (CUT,)
    assert states.states.shape[1] == slots + 1
    vllm_config = reusing.llm.llm_engine.vllm_config
    layers = vllm_config.compilation_config.static_forward_context.values()
    kv = sum(layer.kv_cache.nbytes for layer in layers)
    assert kv + states.num_bytes < 1.01 * (1 << 30), "VLLM_CPU_KVCACHE_SPACE"
    assert torch.isfinite(states.states[0, (states.positions[0] >= 0)]).all()
