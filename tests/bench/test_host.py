# SPDX-License-Identifier: Apache-2.0
"""Parts of a time add up, and each function counts for one."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness import BenchError
from bench.stopwatch import Stopwatch
from bench.suites import host


class Work:
    """Functions that call each other, on a clock of their own."""

    now = 0.0

    def outer(self) -> str:
        Work.now += 1
        self.inner()
        self.inner()
        return "done"

    def inner(self) -> None:
        Work.now += 10

    def fails(self) -> None:
        Work.now += 5
        self.inner()
        raise ValueError("it failed")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    monkeypatch.setattr(Work, "now", 0.0)
    return Stopwatch(lambda: Work.now)


HERE = f"{__name__}:Work."


def test_a_function_counts_what_the_others_do_not(watch: Stopwatch) -> None:
    with watch.on({f"{HERE}outer": "outer", f"{HERE}inner": "inner"}):
        assert Work().outer() == "done"
        assert watch.take() == {"outer": 1, "inner": 20}
        Work().inner()
    assert watch.take() == {"inner": 10}
    Work().outer()
    assert watch.take() == {}, "afterwards nothing is timed"


def test_two_functions_may_be_one_part(watch: Stopwatch) -> None:
    with watch.on({f"{HERE}outer": "all", f"{HERE}inner": "all"}):
        Work().outer()
    assert watch.take() == {"all": 21}


def test_a_failure_is_timed_and_raised(watch: Stopwatch) -> None:
    with watch.on({f"{HERE}fails": "fails", f"{HERE}outer": "outer"}):
        with pytest.raises(ValueError, match="it failed"):
            Work().fails()
        Work().outer()
    assert watch.take() == {"fails": 15, "outer": 21}


@pytest.mark.parametrize("target", [f"{HERE}nobody", f"{HERE}now", "nowhere.at_all:Some.thing"])
def test_what_is_not_there_is_named(target: str, watch: Stopwatch) -> None:
    with pytest.raises(BenchError, match=target.replace(".", r"\.")), watch.on({target: "part"}):
        pass
    assert Work.outer.__name__ == "outer"


@pytest.mark.parametrize("target", [*host.PARTS, *host.OURS])
def test_every_part_is_there(target: str, watch: Stopwatch) -> None:
    with watch.on({target: "part"}):
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, Any]]:
    """An engine that answers at once, and what it was asked."""
    found: list[tuple[bool, int, Any]] = []

    class Engine:
        def __init__(self, model: Any, segreuse: bool, **options: Any) -> None:
            self.plugin = segreuse

        def __enter__(self) -> "Engine":
            return self

        def __exit__(self, *error: object) -> None:
            """Nothing to stop."""

        def get_tokenizer(self) -> Any:
            return SimpleNamespace(encode=len, decode=str)

    class Started(Engine):
        def __init__(self, model: Any, flags: Any, env: Any, command: Any) -> None:
            self.plugin = command is host.SEGREUSE_COMMAND

    class Asking:
        def __init__(self, server: Started, longest: int) -> None:
            self.plugin = server.plugin

        def ask(self, prompt: list[int], body: Any, most: int) -> Any:
            assert self.plugin or not body
            reused = 10**6 if body else 0
            return SimpleNamespace(ttft_s=0.004, tokens=SimpleNamespace(equal=reused))

    def first_token(llm: Engine, prompt: list[int], extra_args: Any = None) -> Any:
        found.append((llm.plugin, len(prompt), extra_args))
        report = {"policy": (extra_args or {}).get("segreuse_policy"), "reused_tokens": 10**6}
        return SimpleNamespace(ms=2.0 + bool(extra_args), report=report)

    monkeypatch.setattr(host.engine, "engine", Engine)
    monkeypatch.setattr(host, "Server", Started)
    monkeypatch.setattr(host, "Completions", Asking)
    monkeypatch.setattr(host.engine, "first_token", first_token)
    monkeypatch.setattr(host.shapes, "make_model", lambda name: name)
    monkeypatch.setattr(host, "SIZES", (512, 1024, 4096))
    monkeypatch.setattr(host, "ALL_NEW", 512)
    monkeypatch.setattr(host.Stopwatch, "take", lambda _: {"detokenise": 0.001, "forward": 0.0005})
    return found


def test_arms_are_compared_with_a_prefix_hit_and_with_vllm_alone(asked: list[Any]) -> None:
    result = host.run(quick=True)
    summary = result["summary"]
    assert summary["shift_over_hit_512"] == 1.5
    assert summary["focus_over_hit_1024"] == 1.5
    assert summary["hit_over_without_512"] == 1.0
    assert summary["detokenise_ms_with_1024"] == pytest.approx(1.0)
    assert not any("4096" in name for name in summary)
    one = [row for row in result["rows"] if (row["tokens"], row["arm"]) == (512, "plain")]
    parts = [(row["plugin"], row["part"], row["ms"]) for row in one]
    within = (("detokenise", 1.0), ("forward", 0.5), ("else", 0.5), ("all", 2.0))
    apart = {"tokenise", "pickle", "over HTTP"}
    assert [it for it in parts if it[1] not in apart] == [
        (plugin, *part) for plugin in (False, True) for part in within
    ]
    assert sorted((plugin, part) for plugin, part, _ in parts if part in apart) == [
        (False, "over HTTP"),
        (False, "tokenise"),
        *((True, part) for part in sorted(apart)),
    ]
    assert summary["shift_over_hit_http_1024"] == 1.0
    assert summary["hit_over_without_http_1024"] == 1.0


def test_all_prompts_of_a_size_are_as_long(asked: list[Any]) -> None:
    host.run(quick=True)
    documents = 2 * host.DOCUMENTS  # that are made known
    lengths = [length for _, length, _ in asked]
    blocks = [length % host.engine.BLOCK_TOKENS for length in lengths if length < 257]
    assert blocks == [0] * documents, "what is behind the last whole block is not found again"
    assert {512, 1024} <= {*lengths}
    assert sum(length < 256 + 1 for length in lengths) == documents
    plain = [length for _, length, extra in asked if extra is None and length == 1024]
    assert len(plain) == 2 * (host.QUICK_ROUNDS + 1), "the longest is not computed in full"
    keyed = [length for _, length, extra in asked if extra and "segreuse_policy" in extra]
    assert all(length > 500 for length in keyed)
