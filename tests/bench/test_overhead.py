# SPDX-License-Identifier: Apache-2.0
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from bench import engine
from bench.harness import BenchError
from bench.suites import overhead


def test_ratio_is_of_pairs_measured_together() -> None:
    # The machine became ten times slower half way; each pair still says 2 %.
    seconds = {"plain": [1.0, 1.0, 10.0], "segreuse": [1.0 / 0.98, 1.0 / 0.98, 10.0 / 0.98]}
    result = overhead._result(overhead.FULL, seconds, eager=True)
    assert result["summary"]["throughput_ratio"] == pytest.approx(0.98)
    assert [row["engine"] for row in result["rows"]] == ["plain", "segreuse"]
    assert result["summary"]["plain_tokens_per_s"] == 8 * (256 + 32)


class _Engine:
    def generate(self, *args: Any, **options: Any) -> None:
        """Nothing to do, at once."""


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[bool], None]], None]:
    """Puts a function, called in the child with `segreuse`, in the place of building an engine."""

    def install(function: Callable[[bool], None]) -> None:
        @contextmanager
        def fake(*args: Any, segreuse: bool, **options: Any) -> Iterator[_Engine]:
            function(segreuse)
            yield _Engine()

        # The children are forked, so they see this too, and are spared importing vLLM.
        vllm = SimpleNamespace(SamplingParams=lambda **options: options)
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        monkeypatch.setattr(engine, "engine", fake)
        monkeypatch.setattr(overhead.shapes, "make_model", lambda name: name)

    return install


@pytest.mark.parametrize("name", overhead.ENGINES)
def test_only_the_plain_engine_loads_no_plugin(
    build: Callable[[Callable[[bool], None]], None], name: str
) -> None:
    def check(segreuse: bool) -> None:
        assert segreuse == (name == "segreuse")
        assert (os.environ.get("VLLM_PLUGINS") == "") == (name == "plain")

    build(check)
    with overhead._child(name, overhead.QUICK, eager=True) as child:
        assert overhead._receive(child) == 0
        assert overhead._ask(child, [[1, 2, 3]]) >= 0


def test_an_engine_that_fails_says_why(build: Callable[[Callable[[bool], None]], None]) -> None:
    def fail(segreuse: bool) -> None:
        raise ValueError("no room for the KV cache")

    build(fail)
    with (
        overhead._child("segreuse", overhead.QUICK, eager=True) as child,
        pytest.raises(BenchError, match="engine segreuse: ValueError: no room"),
    ):
        overhead._receive(child)


def test_an_engine_that_dies_is_noticed(build: Callable[[Callable[[bool], None]], None]) -> None:
    build(lambda segreuse: os._exit(9))
    with (
        overhead._child("plain", overhead.QUICK, eager=True) as child,
        pytest.raises(BenchError, match="engine process ended"),
    ):
        overhead._receive(child)
