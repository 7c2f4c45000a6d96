# SPDX-License-Identifier: Apache-2.0
"""With speculative decoding vLLM asks for more slots than a request has tokens, and computes tokens
that no answer has."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.outputs import DraftTokenIds

import vllm_segreuse
from bench.shapes import SUPPORTED
from segreuse_tools.estimate.modelless_engine import ModellessEngine, step_output

SIZE = 4
DOCUMENT = [*range(100, 100 + 8 * SIZE)]
OPTIONS = {"extra_keys": ["t"], "segreuse_policy": "shift", "segreuse_min_reused_tokens": SIZE}
DRAFTS = 5
FITS = 17
"""Blocks beside which a plan for the document fits without drafts, and with them does not."""


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("llama")
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    Path(folder, "config.json").write_text(json.dumps(SUPPORTED["llama"].config | model))
    drafts = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3}
    environment = dict(os.environ)
    yield EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        async_scheduling=False,
        speculative_config=drafts,
        kv_transfer_config=vllm_segreuse.kv_transfer_config(),
    ).create_engine_config()
    for name in set(os.environ) - set(environment):
        del os.environ[name]  # marks for processes to come, which are none of ours


class World:
    """An engine that drafts.

    Args:
        num_blocks: that requests can have.
        behind: slots that its drafter writes behind the drafts, and we know nothing of.
    """

    def __init__(self, vllm_config: Any, num_blocks: int, behind: int = 0) -> None:
        self._engine = ModellessEngine(vllm_config, num_blocks + 1, SIZE)
        self._engine.scheduler.num_lookahead_tokens += behind
        self.reports: dict[str, Any] = {}

    def ask(self, name: str, tokens: list[int], extra: dict[str, Any] | None = OPTIONS) -> None:
        """A request of one token arrives."""
        self._engine.add(name, tokens, SamplingParams(max_tokens=1, extra_args=extra))

    def run(self) -> list[str]:
        """Some steps; the requests that have not ended then."""
        scheduler = self._engine.scheduler
        for _ in range(9):
            step = scheduler.schedule()
            sampled = {
                name: [5] if request.num_computed_tokens >= request.num_tokens else []
                for name in step.num_scheduled_tokens
                for request in [scheduler.requests[name]]
            }
            for outputs in scheduler.update_from_output(step, step_output(sampled)).values():
                for output in outputs.outputs:
                    if output.kv_transfer_params:
                        self.reports[output.request_id] = output.kv_transfer_params["segreuse"]
        return list(scheduler.requests)


@pytest.mark.parametrize("behind", [0, 5])
@pytest.mark.parametrize("num_blocks", [*range(FITS - 2, FITS + 4)])
def test_nobody_waits_for_blocks_that_its_own_donors_hold(
    num_blocks: int, behind: int, vllm_config: Any
) -> None:
    world = World(vllm_config, num_blocks, behind)
    world.ask("document", DOCUMENT)
    assert world.run() == []
    world.ask("reader", [7, *DOCUMENT, 8])
    world.ask("plain", [1, 2, 3], None)
    assert world.run() == []
    reused = world.reports["reader"]["reused_tokens"]
    assert world.reports["reader"]["bypass_reason"] is None
    if num_blocks <= FITS:
        assert 0 < reused < len(DOCUMENT), "as much as there is room for"
    if num_blocks == FITS + 3:
        assert reused == len(DOCUMENT)


@pytest.mark.parametrize("keys", [None, OPTIONS])
@pytest.mark.parametrize("part", [[41, 14, 13, 53, 40, 40], [41, 14], [41]])
def test_a_session_goes_on_behind_what_its_answer_keeps(
    part: list[int], keys: dict[str, Any] | None, vllm_config: Any
) -> None:
    """Three drafts are accepted, and the answer ends with the first of them: the next part begins
    where the KV of the others is."""
    engine = ModellessEngine(vllm_config, 20, SIZE)
    prompt = [*range(10, 26), 10]

    def send(tokens: list[int]) -> None:
        params = SamplingParams(max_tokens=2, extra_args=keys)
        engine.add("session", list(tokens), params, resumable=True)

    def run(sampled: list[int]) -> Any:
        step = engine.scheduler.schedule()
        engine.scheduler.update_from_output(step, step_output({"session": sampled}))
        return step

    send(prompt)
    run([2])
    engine.scheduler.update_draft_token_ids(DraftTokenIds(["session"], [[4, 4, 3]]))
    assert run([4, 4, 3, 5]).scheduled_spec_decode_tokens == {"session": [4, 4, 3]}
    send(part)
    (new,) = run([5]).scheduled_new_reqs
    assert new.prompt_token_ids == [*prompt, 2, *part]
    assert new.num_computed_tokens == len(prompt) + 1, "only the 2 was computed in its place"
