# SPDX-License-Identifier: Apache-2.0
"""Which fleets are simulated, by part, and the rows that come out.

check      one engine, beside what `bench trace` estimates of the same trace
routers    every router at one load
capacity   the load at which the first token of 1 % of the prompts takes `slo` times as long as a
           mean prompt that is computed in full; and what a million tokens then cost
variants   what is assumed, changed one at a time
failure    an engine is lost, and comes back empty
footprint  memory of the index and of a router
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.fleet.footprint import in_new_process, index_row, router_row
from bench.fleet.simulation import FleetRun, FleetSetting, simulate
from bench.fleet.traffic import Streams, TenantSetting, Traffic
from bench.harness import BenchError, Row, progress
from segreuse_tools.estimate.gain import PREFIX
from segreuse_tools.estimate.gain_text import size_name

PARTS = ("check", "routers", "capacity", "variants", "failure", "footprint")
Arm = tuple[str, str]
"""Policy and router."""

ROUTED: tuple[Arm, ...] = (
    *((PREFIX, by) for by in ("round_robin", "least_busy", "session", "hash", "prefix")),
    *(("shift", by) for by in ("least_busy", "session", "hash", "prefix", "documents")),
    ("focus", "documents"),
)
LOADED: tuple[Arm, ...] = (
    *((PREFIX, by) for by in ("round_robin", "least_busy", "session", "prefix")),
    *(("shift", by) for by in ("least_busy", "documents")),
    ("focus", "documents"),
)
AT_SCALE: tuple[Arm, ...] = (
    *((PREFIX, by) for by in ("least_busy", "prefix")),
    *(("shift", by) for by in ("least_busy", "hash", "documents")),
)
"""Of fleets of hundreds, which take minutes each."""
BASE: Arm = (PREFIX, "least_busy")
VARIED: tuple[Arm, ...] = (BASE, ("shift", "documents"))
FAILING: tuple[Arm, ...] = (BASE, ("shift", "hash"), ("shift", "documents"))
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "as elsewhere": {},
    "a quarter of the components common": {"common_share": 0.25},
    "all components common": {"common_share": 1.0},
    "a tenant for each engine": {"engines_per_tenant": 1},
    "tenants of 16 engines": {"engines_per_tenant": 16},
    "a third of the GPU memory": {"gpu": 1 / 3},
    "three times the GPU memory": {"gpu": 3.0},
    "host memory of four times the GPU's": {"host": 4},
    "fetched from other engines": {"is_remote": True},
}
CHECKED = (100_000, 300_000, 1_000_000)
DIES, RETURNS, BEHIND = 0.6, 0.75, 0.02
_HALVINGS = 6


@dataclass(frozen=True)
class FleetPlan:
    """What is simulated.

    Attributes:
        streams: of the trace.
        estimate: file of `bench trace`, for the check.
        tenants: of one engine; the number of engines is replaced.
        fleet: of one engine; the router and the policy are replaced.
        engines: sizes of fleets.
        seeds: of the tenants; figures are means over them.
        load: of the parts with one load, see `Traffic`.
        loads: between which the capacity is sought.
        slo: see above.
        price: of an engine for an hour.
    """

    streams: Streams
    estimate: Path | None
    tenants: TenantSetting
    fleet: FleetSetting
    engines: tuple[int, ...]
    seeds: tuple[int, ...]
    load: float
    loads: tuple[float, float]
    slo: float
    price: float

    def rows(self, parts: Sequence[str]) -> Iterator[Row]:
        """Of all these parts."""
        made = {
            "check": self._check,
            "routers": self._routers,
            "capacity": self._capacity,
            "variants": self._variants,
            "failure": self._failure,
            "footprint": self._footprint,
        }
        for part in parts:
            yield from made[part]()

    def _traffic(self, engines: int, seed: int, **others: Any) -> Traffic:
        tenants = replace(self.tenants, engines=engines, seed=seed, **others)
        return Traffic(self.streams, tenants, self.fleet.cost, self.load)

    def _of(self, engines: int, arm: Arm, **others: Any) -> FleetSetting:
        policy, router = arm
        return replace(self.fleet, engines=engines, policy=policy, router=router, **others)

    def _check(self) -> Iterator[Row]:
        if self.estimate is None:
            raise BenchError("the check needs --estimate FILE, results of `bench trace`")
        rows = json.loads(self.estimate.read_text())["rows"]
        whole = TenantSetting(1, sum(map(len, self.streams.streams)))
        traffic = Traffic(self.streams, whole, self.fleet.cost, self.load)
        estimated = {row["cache"]: row for row in rows if row["of"] == "estimate"}
        for cache_tokens in CHECKED:
            row = estimated[size_name(cache_tokens)]
            for policy in (PREFIX, "focus", "shift"):
                fleet = self._of(1, (policy, "round_robin"), gpu_tokens=cache_tokens)
                found = figures(traffic, simulate(traffic, fleet), fleet, since=0)
                known = "prefix_share" if policy == PREFIX else "any_position_share"
                yield {
                    "of": "check",
                    "cache": row["cache"],
                    "policy": policy,
                    "known_share": found["known_share"],
                    "computed_share": found["computed_share"],
                    "estimated_known_share": row[known],
                    "estimated_computed_share": row.get(f"work_{policy.replace(' ', '_')}"),
                }

    def _routers(self) -> Iterator[Row]:
        for engines in self.engines:
            arms = ROUTED if engines <= 64 else AT_SCALE
            for arm in progress(arms, f"fleet, {engines} engines"):
                yield {"of": "routers", **self._mean(engines, arm)}

    def _mean(self, engines: int, arm: Arm, tenants: Any = None, **others: Any) -> Row:
        fleet, rows = self._of(engines, arm, **others), []
        for seed in self.seeds:
            traffic = self._traffic(engines, seed, **(tenants or {}))
            rows.append(figures(traffic, simulate(traffic, fleet), fleet))
        found = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        policy, router = arm
        return {"engines": engines, "policy": policy, "router": router, **found}

    def _capacity(self) -> Iterator[Row]:
        for engines in self.engines:
            by_arm: dict[Arm, list[float]] = {}
            for arm in progress(LOADED, f"fleet, capacity of {engines} engines"):
                fleet = self._of(engines, arm)
                by_arm[arm] = [
                    most_load(self._traffic(engines, seed), fleet, self.loads, self.slo)
                    for seed in self.seeds
                ]
            for (policy, router), loads in by_arm.items():
                ratios = [base / mine for base, mine in zip(by_arm[BASE], loads, strict=True)]
                yield {
                    "of": "capacity",
                    "engines": engines,
                    "policy": policy,
                    "router": router,
                    "load": float(np.mean(loads)),
                    "cost_over_prefix": float(np.mean(ratios)),
                    "cost_over_prefix_low": min(ratios),
                    "cost_over_prefix_high": max(ratios),
                    "price_per_million": self._price(float(np.mean(loads))),
                }

    def _price(self, load: float) -> float:
        traffic = self._traffic(1, self.seeds[0])
        token_s = traffic.mean_full_s * traffic.requests / traffic.tokens
        return self.price / 3600 * 1e6 * token_s / load

    def _variants(self) -> Iterator[Row]:
        engines = max(it for it in self.engines if it <= 64)
        for name, changed in progress(VARIANTS.items(), "fleet, variants"):
            tenants = {key: it for key, it in changed.items() if hasattr(self.tenants, key)}
            gpu = round(self.fleet.gpu_tokens * changed.get("gpu", 1))
            memory = {"gpu_tokens": gpu, "host_tokens": gpu * changed.get("host", 0)}
            is_remote = changed.get("is_remote", False)
            for arm in VARIED:
                row = self._mean(engines, arm, tenants, **memory, is_remote=is_remote)
                yield {"of": "variant", "variant": name, **row}

    def _failure(self) -> Iterator[Row]:
        for engines in (it for it in self.engines if 1 < it <= 64):
            for arm in FAILING:
                fleet = self._of(engines, arm)
                rows = [
                    lost(self._traffic(engines, seed), fleet, fleet.gpu_tokens)
                    for seed in self.seeds
                ]
                found = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
                names = {"engines": engines, "policy": arm[0], "router": arm[1]}
                yield {"of": "failure", **names, **found}

    def _footprint(self) -> Iterator[Row]:
        for tokens in CHECKED:
            for block_size in (16, 32):
                yield in_new_process(index_row, tokens, block_size)
        for engines in (10, 100, 1000):
            yield in_new_process(router_row, engines, 1000)


def figures(
    traffic: Traffic, run: FleetRun, fleet: FleetSetting, since: float = 0.5
) -> dict[str, float]:
    """Of the requests that arrive behind a share of the window: caches were empty before."""
    counted = run.at_s >= since * traffic.window_s
    tokens = run.tokens[counted].sum()
    window_s = (1 - since) * traffic.window_s
    busy_s = np.bincount(run.engine[counted], run.service_s[counted], fleet.engines)
    p50, p99 = np.quantile(run.ttft_s[counted] / traffic.mean_full_s, (0.5, 0.99))
    remote_bytes = run.remote[counted].sum() * fleet.links.token_bytes
    return {
        "load": traffic.mean_full_s * traffic.requests / fleet.engines / traffic.window_s,
        "prefix_share": run.prefix[counted].sum() / tokens,
        "known_share": (run.prefix + run.segments)[counted].sum() / tokens,
        "host_share": run.host[counted].sum() / tokens,
        "remote_share": run.remote[counted].sum() / tokens,
        "computed_share": run.computed[counted].sum() / tokens,
        "busy_share": busy_s.sum() / fleet.engines / window_s,
        "ttft_p50": float(p50),
        "ttft_p99": float(p99),
        "imbalance": float(busy_s.max() / busy_s.mean()),
        "remote_bytes_s": float(remote_bytes / fleet.engines / window_s),
    }


def most_load(
    traffic: Traffic, fleet: FleetSetting, loads: tuple[float, float], slo: float
) -> float:
    """The load, to within 2 % of the range's ratio, up to which `ttft_p99` is within `slo`."""
    low, high = loads
    for _ in range(_HALVINGS):
        load = float(np.sqrt(low * high))
        at = traffic.at_load(load)
        holds = figures(at, simulate(at, fleet), fleet)["ttft_p99"] <= slo
        low, high = (load, high) if holds else (low, load)
    return float(np.sqrt(low * high))


def lost(traffic: Traffic, fleet: FleetSetting, cache_tokens: int) -> dict[str, float]:
    """The loss of an engine, against the same requests without it.

    `known_lost` is of the first requests behind it, `recovered_share` the share of the window until
    no more than a point is missing, and `computed_again` what was computed more, in caches of an
    engine.
    """
    whole = simulate(traffic, fleet)
    broken = simulate(traffic, replace(fleet, dies=DIES, returns=RETURNS))
    assert broken.lost is not None
    at = whole.at_s / traffic.window_s

    def known(run: FleetRun, since: float) -> float:
        some = (at >= since) & (at < since + BEHIND)
        return float((run.prefix + run.segments)[some].sum() / max(1, run.tokens[some].sum()))

    starts = np.arange(DIES, 1 - BEHIND, BEHIND)
    missing = [known(whole, it) - known(broken, it) for it in starts.tolist()]
    back = next((n for n, it in enumerate(missing) if it <= 0.01), len(missing))
    soon = (at >= DIES) & (at < DIES + BEHIND)
    p99 = [
        float(np.quantile(run.ttft_s[soon] / traffic.mean_full_s, 0.99)) for run in (whole, broken)
    ]
    more = (broken.computed - whole.computed)[at >= DIES].sum()
    return {
        "known_lost": missing[0],
        "recovered_share": back * BEHIND,
        "computed_again": float(more / cache_tokens),
        "ttft_p99_whole": p99[0],
        "ttft_p99_broken": p99[1],
    }
