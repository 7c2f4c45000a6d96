# SPDX-License-Identifier: Apache-2.0
"""How long decoding requests wait for the long prompts of others: with each prompt's work done at
once, and carried out over several steps (`spread_tokens`).

Two requests decode all the time while prompts come in, nine tenths of which are known documents in
ever new orders. `full` prompts name no extra keys: vLLM computes them in chunks of
`max_num_batched_tokens`, and what decodes waits for a chunk at most. That is the measure.

Counted are the gaps between tokens during which a prompt was in flight. Both servers are up, one of
them halted, and arms and policies take turns in rounds; ratios are against `full` prompts of the
same server. `default` is the server's own policy.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness, shapes, streams
from bench.server import Server

NAMESPACE = ("bench-stall",)
ARMS = {"at once": 0, "spread": None}
"""`spread_tokens` of each server."""

POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "default": {"segreuse_policy": "auto"},
    "hybrid": {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 0.1},
    "everything": {
        "segreuse_policy": "sparsex",
        "segreuse_recompute_ratio": 1.0,
        "segreuse_dense_layers": 0,
    },
}
_START_S = 1200  # compiling 28 layers takes minutes on a busy machine


class Load(NamedTuple):
    """How much is asked, of which model; each round asks `prompts` of every arm and policy."""

    shape: str
    eager: bool
    prompt_tokens: int
    step_tokens: int
    prompts: int
    rounds: int


FULL = Load("bench28", eager=False, prompt_tokens=4096, step_tokens=512, prompts=8, rounds=5)
QUICK = Load("bench8", eager=True, prompt_tokens=1024, step_tokens=128, prompts=1, rounds=1)

Seen = dict[tuple[str, str], streams.Beside]


def run(quick: bool) -> harness.SuiteResult:
    """Prompts of 4,096 tokens on the 28-layer shape (`quick`: 1,024, on the 8-layer shape)."""
    load = QUICK if quick else FULL
    model = shapes.make_model(load.shape)
    seen: Seen = {(arm, policy): streams.Beside([], []) for arm in ARMS for policy in POLICIES}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, tuple[Server, streams.Texts]] = {}
        for arm, spread_tokens in ARMS.items():
            server = _server(model, load, _config(folder / f"{arm}.yaml", spread_tokens))
            texts = streams.Texts(model, load.prompt_tokens, 0.9)
            servers[arm] = stack.enter_context(server), texts
        for arm, policy in seen:
            _beside(servers, arm, policy, streams_=1, prompts=1)  # warms up
        for turn in harness.progress(range(load.rounds), "stall"):
            for arm, policy in harness.rotated(list(seen), turn):
                taken = _beside(servers, arm, policy, streams_=2, prompts=load.prompts)
                for all_of_it, new in zip(seen[arm, policy], taken, strict=True):
                    all_of_it += new
    rows = [{"plans": arm, "policy": policy, **it.row()} for (arm, policy), it in seen.items()]
    return {"rows": rows, "summary": figures(seen) | {"prompts": load.prompts * load.rounds}}


def figures(seen: Seen) -> dict[str, float | str]:
    """Ratios of each arm and policy to `full` prompts of the same arm."""
    summary: dict[str, float | str] = {}
    for (arm, policy), it in seen.items():
        if policy == "full":
            continue
        name, mine, full = f"{policy}_{arm}".replace(" ", "_"), it.row(), seen[arm, "full"].row()
        for at in ("p50", "p99", "max"):
            summary[f"beside_{at}_ratio_{name}"] = mine[f"{at}_beside_ms"] / full[f"{at}_beside_ms"]
        summary[f"ttft_ratio_{name}"] = mine["p50_ttft_ms"] / full["p50_ttft_ms"]
    return summary


def _beside(
    servers: Mapping[str, tuple[Server, streams.Texts]],
    arm: str,
    policy: str,
    streams_: int,
    prompts: int,
) -> streams.Beside:
    """What is seen at the server of an arm, while no other takes cores from it.

    Raises:
        BenchError: a policy has not reused what was known.
    """
    server, texts = servers[arm]
    body = body_of(POLICIES[policy])
    with ExitStack() as stack:
        for other in servers.keys() - {arm}:
            stack.enter_context(servers[other][0].halted())
        streams.know(server, texts, NAMESPACE)  # anew: `full` prompts drive documents out
        before = streams.reused_tokens(server)
        found = asyncio.run(streams.decode_beside(server, texts, body, streams_, prompts))
        reusing = policy if body else None
        streams.reused_share(server, reusing, before, prompts * texts.known_tokens)
    return found


def _config(path: Path, spread_tokens: int | None) -> Path:
    path.write_text(json.dumps({"spread_tokens": spread_tokens}))  # which is YAML, too
    return path


def _server(model: Path, load: Load, config: Path) -> Server:
    args = ["--max-model-len", str(2 * load.prompt_tokens), "--block-size", "32"]
    args += ["--max-num-batched-tokens", str(load.step_tokens), "--dtype", "bfloat16"]
    args += ["--segreuse-config", str(config)]
    if load.eager:
        args.append("--enforce-eager")
    return Server(model, args, {"VLLM_CPU_KVCACHE_SPACE": "2"}, start_timeout_s=_START_S)


def body_of(options: dict[str, Any]) -> dict[str, Any]:
    """What the body of a request adds for these options of a policy; nothing without options."""
    if not options:
        return {}
    return {"vllm_xargs": {"extra_keys": list(NAMESPACE), **options}}
