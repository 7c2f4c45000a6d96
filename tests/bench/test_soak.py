# SPDX-License-Identifier: Apache-2.0
"""What `bench soak` makes of an engine, with one that is made up."""

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness import BenchError
from bench.suites import soak
from vllm_segreuse.options.parsing import FREEZE
from vllm_segreuse.plan import FreezeOrder

LOAD = soak.Load(requests=240, warm_up=8, reset_every=20)


PLANS = SimpleNamespace(plans=[SimpleNamespace(spread=True), SimpleNamespace(spread=False)])


@pytest.fixture(autouse=True)
def _nothing_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.integrity.check_integrity", lambda index: None)


class Engine:
    """Answers every request after a few steps; loses some blocks, or hangs, if told so.

    Every second document that is frozen is given back, and wanted by the next prompt.
    """

    def __init__(self, leaked: int = 0, never: int = -1, short: int = -1, logged: int = -1) -> None:
        pool = SimpleNamespace(
            num_gpu_blocks=10,
            get_num_free_blocks=lambda: 9 - leaked,
        )
        index = SimpleNamespace()
        self.frozen: list[str] = []
        self.let_go: list[str] = []
        self.scheduler = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(block_pool=pool),
            connector=SimpleNamespace(
                scheduler_side=SimpleNamespace(
                    parts=SimpleNamespace(core=SimpleNamespace(index=index))
                )
            ),
            schedule=lambda: SimpleNamespace(
                preempted_req_ids={"somebody"}, kv_connector_metadata=PLANS
            ),
        )
        core = SimpleNamespace(
            scheduler=self.scheduler,
            segreuse_call=lambda name, *given: (
                self._state() if name == "frozen" else self.let_go.extend(*given)
            ),
        )
        self.engine_core = SimpleNamespace(engine_core=core)
        self.requests: dict[str, Any] = {}
        self.aborted: list[str] = []
        self._never, self._short, self._logged = str(never), str(short), str(logged)

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        self.requests[name] = params
        return name + "-internal"

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            del self.requests[name]

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return reset_running_requests

    def step(self) -> list[Any]:
        self.scheduler.schedule()
        ended = [name for name in self.requests if name != self._never][:2]
        return [self._output(name, self.requests.pop(name)) for name in ended]

    def _state(self) -> dict[str, Any]:
        odd = len(self.frozen) % 2
        return {"given_back": len(self.frozen) // 2, "wanted": self.frozen[-1:] if odd else []}

    def _output(self, name: str, params: Any) -> Any:
        tokens = [1] * (params.max_tokens - (name == self._short))
        order = (params.extra_args or {}).get(FREEZE)
        if order is not None:
            self.frozen.append(FreezeOrder.parse(order).entry)
        report = {"reused_tokens": 5, "frozen": order is not None}
        if name == self._logged:
            logging.getLogger("vllm.segreuse").error("an error of ours")
        return SimpleNamespace(
            request_id=name,
            outputs=[SimpleNamespace(token_ids=tokens)],
            finished=True,
            kv_transfer_params={"segreuse": report} if params.extra_args else None,
        )


def soaked(**faults: int) -> tuple[dict[str, float], Engine]:
    made_up = Engine(**faults)
    one = soak.Soak(made_up, LOAD)
    one.run()
    return one.result()["summary"], made_up


def test_a_sound_engine() -> None:
    summary, made_up = soaked()
    assert summary["requests"] == LOAD.requests
    for figure in ("leaked_blocks", "hung_requests", "failed_requests", "contained_errors"):
        assert summary[figure] == 0
    assert made_up.aborted
    assert not made_up.requests


def test_documents_come_return_and_go() -> None:
    summary, made_up = soaked()
    assert summary["frozen_documents"] == len(made_up.frozen)
    assert summary["returned_documents"] == len(made_up.frozen) - len(set(made_up.frozen)) > 0
    assert set(made_up.let_go) >= set(made_up.frozen)
    assert summary["given_back_documents"] == len(made_up.frozen) // 2


def test_what_is_wrong_is_counted() -> None:
    assert soaked(leaked=3)[0]["leaked_blocks"] == 3
    assert soaked(short=5)[0]["failed_requests"] == 1
    assert soaked(logged=5)[0]["contained_errors"] == 1


def test_who_never_ends_hangs_and_does_not_stop_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "ABORTED", 0)
    kinds = tuple(kind for kind in soak.KINDS if kind != "aborted")
    monkeypatch.setattr(soak, "KINDS", kinds)
    one = soak.Soak(Engine(never=20), LOAD)
    one.run()
    assert one.result()["summary"]["hung_requests"] == 1


def test_without_pressure_it_says_so() -> None:
    made_up = Engine()
    made_up.scheduler.schedule = lambda: SimpleNamespace(
        preempted_req_ids=None, kv_connector_metadata=PLANS
    )
    one = soak.Soak(made_up, LOAD)
    one.run()
    with pytest.raises(BenchError, match="preempted: 0"):
        one.result()


def test_slope() -> None:
    samples = [(n, 100 + 0.002 * n + (n % 20) / 100) for n in range(0, 2000, 10)]
    assert soak.slope_per_1k(samples) == pytest.approx(2.0, abs=0.01)


def test_memory_is_measured() -> None:
    assert soak.resident_mb() > 10


def test_quarters_add_up() -> None:
    one = soak.Soak(Engine(), LOAD)
    one.run()
    rows = one.result()["rows"]
    counts = Counter({key: sum(row[key] for row in rows) for key in ("ended", "aborted")})
    assert sum(counts.values()) == LOAD.requests
