# SPDX-License-Identifier: Apache-2.0
"""Runs go to the backend in rows, scattered queries to the kernel, and nothing stays replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.pages import BLOCK_SIZE, make_layer
from vllm_segreuse.compat.attention_impl import replaced_forward
from vllm_segreuse.kernels.dispatch import LONG_RUN, Kernels
from vllm_segreuse.model.attention_kind import AttentionKind
from vllm_segreuse.model.kv_layout import discover_layout
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.prefill import attention as attention_module
from vllm_segreuse.prefill.attention import PassAttention, Queries, ScatteredQueries
from vllm_segreuse.prefill.rows import Execution
from vllm_segreuse.prefill.tokens import TokenTable

TABLES = torch.arange(6, dtype=torch.int32).view(2, 3)


class Impl:
    scale = 0.5

    def forward(self, *_: Any, **__: Any) -> str:
        return "stock"


@dataclass(frozen=True)
class Plan:
    """What a kernel has planned, as far as this side looks into it."""

    splits: int = 1


class World:
    """Two layers, a log of what computed them, and kernels that only log."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kernel: bool,
        plans: bool,
        long_run: int | None = LONG_RUN,
    ) -> None:
        self.log: list[str] = []
        self.metadata: Any = None
        self.execution: Execution | None = None
        self.scheduled: list[Any] = []
        pages = [make_layer("HND") for _ in range(2)]
        self.layers = [
            SimpleNamespace(
                impl=Impl(),
                kv_cache=p.kv_cache,
                kv_cache_dtype="auto",
                num_heads=4,
                head_size=32,
                layer_name=name,
            )
            for p, name in zip(pages, "ab", strict=True)
        ]
        kernels = Kernels(
            align=lambda *_: None,
            store=lambda *_: None,
            token_scores=lambda *_: torch.empty(0),
            sparse_attention=self._attend if kernel else None,
            plan_attention=self._plan if plans else None,
            description="",
            long_run=long_run,
        )
        monkeypatch.setattr(attention_module, "pass_context", self._context)
        rows = SimpleNamespace(vllm_config=None, forward_context=self._rows)
        layers: Any = self.layers
        kv = [
            LayerKv(layer, discover_layout(page, BLOCK_SIZE), None, kernels)
            for layer, page in zip(layers, pages, strict=True)
        ]
        self.kv = kv
        self.subject = PassAttention(rows, kv)  # type: ignore[arg-type]

    @contextmanager
    def _context(
        self,
        config: Any,
        metadata: dict[str, Any],
        tokens: Any,
        execution: Execution,
        slots: None,
    ) -> Iterator[None]:
        assert metadata["a"] is metadata["b"], "layers that are alike share a schedule"
        self.metadata, self.execution = metadata["a"], execution
        yield

    @contextmanager
    def _rows(
        self, tokens: TokenTable, tables: torch.Tensor, execution: Execution
    ) -> Iterator[None]:
        self.log.append("rows")
        self.execution = execution
        yield

    def _attend(self, out: torch.Tensor, query: torch.Tensor, *args: Any, **more: Any) -> None:
        self.log.append("kernel")
        *_, tables, _, positions, scale = args
        assert torch.equal(tables, TABLES)
        assert scale == Impl.scale
        self.scheduled.append(more)
        out.copy_(query + positions[:, None, None])

    def _plan(self, *_: Any, window: int) -> Plan:
        self.log.append(f"plan {window}" if window else "plan")
        return Plan()


def tokens(*positions: int) -> TokenTable:
    where = torch.tensor(positions)
    return TokenTable(where, where, torch.zeros_like(where), where)


@pytest.mark.parametrize(
    ("positions", "kernel", "expected"),
    [
        ([1, 5, 9], True, "kernel"),
        ([1, 5, 9], False, "rows"),
        (list(range(16)), True, "rows"),
        (list(range(15)), True, "kernel"),
        ([*range(20), *range(30, 42)], True, "rows"),
        ([*range(20), *range(30, 41)], True, "kernel"),
    ],
)
def test_long_runs_are_rows(
    positions: list[int], kernel: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, kernel, plans=False)
    with world.subject.forward_context(tokens(*positions), TABLES):
        query = torch.randn(len(positions), 4, 32)
        out = torch.empty_like(query)
        for layer in world.layers:
            result = layer.impl.forward(
                layer, query, None, None, layer.kv_cache, world.metadata, out
            )
            if expected == "rows":
                assert result == "stock"
            else:
                assert torch.equal(out, query + torch.tensor(positions)[:, None, None])
    assert world.log == (["rows"] if expected == "rows" else ["kernel"] * 2)


@pytest.mark.parametrize(("long_run", "expected"), [(None, "kernel"), (41, "kernel"), (40, "rows")])
def test_kernels_say_from_which_runs_on_rows_are_faster(
    long_run: int | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, kernel=True, plans=False, long_run=long_run)
    with world.subject.forward_context(tokens(*range(40)), TABLES):
        query = torch.randn(40, 4, 32)
        for layer in world.layers:
            layer.impl.forward(
                layer, query, None, None, layer.kv_cache, world.metadata, query.clone()
            )
    assert set(world.log) == {expected}


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("positions", [[1, 5, 9], list(range(16))], ids=["kernel", "rows"])
def test_queries_are_captured_however_they_attend(
    positions: list[int], padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = Execution(compiled=True, graph_tokens=padding and len(positions) + padding)
    world = World(monkeypatch, kernel=True, plans=False)
    queries = [torch.randn(len(positions), 4, 32) for _ in world.layers]
    count = len(positions)
    asked: list[Any] = []

    def note(*given: Any) -> None:
        world.log.append("asked")
        asked.append(given)

    everyone = Queries(world.layers, np.arange(2 * count), note)  # type: ignore[arg-type]
    few = Queries(world.layers[1:], np.array([1, count, count + 2]), note)  # type: ignore[arg-type]
    for collected in (everyone, few):
        for _ in range(2):  # two chunks
            where = tokens(*positions), TABLES
            with world.subject.forward_context(*where, execution, collected):
                assert world.execution == execution
                for layer, query in zip(world.layers, queries, strict=True):
                    given = torch.cat([query, torch.full((padding, 4, 32), torch.nan)])
                    out = torch.zeros_like(given)
                    layer.impl.forward(
                        layer, given, None, None, layer.kv_cache, world.metadata, out
                    )
                    assert not out[len(positions) :].any(), "nobody attends for padding"
                    given.zero_()  # the backend may reuse its memory
    attended = ["kernel", "asked"] * 2 if world.log[0] == "kernel" else ["rows", "asked", "asked"]
    assert world.log[: 2 * len(attended)] == 2 * attended, "behind attention: keys are written"
    chunks = [slice(0, count), slice(count, 2 * count)]
    expected = [(i, chunk, queries[i]) for chunk in chunks for i in (0, 1)]
    expected += [(0, slice(0, 1), queries[1][[1]]), (0, slice(1, 3), queries[1][[0, 2]])]
    for found, wanted in zip(asked, expected, strict=True):
        assert found[:2] == wanted[:2]
        assert torch.equal(found[2], wanted[2])
    assert (everyone.take_work(), few.take_work(), few.take_work()) == (4 * count, 3, 0)
    assert all("forward" not in vars(layer.impl) for layer in world.layers)
    with world.subject.forward_context(tokens(*positions), TABLES):
        layer.impl.forward(layer, query, None, None, layer.kv_cache, world.metadata, out)
    assert len(asked) == 6, "nobody asks any more"


def test_the_schedule_is_made_once_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, kernel=True, plans=True)
    for _ in range(2):
        with world.subject.forward_context(tokens(1, 3), TABLES):
            assert isinstance(world.metadata, ScatteredQueries)
            query = torch.randn(2, 4, 32)
            for layer in world.layers:
                out = torch.empty_like(query)
                layer.impl.forward(layer, query, None, None, layer.kv_cache, world.metadata, out)
    assert world.log == ["plan", "kernel", "kernel"] * 2
    assert world.scheduled == [{"value_scale": 1.0, "schedule": Plan()}] * 4


def test_layers_of_other_windows_have_schedules_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, kernel=True, plans=True)
    full, windowed = world.kv
    world.subject = PassAttention(
        SimpleNamespace(vllm_config=None),  # type: ignore[arg-type]
        [full, replace(windowed, kind=AttentionKind(window=70))],
    )
    where = tokens(1, 3)
    found: dict[str, Any] = {}

    @contextmanager
    def context(_: Any, metadata: dict[str, Any], *__: Any) -> Iterator[None]:
        found.update(metadata)
        yield

    monkeypatch.setattr(attention_module, "pass_context", context)
    query = torch.randn(2, 4, 32)
    with world.subject.forward_context(where, TABLES):
        assert found["a"] is not found["b"]
        for layer, name in zip(world.layers, "ab", strict=True):
            out = torch.empty_like(query)
            layer.impl.forward(layer, query, query, query, layer.kv_cache, found[name], out)
    assert world.log == ["plan", "kernel", "plan 70", "kernel"]
    assert [given.get("window") for given in world.scheduled] == [None, 70]


def test_keys_are_split_where_the_proof_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are in passes over contexts that are longer than any at start-up."""
    assert not World(monkeypatch, kernel=True, plans=False).subject.splits_keys
    world = World(monkeypatch, kernel=True, plans=True)
    assert world.subject.splits_keys

    def attend() -> int:
        with world.subject.forward_context(tokens(1, 3), TABLES):
            query = torch.randn(2, 4, 32)
            layer, out = world.layers[0], torch.empty_like(query)
            layer.impl.forward(layer, query, None, None, layer.kv_cache, world.metadata, out)
        return int(world.scheduled[-1]["schedule"].splits)

    assert attend() == 1
    with world.subject.splitting_keys(2):
        assert attend() == 2
    assert attend() == 1
    with pytest.raises(RuntimeError, match="in the proof"), world.subject.splitting_keys(2):
        raise RuntimeError("in the proof")
    assert attend() == 1


def test_an_error_in_the_pass_leaves_the_layers_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, kernel=True, plans=False)
    with (
        pytest.raises(RuntimeError, match="in the pass"),
        world.subject.forward_context(tokens(1, 3), TABLES),
    ):
        raise RuntimeError("in the pass")
    assert [layer.impl.forward() for layer in world.layers] == ["stock"] * 2
    assert all("forward" not in vars(layer.impl) for layer in world.layers)


def test_a_backend_without_forward_fails_loudly() -> None:
    with (
        pytest.raises(RuntimeError, match=r"object.forward, which this vLLM does not have"),
        replaced_forward([SimpleNamespace(impl=object())], lambda: None),
    ):
        pass


def test_layers_of_several_tables_read_and_write_in_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two requests, tables one behind the other: the second layer has the second of them."""
    world = World(monkeypatch, kernel=True, plans=False)
    first, second = world.kv
    world.subject = PassAttention(
        SimpleNamespace(vllm_config=None),  # type: ignore[arg-type]
        [first, replace(second, table=1)],
    )
    where, found = tokens(1, 3), dict[str, Any]()

    @contextmanager
    def context(_: Any, metadata: dict[str, Any], *__: Any) -> Iterator[None]:
        found.update(metadata, slots=__[-1])
        yield

    monkeypatch.setattr(attention_module, "pass_context", context)
    tables = torch.cat([TABLES, TABLES + 50])
    with world.subject.forward_context(where, tables):
        assert torch.equal(found["a"].block_tables, TABLES)
        assert torch.equal(found["b"].block_tables, TABLES + 50)
        assert torch.equal(found["slots"]["a"], where.slots)
        there = (TABLES + 50)[where.request, where.positions // BLOCK_SIZE].long() * BLOCK_SIZE
        assert torch.equal(found["slots"]["b"], there + where.positions % BLOCK_SIZE)
