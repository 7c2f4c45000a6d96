# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA) with a second tier, and with similar segments."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.engine import Engine, Prompts, engine
from tests.e2e.stepping import settle
from tests.e2e.test_equality import assert_same
from tests.e2e.test_similar import OPTIONS, Agent
from tests.e2e.test_states import states_of
from tests.e2e.test_tier import FOCUS, SHIFT
from tests.latent import BLOCK_SIZE, prefix_cache_for_latents

pytestmark = pytest.mark.slow(
    "latent attention", instead="e2e/test_tier e2e/test_states e2e/test_latent"
)


@contextmanager
def latent(segreuse: dict[str, Any], **arguments: Any) -> Iterator[Engine]:
    options = {"max_provenance_depth": 0} | segreuse
    arguments = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_model_len": 1024} | arguments
    with prefix_cache_for_latents(), engine("deepseek_v3", options, **arguments) as started:
        yield started
        started.check_idle()


def test_what_was_evicted_is_reused_from_the_host_bit_for_bit() -> None:
    tier = {"host_gib": 0.02, "min_run_tokens": 32}
    with latent({"tier": tier}, num_gpu_blocks_override=70) as tiered:
        text = Prompts(tiered.vocab_size, seed=5)
        document = text.tokens(230)
        donor, question = text.around(document), text.around(document, gaps=(11, 7))
        for options in (SHIFT, FOCUS):
            tiered.reset()
            tiered.ask(donor, options=options)
            [from_gpu] = tiered.ask(question, options=options)
            tiered.reset()
            tiered.ask(donor, options=options)
            for _ in range(4):
                tiered.ask(text.tokens(800), max_tokens=1)
            settle(tiered)
            [from_host] = tiered.ask(question, options=options)
            assert from_gpu.report["tiered_tokens"] == 0
            report = from_host.report
            assert report["tiered_tokens"] == report["reused_tokens"] > 150
            assert report["reused_tokens"] == from_gpu.report["reused_tokens"]
            assert from_host.logprobs == from_gpu.logprobs
        settle(tiered)


def test_of_similar_text_the_upper_layers_are_computed_from_boundary_states() -> None:
    with latent({"similarity": {"w_exact": {2: 3, "all": "full_prefix"}}}) as similar:
        agent = Agent(similar)
        before, prompt = agent.prompt("find the parcel"), agent.prompt("which order is late?")
        [plain] = similar.ask(prompt)
        similar.reset()
        similar.ask(before, options=OPTIONS)
        report = similar.ask(prompt, options=OPTIONS)[0].report
        assert report["bypass_reason"] is None
        assert report["similar_tokens"] == report["entering_tokens"] > 100
        assert report["computed_share"] < 0.9
        similar.reset()
        similar.ask(before, options=OPTIONS)
        states_of(similar).positions += 1  # stale: all that enters is computed in full
        [answer] = similar.ask(prompt, options=OPTIONS)
        states_of(similar).positions.fill_(-1)
        assert answer.report["entering_tokens"] > 100
        assert_same(answer, plain, noise=2e-3)
