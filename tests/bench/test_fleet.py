# SPDX-License-Identifier: Apache-2.0
"""Fleets on paper: nothing is lost or counted twice, and routers do what they are there for."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.fleet import command, simulation
from bench.fleet.caches import EngineCache, Holders
from bench.fleet.footprint import in_new_process, index_row, router_row
from bench.fleet.plan import figures, lost, most_load
from bench.fleet.routers import ROUTERS
from bench.fleet.simulation import FleetRun, FleetSetting, Links, simulate
from bench.fleet.traffic import Streams, TenantSetting, Traffic
from bench.harness import BenchError
from segreuse_tools.estimate.component_cache import ComponentCache
from segreuse_tools.estimate.cost_model import CostModel
from segreuse_tools.estimate.gain import PREFIX
from tests.estimate.test_traces import ragpulse, write_ragpulse
from vllm_segreuse.cache.index import bytes_per_block

COST = CostModel(1e-4)
LINKS = Links(1000, 1e9, 1e9)
REQUESTS, DOCUMENTS, TOKENS = 240, 40, 160


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Streams:
    """Two of forty documents a request, by a law of Zipf; a session has three requests."""
    rng, weights = np.random.default_rng(0), 1 / np.arange(1, DOCUMENTS + 1)
    lines: list[Any] = []
    for number in range(REQUESTS):
        both = rng.choice(DOCUMENTS, 2, replace=False, p=weights / weights.sum())
        line = ragpulse(number, both.tolist(), number % 50)
        lines.append(line | {"session_id": f"session {number // 3}"})
    folder = tmp_path_factory.mktemp("trace")
    return Streams(write_ragpulse(folder, lines, DOCUMENTS, TOKENS))


def traffic_of(streams: Streams, engines: int, load: float = 0.5, **others: Any) -> Traffic:
    usual = {"requests_per_engine": 120, "engines_per_tenant": 2, "seed": 3}
    return Traffic(streams, TenantSetting(engines, **(usual | others)), COST, load)


def fleet_of(engines: int, **others: Any) -> FleetSetting:
    usual = {"router": "documents", "policy": "shift", "gpu_tokens": 3000}
    return FleetSetting(engines, cost=COST, links=LINKS, **(usual | others))


def same(one: FleetRun, other: FleetRun) -> bool:
    return all(np.array_equal(getattr(one, it.name), getattr(other, it.name)) for it in fields(one))


@pytest.mark.parametrize("policy", [PREFIX, "shift", "focus"])
@pytest.mark.parametrize(
    "more",
    [{}, {"host_tokens": 9000}, {"is_remote": True, "router": "least_busy"}, {"dies": 0.5}],
)
def test_every_token_is_reused_or_computed_once(
    streams: Streams, policy: str, more: dict[str, Any]
) -> None:
    traffic = traffic_of(streams, 4)
    run = simulate(traffic, fleet_of(4, policy=policy, **more))
    asked = np.array([request.tokens for request in traffic])
    assert run.tokens.tolist() == asked.tolist()
    assert run.tokens.sum() == traffic.tokens
    left = run.tokens - run.prefix - run.segments
    assert left.min() >= 1
    assert run.prefix.sum() > 0
    if policy == "focus":  # it computes some of the segments again
        assert (run.computed >= left).all()
        assert run.computed.sum() > left.sum()
    else:
        assert run.computed.tolist() == left.tolist()
    assert (run.host + run.remote <= run.prefix + run.segments + 1).all()
    assert (run.host.sum() > 0) == ("host_tokens" in more)
    assert (run.remote.sum() > 0) == ("is_remote" in more)
    assert (run.ttft_s >= run.service_s - 1e-9).all()


def test_an_engine_does_one_thing_at_a_time(streams: Streams) -> None:
    run = simulate(traffic_of(streams, 4, load=1.5), fleet_of(4))
    for engine in range(4):
        mine = run.engine == engine
        ends = (run.at_s + run.ttft_s)[mine]
        assert (np.diff(ends) >= run.service_s[mine][1:] - 1e-9).all()


def test_shift_costs_what_the_policy_says(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = traffic_of(streams, 2)
    short = simulate(traffic, fleet_of(2))
    monkeypatch.setattr(simulation, "COMPUTES_NOTHING_TWICE", "")
    assert short.segments.sum() > 0
    assert same(short, simulate(traffic, fleet_of(2)))


@pytest.mark.parametrize("policy", [PREFIX, "shift"])
def test_no_cache_holds_more_than_its_memory(streams: Streams, policy: str) -> None:
    capacity, holders = (1400, 1800), (Holders(2), Holders(2))
    least = None if policy == PREFIX else 128
    caches = [EngineCache(it, capacity, least, holders, is_remote=True) for it in range(2)]
    fullest = [0, 0]
    for request in traffic_of(streams, 2):
        cache = caches[request.number % 2]
        cache.run(request)
        for place, used in enumerate(cache.used):
            assert 0 <= used <= capacity[place]
            fullest[place] = max(fullest[place], used)
    assert min(fullest) > 1000
    for cache in caches:
        cache.clear()
        assert cache.used == [0, 0]
    assert not any(it._masks for it in holders)


def test_a_prompt_that_has_no_room_is_computed(streams: Streams) -> None:
    run = simulate(traffic_of(streams, 1), fleet_of(1, gpu_tokens=100))
    assert run.prefix.sum() == run.segments.sum() == 0
    assert run.computed.tolist() == run.tokens.tolist()


def test_the_same_seed_is_the_same_fleet(streams: Streams) -> None:
    first, again = (simulate(traffic_of(streams, 4), fleet_of(4)) for _ in range(2))
    assert same(first, again)
    assert not same(first, simulate(traffic_of(streams, 4, seed=4), fleet_of(4)))


@pytest.mark.parametrize("policy", [PREFIX, "shift"])
def test_a_fleet_of_one_is_the_same_under_every_router(streams: Streams, policy: str) -> None:
    runs = [
        simulate(traffic_of(streams, 1), fleet_of(1, router=it, policy=policy)) for it in ROUTERS
    ]
    assert all(same(runs[0], run) for run in runs[1:])


def test_one_engine_without_limits_knows_the_prefixes_of_the_estimate(streams: Streams) -> None:
    traffic = traffic_of(streams, 1, requests_per_engine=REQUESTS, engines_per_tenant=1)
    run = simulate(traffic, fleet_of(1, policy=PREFIX, gpu_tokens=10**9))
    cache = ComponentCache(10**9)
    known = [min(cache.run(it.parts)[0], it.tokens - 1) for it in traffic]
    assert run.prefix.tolist() == known


@pytest.mark.parametrize("router", ["prefix", "documents"])
def test_routers_that_know_what_engines_hold_know_what_they_have_to_do(
    streams: Streams, router: str
) -> None:
    """All tenants begin alike, so that without a bound nearly all of it goes to one engine."""
    traffic = traffic_of(streams, 4, load=1.0, common_share=1.0)
    shares = {}
    for bound in (0.5, 1e9):
        fleet = fleet_of(4, router=router, bound=bound)
        shares[bound] = figures(traffic, simulate(traffic, fleet), fleet)
    assert shares[0.5]["imbalance"] < 2 < 3 < shares[1e9]["imbalance"]
    assert shares[0.5]["ttft_p99"] < 0.5 * shares[1e9]["ttft_p99"]


def test_documents_are_found_where_they_are(streams: Streams) -> None:
    """What one engine has computed, the others need not."""
    traffic = traffic_of(streams, 4, engines_per_tenant=4, load=0.2)
    known = {}
    for router in ("round_robin", "documents"):
        fleet = fleet_of(4, router=router, bound=1.0, gpu_tokens=10**6)
        known[router] = figures(traffic, simulate(traffic, fleet), fleet)["known_share"]
    assert known["documents"] > known["round_robin"] + 0.02


def test_tenants_share_what_they_are_told_to(streams: Streams) -> None:
    def ids(common_share: float) -> list[set[int]]:
        traffic = traffic_of(streams, 4, engines_per_tenant=2, common_share=common_share)
        places = [place.tenant for place in traffic._places]
        return [
            {id for request in traffic if places[request.number] == it for id in request.ids}
            for it in range(2)
        ]

    one, other = ids(0.0)
    assert not one & other
    one, other = ids(1.0)
    assert len(one & other) > 0.5 * len(one)
    one, half = ids(0.5)
    assert 0 < len(one & half) < 0.7 * len(one)


def test_load_changes_times_only(streams: Streams) -> None:
    traffic = traffic_of(streams, 2, load=0.5)
    double = traffic.at_load(1.0)
    assert double.window_s == pytest.approx(traffic.window_s / 2)
    assert [it._replace(at_s=0) for it in traffic] == [it._replace(at_s=0) for it in double]
    times = [it.at_s for it in traffic]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < traffic.window_s
    again = Traffic(streams, TenantSetting(2, 120, 2, seed=3), COST, 1.0)
    assert again.window_s == pytest.approx(double.window_s)


def test_capacity_is_the_load_at_which_the_slo_is_reached(streams: Streams) -> None:
    traffic, fleet = traffic_of(streams, 2), fleet_of(2)
    most = most_load(traffic, fleet, (0.2, 4.0), slo=3.0)

    def p99(load: float) -> float:
        at = traffic.at_load(load)
        return figures(at, simulate(at, fleet), fleet)["ttft_p99"]

    assert p99(0.9 * most) <= 3.0 < p99(1.15 * most)
    assert most < most_load(traffic, replace(fleet, policy="shift"), (0.2, 4.0), slo=9.0)


def test_a_lost_engine_is_missed_and_answers_nothing_meanwhile(streams: Streams) -> None:
    traffic = traffic_of(streams, 2, load=3.0)
    fleet = fleet_of(2, router="hash", dies=0.5, returns=0.75)
    run = simulate(traffic, fleet)
    gone = (run.at_s >= 0.5 * traffic.window_s) & (run.at_s < 0.75 * traffic.window_s)
    assert run.lost is not None
    assert run.lost not in run.engine[gone]
    assert run.lost in run.engine[run.at_s >= 0.75 * traffic.window_s]
    waited = (run.at_s < 0.5 * traffic.window_s) & (run.engine != run.lost)
    whole = simulate(traffic, replace(fleet, dies=None))
    sent_again = waited & (whole.engine == run.lost)
    assert sent_again.any()
    assert ((run.at_s + run.ttft_s)[sent_again] > 0.5 * traffic.window_s).all()
    found = lost(traffic, replace(fleet, dies=None), fleet.gpu_tokens)
    assert found["computed_again"] > 0
    assert found["ttft_p99_broken"] > found["ttft_p99_whole"]


@pytest.mark.slow
def test_the_footprint_is_of_the_real_index_and_scorer() -> None:
    row = in_new_process(index_row, 1 << 19, 16)
    assert 4 < row["bytes_per_token"] < 2 * row["reserved_per_token"]
    assert row["reserved_per_token"] == bytes_per_block(16) / 16
    few, more = router_row(3, 10), router_row(3, 40)
    assert few["polled_bytes_s"] == pytest.approx(3 * few["answer_bytes"] / 2)
    assert more["answer_bytes"] > 3 * few["answer_bytes"]


def test_the_command_writes_what_it_simulated(
    streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "Streams", lambda path: streams)
    file, estimate = tmp_path / "fleet.json", tmp_path / "trace.json"
    shares = {"prefix_share": 0.5, "any_position_share": 0.5, "work_shift": 0.5}
    rows = [{"of": "estimate", "cache": it, **shares} for it in ("100K", "300K", "1M")]
    estimate.write_text(json.dumps({"rows": rows}))
    given = ["--trace", "trace", "--engines", "1,2", "--seeds", "1", "--requests-per-engine", "9"]
    parts = "check,routers,capacity,variants,failure"
    given += ["--parts", parts, "--estimate", str(estimate), "--json", str(file)]
    assert command.main(given) == 0
    written = json.loads(file.read_text())
    assert {row["of"] for row in written["rows"]} == {
        *("check", "routers", "capacity", "variant", "failure")
    }
    gap = max(
        (row[name] - 0.5 for row in written["rows"] if row["of"] == "check"
         for name in ("known_share", "computed_share") if row[f"estimated_{name}"]),
        key=abs,
    )  # fmt: skip
    assert written["summary"]["simulation_minus_estimate"] == gap
    assert written["environment"]["token_bytes"] == 147_456


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchError, match="cannot read"):
        Streams(tmp_path / "nothing.jsonl")
    assert command.main(["--trace", str(tmp_path / "nothing.jsonl")]) == 1
    assert "cannot read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--trace", "x", "--parts", "nonsense"])
