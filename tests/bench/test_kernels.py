# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest
import torch

from bench.harness import BenchError
from bench.suites import kernels
from vllm_segreuse.kernels import dispatch, reference

SMALL = dataclasses.replace(
    kernels.CPU, layers=2, align_tokens=(64, 128), contexts=(1024,), pool_bytes=1 << 22
)


def test_places_do_not_meet() -> None:
    places = kernels.places_of(blocks=100, used=6)
    blocks = [b for pair in places for first in pair for b in range(first, first + 6)]
    assert len(blocks) == len(set(blocks))
    assert max(blocks) < 100
    with pytest.raises(BenchError, match="pool of 90 blocks is too small for 6"):
        kernels.places_of(blocks=90, used=6)


def test_moves_end_inside_their_place() -> None:
    moves = kernels.moves_of(SMALL, (10, 20), 128)
    assert moves.targets.min() // 32 == 20
    assert moves.targets.max() // 32 == 24  # five places on: one block more than tokens fill
    assert (moves.targets - moves.sources == 10 * 32 + 5).all()


def test_scattered_positions_are_a_tenth_in_order() -> None:
    for positions in (kernels.random_positions(1000), kernels.positions_in_runs(1000, 4)):
        assert len(positions) == 100
        assert (positions[1:] > positions[:-1]).all()
    steps = kernels.positions_in_runs(1024, 16).view(-1, 16).diff(dim=1)
    assert (steps == 1).all()


def test_what_is_compared_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's dense kernel, its rows, and ours, on pages that vLLM packed."""
    backend = kernels.CpuBackend(SMALL)
    chosen = dispatch.choose(SMALL.device, torch.bfloat16, backend.layout)
    context, positions = 256, kernels.positions_in_runs(256, 4)
    query = torch.randn(len(positions), SMALL.heads, SMALL.head_size).bfloat16()
    expected = torch.empty_like(query)
    table, request = backend.block_table(context)[None], torch.zeros_like(positions)
    layout = backend.layout
    args = (backend.pages, layout.keys, layout.values, table, request, positions, SMALL.scale)
    reference.sparse_attention(expected, query, *args)
    if chosen.sparse_attention is not None:
        out = torch.empty_like(query)
        chosen.sparse_attention(out, query, *args)
        torch.testing.assert_close(out, expected, atol=0.02, rtol=0)
    rows = torch.empty_like(query)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda _: rows)  # an output that can be looked at
        attend = backend.rows(query, positions, context)
    attend()
    torch.testing.assert_close(rows, expected, atol=0.02, rtol=0)


def test_quartiles_are_those_of_the_rounds_own_ratios() -> None:
    """In a machine that gets slower, both sides of a round do: the ratio stays."""
    tokens, context = SMALL.align_tokens[1], SMALL.contexts[0]
    sides = {
        "align": ((tokens,), ("memcpy", "torch"), ("ours",)),
        "attention": (
            *((context,), ("dense", "rows, random", "rows, runs of 64")),
            ("ours, random", "ours, runs of 64"),
        ),
        "scores": ((context,), ("torch",), ("ours",)),
    }
    rounds = {}
    for kernel, ([size], theirs, ours) in sides.items():
        rounds |= {(kernel, what, size): [3.0, 6.0, 12.0, 24.0] for what in theirs}
        rounds |= {(kernel, what, size): [1.0, 2.0, 4.0, 8.0] for what in ours}
    summary = kernels.summary_of(SMALL, rounds)
    for name in ("attention_speedup_over_rows", "scores_speedup_over_torch"):
        assert [summary[name + end] for end in ("", "_q1", "_q3")] == [3.0, 3.0, 3.0]


def test_the_summary_names_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CPU", SMALL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = kernels.run(quick=True)
    ratios = {
        "align_share_of_memcpy",
        "align_speedup_over_torch",
        "attention_share_of_dense",
        "attention_speedup_over_rows",
        "attention_speedup_over_rows_runs",
        "scores_speedup_over_torch",
    }
    summary = result["summary"]
    assert set(summary) == {"align_ms"} | {
        name + end for name in ratios for end in ("", "_q1", "_q3")
    }
    assert all(value > 0 for value in summary.values())
    assert all(summary[f"{name}_q1"] <= summary[f"{name}_q3"] for name in ratios)
    medians = {(row["kernel"], row["what"]): row["median_ms"] for row in result["rows"]}
    for end, queries in (("", "random"), ("_runs", "runs of 64")):
        theirs, ours = (medians["attention", f"{who}, {queries}"] for who in ("rows", "ours"))
        assert summary[f"attention_speedup_over_rows{end}"] == theirs / ours
    assert {row["kernels"] for row in result["rows"]} == {
        dispatch.choose(SMALL.device, torch.bfloat16, kernels.CpuBackend(SMALL).layout).description
    }
