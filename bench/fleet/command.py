# SPDX-License-Identifier: Apache-2.0
"""`python -m bench fleet --trace FILE`: engines behind a router, simulated from a trace of ids.

Needs no engine. Times are those of a cost model, `--speed`; seed 0 is the one that `--bound` was
chosen with, so figures are of others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import harness
from bench.fleet.plan import PARTS, FleetPlan
from bench.fleet.simulation import FleetSetting, Links
from bench.fleet.traffic import Streams, TenantSetting
from segreuse_tools.command_line import number
from segreuse_tools.estimate.cost_model import measured
from segreuse_tools.estimate.gain import PREFIX
from segreuse_tools.model_folder import InputError

SPEED = harness.REPOSITORY / "bench" / "results" / "h100" / "gpu-headline.json"


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status."""
    args = _parser().parse_args(argv)
    where = harness.environment()
    try:
        plan = _plan(args)
        rows = [*plan.rows(args.parts)]
    except (harness.BenchError, InputError) as error:
        print(f"bench fleet: {error}", file=sys.stderr)
        return 1
    given = {
        name: value
        for name, value in vars(args).items()
        if name not in ("json", "speed", "estimate")
    }
    where |= given | {"trace": plan.streams.name, "interrupted": False}
    cost = plan.fleet.cost
    where |= {"token_s": cost.token_s, "pair_s": cost.pair_s}
    result: harness.SuiteResult = {"rows": rows, "summary": _summary(rows)}
    harness.report("fleet", where, result)
    if args.json:
        harness.write_json(args.json, "fleet", where, result)
    return 0


def _summary(rows: list[harness.Row]) -> dict[str, float]:
    gaps = [
        row[name] - row[f"estimated_{name}"]
        for row in rows
        if row["of"] == "check"
        for name in ("known_share", "computed_share")
        if row[f"estimated_{name}"] is not None
    ]
    return {"simulation_minus_estimate": max(gaps, key=abs)} if gaps else {}


def _plan(args: argparse.Namespace) -> FleetPlan:
    links = Links(args.token_bytes, args.host_gb_per_s * 1e9, args.network_gb_per_s * 1e9)
    fleet = FleetSetting(
        1, "round_robin", PREFIX, args.gpu_tokens, measured(args.speed), links, bound=args.bound
    )
    tenants = TenantSetting(1, args.requests_per_engine, args.engines_per_tenant)
    return FleetPlan(
        Streams(args.trace),
        args.estimate,
        tenants,
        fleet,
        tuple(args.engines),
        tuple(args.seeds),
        args.load,
        (args.least_load, args.most_load),
        args.slo,
        args.price,
    )


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _part_names(text: str) -> list[str]:
    names = text.split(",")
    if wrong := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(PARTS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench fleet", description=__doc__)
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="a file or a folder")
    add("--parts", type=_part_names, default=[*PARTS], help=f"({','.join(PARTS)})")
    add("--engines", type=_numbers, default=[8, 64], help="sizes of fleets (8,64)")
    add("--seeds", type=_numbers, default=[1, 2, 3], help="of the tenants (1,2,3)")
    add("--requests-per-engine", type=number(int, 2), default=120, help="(%(default)s)")
    add(
        "--engines-per-tenant",
        type=number(float, 0.001),
        default=8.0,
        help="that a tenant keeps busy (%(default)s)",
    )
    add("--gpu-tokens", type=number(int, 16), default=300_000, help="of KV (%(default)s)")
    add("--load", type=number(float, 0.01), default=0.8, help="of what full prefill could bear")
    add("--least-load", type=number(float, 0.01), default=0.5, help="capacity: no less")
    add("--most-load", type=number(float, 0.01), default=4.0, help="capacity: no more")
    add("--slo", type=number(float, 0.1), default=5.0, help="p99 over a full prefill (%(default)s)")
    add("--bound", type=number(float, 0), default=0.25, help="of routers, in prompts (%(default)s)")
    add("--price", type=number(float, 0), default=2.0, help="of a GPU's hour (%(default)s)")
    add("--token-bytes", type=number(int, 1), default=147_456, help="KV: Qwen3-8B's (%(default)s)")
    add("--host-gb-per-s", type=number(float, 0.01), default=25.0, help="(%(default)s)")
    add("--network-gb-per-s", type=number(float, 0.01), default=25.0, help="(%(default)s)")
    add("--speed", type=Path, default=SPEED, help="results of `bench gpu` or `bench ttft`")
    add("--estimate", type=Path, help="check: results of `bench trace` of the same trace")
    add("--json", type=Path, metavar="FILE", help="also write all of it here")
    return parser
