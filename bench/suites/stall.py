# SPDX-License-Identifier: Apache-2.0
"""How long decoding requests wait for the long prompts of others: with each prompt's work done at
once, and carried out over several steps (`spread_tokens`).

Two requests decode all the time while prompts come in, nine tenths of which are known documents in
ever new orders. `full` prompts name no extra keys: vLLM computes them in chunks of
`max_num_batched_tokens`, and what decodes waits for a chunk at most. That is the measure.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness, shapes, streams
from bench.server import Server

NAMESPACE = ("bench-stall",)
ARMS = {"at once": 0, "spread": None}
"""`spread_tokens` of each server."""

POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "hybrid": {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 0.1},
    "everything": {
        "segreuse_policy": "sparsex",
        "segreuse_recompute_ratio": 1.0,
        "segreuse_dense_layers": 0,
    },
}
_START_S = 1200  # compiling 28 layers takes minutes on a busy machine


class Load(NamedTuple):
    """How much is asked, of which model."""

    shape: str
    eager: bool
    prompt_tokens: int
    step_tokens: int
    prompts: int


FULL = Load("bench28", eager=False, prompt_tokens=4096, step_tokens=512, prompts=8)
QUICK = Load("bench8", eager=True, prompt_tokens=1024, step_tokens=128, prompts=2)


def run(quick: bool) -> harness.SuiteResult:
    """Prompts of 4,096 tokens on the 28-layer shape (`quick`: 1,024, on the 8-layer shape)."""
    load = QUICK if quick else FULL
    model = shapes.make_model(load.shape)
    seen: dict[tuple[str, str], streams.Beside] = {}
    for arm, spread_tokens in ARMS.items():
        texts = streams.Texts(model, load.prompt_tokens, 0.9)
        with (
            tempfile.TemporaryDirectory() as folder,
            _server(model, load, _config(Path(folder), spread_tokens)) as server,
        ):
            streams.know(server, texts, NAMESPACE)
            for policy, options in POLICIES.items():
                beside = partial(streams.decode_beside, server, texts, _body(options))
                asyncio.run(beside(1, 1))  # warms up
                seen[arm, policy] = asyncio.run(beside(2, load.prompts))
    rows = [{"plans": arm, "policy": policy, **it.row()} for (arm, policy), it in seen.items()]
    summary: dict[str, float | str] = {}
    for (arm, policy), it in seen.items():
        if policy != "full":
            name, full = f"{policy}_{arm}".replace(" ", "_"), seen[arm, "full"]
            summary[f"itl_p99_ratio_{name}"] = it.p99_gap_ms / full.p99_gap_ms
            summary[f"ttft_ratio_{name}"] = it.p50_ttft_ms / full.p50_ttft_ms
    return {"rows": rows, "summary": summary}


def _config(folder: Path, spread_tokens: int | None) -> Path:
    path = folder / "stall.yaml"
    path.write_text(json.dumps({"spread_tokens": spread_tokens}))  # which is YAML, too
    return path


def _server(model: Path, load: Load, config: Path) -> Server:
    args = ["--max-model-len", str(2 * load.prompt_tokens), "--block-size", "32"]
    args += ["--max-num-batched-tokens", str(load.step_tokens), "--dtype", "bfloat16"]
    args += ["--segreuse-config", str(config)]
    if load.eager:
        args.append("--enforce-eager")
    return Server(model, args, {"VLLM_CPU_KVCACHE_SPACE": "2"}, start_timeout_s=_START_S)


def _body(options: dict[str, Any]) -> dict[str, Any]:
    if not options:
        return {}
    return {"vllm_xargs": {"extra_keys": list(NAMESPACE), **options}}
