# SPDX-License-Identifier: Apache-2.0
"""What `bench soak` makes of an engine, with one that is made up."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness import BenchError
from bench.suites import soak

LOAD = soak.Load(requests=80, warm_up=8, reset_every=20)


class Engine:
    """Answers every request after a few steps; loses some blocks, or hangs, if told so."""

    def __init__(self, leaked: int = 0, never: int = -1, short: int = -1) -> None:
        pool = SimpleNamespace(
            num_gpu_blocks=10,
            get_num_free_blocks=lambda: 9 - leaked,
            index=SimpleNamespace(check_integrity=lambda: None),
        )
        self.scheduler = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(block_pool=pool),
            schedule=lambda: SimpleNamespace(preempted_req_ids={"somebody"}),
        )
        core = SimpleNamespace(scheduler=self.scheduler)
        self.engine_core = SimpleNamespace(engine_core=core)
        self.requests: dict[str, Any] = {}
        self.aborted: list[str] = []
        self._never, self._short = str(never), str(short)

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

    def _output(self, name: str, params: Any) -> Any:
        tokens = [1] * (params.max_tokens - (name == self._short))
        report = {"segreuse": {"reused_tokens": 5}} if params.extra_args else None
        return SimpleNamespace(
            request_id=name,
            outputs=[SimpleNamespace(token_ids=tokens)],
            finished=True,
            kv_transfer_params=report,
        )


def soaked(**faults: int) -> tuple[dict[str, float], Engine]:
    made_up = Engine(**faults)
    one = soak.Soak(made_up, LOAD)
    one.run()
    return one.result()["summary"], made_up


def test_a_sound_engine() -> None:
    summary, made_up = soaked()
    assert summary["requests"] == LOAD.requests
    for figure in ("leaked_blocks", "hung_requests", "failed_requests"):
        assert summary[figure] == 0
    assert made_up.aborted
    assert not made_up.requests


def test_what_is_wrong_is_counted() -> None:
    assert soaked(leaked=3)[0]["leaked_blocks"] == 3
    assert soaked(short=5)[0]["failed_requests"] == 1


def test_who_never_ends_hangs_and_does_not_stop_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "ABORTED", 0)
    one = soak.Soak(Engine(never=20), LOAD)
    one.run()
    assert one._hung == 1


def test_without_pressure_it_says_so() -> None:
    made_up = Engine()
    made_up.scheduler.schedule = lambda: SimpleNamespace(preempted_req_ids=None)
    one = soak.Soak(made_up, LOAD)
    one.run()
    with pytest.raises(BenchError, match="nothing was preempted"):
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
