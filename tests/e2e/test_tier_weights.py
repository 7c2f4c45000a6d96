# SPDX-License-Identifier: Apache-2.0
"""After a reset, and after sleep, files are read again; with other weights they are not: one that
changed in place, and those that an update has brought."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.engine import Answer, Engine, Prompts
from tests.e2e.test_tier import SHIFT, ask, counts, evict
from tests.e2e.test_tier_restart import started, wait_for_files
from vllm_segreuse.compat.model_runner import loaded_model

pytestmark = pytest.mark.slow("other weights", instead="e2e/test_tier model/test_weights")


def asked_anew(running: Engine, text: Prompts, question: list[int]) -> Answer:
    """The answer after a reset, and a step of another request."""
    running.reset()
    assert counts(running)["disk"] == 0
    running.ask(text.tokens(40), max_tokens=2)
    return ask(running, question, SHIFT)


def checkpoint(running: Engine) -> dict[str, torch.Tensor]:
    """The weights in the model's files."""
    folder = Path(running.llm.llm_engine.model_config.model)
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def update(running: Engine, weights: dict[str, torch.Tensor]) -> None:
    """As a trainer does it."""
    running.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})


def test_files_are_read_with_the_weights_that_they_are_of(tmp_path: Path) -> None:
    with started(tmp_path / "tier") as running:
        text = Prompts(running.vocab_size, seed=6)
        document = text.tokens(230)
        donor, question = text.around(document), text.around(document, gaps=(11, 7))
        ask(running, donor, SHIFT)
        evict(running, text)
        wait_for_files(running, text)

        first = asked_anew(running, text, question)
        assert first.report["tiered_tokens"] == first.report["reused_tokens"] > 150
        for level in (1, 2):
            running.llm.sleep(level=level)
            assert counts(running) | {"host": 0, "disk": 0} == counts(running)
            running.llm.wake_up()
            if level == 2:  # it drops the weights; their owner loads them again
                running.llm.collective_rpc("reload_weights")
            assert asked_anew(running, text, question).logprobs == first.logprobs

        weights = next(loaded_model().parameters()).view(-1)
        kept = weights[7].clone()
        with torch.no_grad():
            weights[7] = torch.nextafter(kept, kept + 1)  # the smallest change that there is
        others = asked_anew(running, text, question)
        assert others.report["reused_tokens"] == 0
        with torch.no_grad():
            weights[7] = kept
        again = asked_anew(running, text, question)
        assert again.report["tiered_tokens"] == first.report["tiered_tokens"]
        assert again.logprobs == first.logprobs

        update(running, {name: weight + 0.01 for name, weight in checkpoint(running).items()})
        updated = asked_anew(running, text, question)
        assert updated.report["reused_tokens"] == 0
        assert updated.logprobs != first.logprobs
        update(running, checkpoint(running))
        assert asked_anew(running, text, question).logprobs == first.logprobs
