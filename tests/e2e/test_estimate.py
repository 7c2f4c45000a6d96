# SPDX-License-Identifier: Apache-2.0
"""What `vllm-segreuse estimate` says of a log is what an engine then reports of it."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import make_model
from segreuse_tools.commands import estimate as cli
from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Engine, engine
from tests.estimate import logs

pytestmark = pytest.mark.slow(
    "an engine beside the estimate", instead="estimate/test_cli estimate/test_without_engine"
)

POLICIES = ("focus", "exact")
BODIES = logs.bodies(48)
NUM_BLOCKS = 1200
TIGHT = 60
"""Blocks, of which the longest request takes 27."""


@pytest.fixture(scope="module")
def estimates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By the size of the cache; made before there is an engine in this process."""
    file = logs.write(tmp_path_factory.mktemp("log") / "requests.jsonl", BODIES)
    found = {}
    for name, options in (
        ("ample", ["--num-blocks", str(NUM_BLOCKS)]),
        ("tight", ["--num-blocks", str(TIGHT)]),
        ("crowded", ["--num-blocks", str(NUM_BLOCKS), "--concurrency", "4"]),
    ):
        found[name] = estimated(file, options)
    return found


def estimated(file: Path, options: list[str]) -> dict[str | None, dict[str, Any]]:
    """Rows by policy."""
    arguments = [str(file), "--model", str(make_model("llama")), "--block-size", str(BLOCK_SIZE)]
    arguments += ["--extra-keys", "tests", "--max-model-len", "4096", "--json", *options]
    arguments += [part for policy in POLICIES for part in ("--policy", policy)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(arguments) == 0
    return {row["policy"]: row for row in json.loads(printed.getvalue())["rows"]}


@pytest.fixture(scope="module")
def served(estimates: dict[str, Any]) -> Iterator[Engine]:
    with engine(
        "llama",
        {"max_step_tokens": 128},
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=4,
    ) as running:
        yield running


def send(running: Engine, options: dict[str, Any] | None, together: bool) -> list[Any]:
    """Answers to the log, by vLLM's own tokenisation."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            max_tokens=body["max_tokens"], temperature=0, ignore_eos=True, extra_args=options
        )
        for body in BODIES
    ]
    if together:
        prompts = [prompt_of(running, body) for body in BODIES]
        return running.llm.generate(prompts, params, use_tqdm=False)
    return [
        output
        for body, one in zip(BODIES, params, strict=True)
        for output in running.llm.generate([prompt_of(running, body)], [one], use_tqdm=False)
    ]


def prompt_of(running: Engine, body: dict[str, Any]) -> Any:
    if "prompt" in body:
        return body["prompt"]
    tokenizer = running.llm.get_tokenizer()
    text = tokenizer.apply_chat_template(
        body["messages"], tokenize=False, add_generation_prompt=True
    )
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def shares(outputs: list[Any]) -> dict[str, float]:
    """In percent of the prompt tokens."""
    reports = [output.kv_transfer_params["segreuse"] for output in outputs]
    total = sum(len(output.prompt_token_ids) for output in outputs)
    kinds = ("prefix_tokens", "reused_tokens", "recomputed_tokens")
    return {kind: 100 * sum(report[kind] for report in reports) / total for kind in kinds}


@pytest.mark.parametrize("size", ["ample", "tight", "crowded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_shares_are_those_of_an_engine(
    size: str, policy: str, served: Engine, estimates: dict[str, Any]
) -> None:
    row = estimates[size][policy]
    others = served.pool.get_new_blocks(NUM_BLOCKS - TIGHT) if size == "tight" else []
    outputs = send(served, NAMESPACE | {"segreuse_policy": policy}, size == "crowded")
    served.pool.free_blocks(others)
    served.reset()
    found = shares(outputs)
    if size == "crowded":  # who finds whose passages first is chance, and `focus` goes by that
        found.pop("recomputed_tokens")
    total = sum(len(output.prompt_token_ids) for output in outputs)
    for kind, share in found.items():
        assert 100 * row[kind] / total == pytest.approx(share, abs=2), kind
    assert (row["evicted_blocks"] > 100) is (size == "tight")


@pytest.mark.parametrize("size", ["ample", "tight"])
def test_prefix_caching_alone_is_that_of_an_engine(
    size: str, served: Engine, estimates: dict[str, Any]
) -> None:
    others = served.pool.get_new_blocks(NUM_BLOCKS - TIGHT) if size == "tight" else []
    outputs = send(served, None, together=False)
    served.pool.free_blocks(others)
    served.reset()
    assert estimates[size][None]["prefix_tokens"] == sum(out.num_cached_tokens for out in outputs)
