# SPDX-License-Identifier: Apache-2.0
"""What it costs to observe requests instead of serving them without extra keys, over HTTP.

Servers with segment reuse, of a model of 8 layers and of one of 28. Batches of requests about known
documents, each behind something new, take turns: in one the requests have no extra keys, in the
next they have and are observed. Both are computed in full. `observe_throughput_ratio` is the median
over all pairs of (time without) / (time observed) with 28 layers: 1.0 means that matching, planning
and indexing cost nothing. They cost the same whatever the model is, so that of 8 layers,
`observe_throughput_ratio_8_layers`, is lower. Intervals of 95 % are those of the median.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, NamedTuple

import openai

from bench import harness, shapes
from bench.server import SEGREUSE_COMMAND, Server, ServerError, with_tokens

SHAPES = {"observe_throughput_ratio_8_layers": "bench8", "observe_throughput_ratio": "bench28"}
"""By the figure of the summary."""
ARMS: dict[str, dict[str, Any]] = {
    "without": {},
    "observed": {"extra_keys": ["bench-observe"], "vllm_xargs": {"segreuse_observe": True}},
}
_DONATE = {"extra_keys": ["bench-observe"]}
_FIRST_TEXT_TOKEN = 300  # below are special tokens and single bytes


class Load(NamedTuple):
    """How much is asked: pairs of batches, each of requests that run together."""

    batches: int
    requests: int
    document_tokens: int
    output_tokens: int


FULL = Load(batches=40, requests=6, document_tokens=512, output_tokens=32)
QUICK = Load(batches=8, requests=3, document_tokens=256, output_tokens=16)


def run(quick: bool) -> harness.SuiteResult:
    """Compare the arms (`quick`: less load, and without torch.compile)."""
    load = QUICK if quick else FULL
    args = ["--max-model-len", "4096", "--block-size", "32", "--dtype", "bfloat16"]
    args += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
    args += ["--enforce-eager"] if quick else []
    rows: list[harness.Row] = []
    summary: dict[str, float | str] = {}
    for figure, shape in SHAPES.items():
        model = shapes.make_model(shape)
        try:
            with Server(model, args, command=SEGREUSE_COMMAND, start_timeout_s=900) as server:
                seconds = asyncio.run(measure(server, load))
        except (ServerError, openai.OpenAIError) as error:
            raise harness.BenchError(str(error)) from error
        pairs = zip(seconds["without"], seconds["observed"], strict=True)
        ratios = [without / observed for without, observed in pairs]
        low, high = harness.median_interval(ratios)
        summary |= {figure: harness.median(ratios), f"{figure}_low": low, f"{figure}_high": high}
        rows += [
            {
                "arm": arm,
                "shape": shape,
                "execution": "eager" if quick else "compiled",
                **load._asdict(),
                "median_batch_ms": harness.median(values) * 1e3,
                "min_batch_ms": min(values) * 1e3,
            }
            for arm, values in seconds.items()
        ]
    return {"rows": rows, "summary": summary}


async def measure(server: Server, load: Load) -> dict[str, list[float]]:
    """Seconds of each batch, by arm."""
    draw = random.Random(0)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def text(tokens: int) -> list[int]:
        return draw.choices(range(_FIRST_TEXT_TOKEN, shapes.VOCAB_SIZE), k=tokens)

    documents = [text(load.document_tokens) for _ in range(2)]
    async with openai.AsyncOpenAI(
        base_url=server.base_url, api_key="none", max_retries=0
    ) as client:

        async def ask(prompt: list[int], tokens: int, extra: dict[str, Any]) -> dict[str, Any]:
            answer = await client.completions.create(
                model=server.model_name,
                prompt="",
                max_tokens=tokens,
                temperature=0.0,
                extra_body=with_tokens(prompt, {"ignore_eos": True, **extra}),
            )
            params = (answer.model_extra or {}).get("kv_transfer_params") or {}
            report: dict[str, Any] = params.get("segreuse", {})
            return report

        for document in documents:
            await ask(document, 1, _DONATE)
        for turn in harness.progress(range(load.batches + 1), "observe"):
            for arm in harness.rotated(tuple(ARMS), turn):
                prompts = [
                    [*text(17), *documents[0], *text(9), *documents[1], *text(15)]
                    for _ in range(load.requests)
                ]
                began = time.perf_counter()
                asked = [ask(prompt, load.output_tokens, ARMS[arm]) for prompt in prompts]
                reports = await asyncio.gather(*asked)
                taken = time.perf_counter() - began
                _check(arm, reports, load)
                if turn:  # the first pair warms up
                    seconds[arm].append(taken)
    return seconds


def _check(arm: str, reports: list[dict[str, Any]], load: Load) -> None:
    for report in reports:
        found = (report.get("observed") or {}).get("reused_tokens", 0)
        if (arm == "observed") != (found >= load.document_tokens):
            raise harness.BenchError(
                f"a request of the arm {arm!r} observed {found} tokens of reuse: the comparison "
                "would not be what it says"
            )
