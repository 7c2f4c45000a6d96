# SPDX-License-Identifier: Apache-2.0
"""The kernels by themselves: alignment against memcpy, attention against a dense kernel, scores.

Alignment moves 1,024 to 16,384 tokens of all layers to odd offsets of other pages. Every repeat
works elsewhere in a pool that no cache holds, and so does the plain copy of as many bytes it is
compared with; both several times in a row, so that neither leaves its writes for the other to wait
for. Attention: 10 % of the positions of a context, random or in short runs, against the dense
kernel's floating-point operations per second, and against one-token rows of that kernel; on a GPU
also a few positions, and the same kernel without FlashAttention 3. Scores: a question's queries
over the context. What is compared takes turns, round by round; beside each ratio
of medians the summary has the quartiles (`_q1`, `_q3`) of the rounds' own ratios.

On CPU: pages and dense kernel are vLLM's own, in the 8-layer benchmark's shape. On a GPU: NHD pages
in the shape of Qwen3-8B; the dense kernel is vLLM's FlashAttention 3, or torch's without vLLM.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import harness
from bench.server import cpu_environment
from vllm_segreuse.kernels import dispatch, reference
from vllm_segreuse.kernels.dispatch import Kernels
from vllm_segreuse.kernels.pages import Moves, PageLayout, Part, Rotation, TiledStrides

Action = Callable[[], Any]
Rounds = dict[tuple[str, str, int], list[float]]
"""Milliseconds of each round, by kernel, what was measured, and size."""

SHARE = 0.1
"""Of a context's positions that scattered queries take."""
_LAUNCHING_CYCLES = 2_000_000
"""Of a GPU, a millisecond or so."""
QUESTION = 101
"""Queries that score: the new tokens of the `ttft` suite's prompts."""


@dataclass(frozen=True)
class Case:
    """What is measured on one kind of device."""

    device: torch.device
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    align_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    pool_bytes: int
    few: tuple[int, ...] = ()

    @property
    def token_bytes(self) -> int:
        """KV of one token at one layer, in bfloat16."""
        return 2 * 2 * self.kv_heads * self.head_size

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)


CPU = Case(torch.device("cpu"), 8, 4, 2, 32, 32, (1024, 8192, 16384), (8192, 32768), 1 << 30)
GPU = Case(
    *(torch.device("cuda"), 36, 32, 8, 128, 16, (1024, 16384), (16384, 65536), 37 << 30),
    few=(128, 384, 832),
)


def run(quick: bool) -> harness.SuiteResult:
    """Measure on the GPU if torch sees one, else on the CPU."""
    for name, value in cpu_environment().items():
        os.environ.setdefault(name, value)
    case = GPU if torch.cuda.is_available() else CPU
    repeats = 5 if quick else 21
    backend = GpuBackend(case) if case is GPU else CpuBackend(case)
    kernels = dispatch.choose(case.device, torch.bfloat16, backend.layout)
    rows = _align(case, kernels, backend.layout, repeats)
    for context in case.contexts[: 1 if quick else None]:
        rows += _attention(case, kernels, backend, context, repeats)
        rows += _scores(case, kernels, backend, context, repeats)
    rounds: Rounds = {}
    for row in rows:
        row["kernels"] = kernels.description
        row["dense_kernel"] = backend.dense_kernel
        rounds[row["kernel"], row["what"], row["size"]] = row.pop("rounds_ms")
    return {"rows": rows, "summary": summary_of(case, rounds)}


def summary_of(case: Case, rounds: Rounds) -> dict[str, float]:
    """Headline figures; `attention_speedup_over_rows` is that of random queries, the least regular
    there are, and `...positions_in_runs` that of runs of 64."""
    tokens, context = case.align_tokens[1], case.contexts[0]
    seen = _seen(context, random_positions(context)) / _seen(context, torch.arange(context))
    summary = {"align_ms": statistics.median(rounds["align", "ours", tokens])}
    for name, kernel, size, theirs, ours, factor in (
        ("align_share_of_memcpy", "align", tokens, "memcpy", "ours", 1.0),
        ("align_speedup_over_torch", "align", tokens, "torch", "ours", 1.0),
        ("attention_share_of_dense", "attention", context, "dense", "ours, random", seen),
        ("attention_speedup_over_rows", "attention", context, "rows, random", "ours, random", 1.0),
        (
            *("attention_speedup_over_rows_runs", "attention", context),
            *("rows, runs of 64", "ours, runs of 64", 1.0),
        ),
        ("scores_speedup_over_torch", "scores", context, "torch", "ours", 1.0),
    ):
        found = ratio(rounds[kernel, theirs, size], rounds[kernel, ours, size])
        q1, q3 = (factor * quartile for quartile in found[1:])
        summary |= {name: factor * found[0], f"{name}_q1": q1, f"{name}_q3": q3}
    return summary


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Of medians, and the quartiles of the rounds' own ratios."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    q1, _, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(above) / statistics.median(below), q1, q3


def _align(case: Case, kernels: Kernels, layout: PageLayout, repeats: int) -> list[harness.Row]:
    page = case.block_size * case.token_bytes // 2  # elements
    blocks = case.pool_bytes // case.layers // (2 * page)
    pool = [
        torch.zeros(blocks, page, dtype=torch.bfloat16, device=case.device)
        for _ in range(case.layers)
    ]
    for pages in pool:
        pages.normal_()
    parts = [Part(layout.keys, Rotation(case.head_size, True)), Part(layout.values, None)]
    rows = []
    for tokens in case.align_tokens:
        used = tokens // case.block_size + 1
        places = places_of(blocks, used)
        moves = itertools.cycle([moves_of(case, place, tokens) for place in places])
        turns = itertools.cycle(places)

        def ours(moves: Any = moves) -> None:
            kernels.align(pool, parts, next(moves))

        def plain(moves: Any = moves) -> None:
            reference.align(pool, parts, next(moves))

        def memcpy(used: int = used, turns: Any = turns) -> None:
            source, target = next(turns)
            for pages in pool:
                pages[target : target + used - 1].copy_(pages[source : source + used - 1])

        moved = 2 * tokens * case.token_bytes * case.layers  # read and written
        actions: dict[str, Action] = {"ours": ours, "memcpy": memcpy, "torch": plain}
        for what, times in timed(case.device, actions, repeats, burst=4).items():
            gb_per_s = moved / statistics.median(times) / 1e6
            rows.append(_row("align", what, tokens, times, gb_per_s=gb_per_s))
    return rows


def places_of(blocks: int, used: int) -> list[tuple[int, int]]:
    """Pairs of stretches of blocks that do not meet."""
    count = blocks // (2 * used)
    if count < 8:
        raise harness.BenchError(f"a pool of {blocks} blocks is too small for {used} at a time")
    return [(2 * used * i, 2 * used * i + used) for i in range(count)]


def moves_of(case: Case, place: tuple[int, int], tokens: int) -> Moves:
    """Four documents that move to odd offsets, by distances of their own."""
    device, (source, target) = case.device, place
    index = torch.arange(tokens, device=device)
    document = index * 4 // tokens
    deltas = torch.tensor([5.0, 2085.0, -4109.0, 37.0], device=device)
    half = case.head_size // 2
    frequencies = 1e6 ** (-torch.arange(half, device=device) / half)
    turns = deltas[:, None] * frequencies
    return Moves(
        source * case.block_size + index,
        target * case.block_size + index + 5,
        document,
        turns.cos(),
        turns.sin(),
        overlapping=False,
    )


def random_positions(context: int, count: int | None = None) -> torch.Tensor:
    """Random positions, ascending; a tenth of the context, or so many."""
    generator = torch.Generator().manual_seed(context)
    count = int(SHARE * context) if count is None else count
    return torch.randperm(context, generator=generator)[:count].sort().values


def positions_in_runs(context: int, length: int, count: int | None = None) -> torch.Tensor:
    """As many positions, ascending, in runs of this length."""
    count = (int(SHARE * context) if count is None else count) // length
    generator = torch.Generator().manual_seed(context)
    firsts = torch.randperm(context // length, generator=generator)[:count].sort().values
    return (firsts[:, None] * length + torch.arange(length)).flatten()


def _at_both_ends(context: int, count: int) -> torch.Tensor:
    """Random positions of the first and the last eighth, a few more of the former, so that some
    that follow each other lie at both ends."""
    generator = torch.Generator().manual_seed(context)
    part, first = context // 8, count // 2 + 8
    ends = [torch.randperm(part, generator=generator)[:n].sort() for n in (first, count - first)]
    return torch.cat([ends[0].values, context - part + ends[1].values])


def _seen(context: int, positions: torch.Tensor) -> int:
    """Pairs of query and key."""
    return int((positions + 1).sum())


def _attention(
    case: Case, kernels: Kernels, backend: Any, context: int, repeats: int
) -> list[harness.Row]:
    def queries(positions: torch.Tensor) -> torch.Tensor:
        size = (len(positions), case.heads, case.head_size)
        return torch.randn(size, device=case.device).to(torch.bfloat16)

    actions: dict[str, Action] = {}
    flops: dict[str, float] = {}

    def add(what: str, positions: torch.Tensor, make: Callable[..., Action]) -> None:
        actions[what] = make(queries(positions), positions.to(case.device), context)
        flops[what] = 4.0 * case.heads * case.head_size * _seen(context, positions)

    def ours(query: torch.Tensor, positions: torch.Tensor, context: int, **planned: bool) -> Action:
        assert kernels.sparse_attention is not None
        kernel, out = kernels.sparse_attention, torch.empty_like(query)
        table = backend.block_table(context)[None]
        request = torch.zeros_like(positions)
        layout, more = backend.layout, {}
        if kernels.plan_attention is not None:  # as in a pass: once for all layers
            where = table, request, positions
            more["schedule"] = kernels.plan_attention(query, layout.keys, *where, **planned)
        return lambda: kernel(
            out,
            query,
            backend.pages,
            layout.keys,
            layout.values,
            table,
            request,
            positions,
            case.scale,
            **more,
        )

    add("dense", torch.arange(context), backend.dense)
    sparse = {"random": random_positions(context)}
    lengths = [n for n in (4, 16, 64, 256) if n <= SHARE * context]
    sparse |= {f"runs of {n}": positions_in_runs(context, n) for n in lengths}
    for count in case.few:
        sparse[f"{count} random"] = random_positions(context, count)
        sparse |= {
            f"{count} in runs of {n}": positions_in_runs(context, n, count) for n in (16, 32, 64)
        }
        sparse[f"{count} at both ends"] = _at_both_ends(context, count)
    alone = partial(ours, flash=False)
    for name, positions in sparse.items():
        add(f"rows, {name}", positions, backend.rows)
        if kernels.sparse_attention is not None:
            add(f"ours, {name}", positions, ours)
            if kernels.plan_attention is not None:
                add(f"without FlashAttention 3, {name}", positions, alone)
    if kernels.sparse_attention is not None:
        add("ours, dense", torch.arange(context), ours)
    return [
        _row(
            *("attention", what, context, times),
            gflop_per_s=flops[what] / statistics.median(times) / 1e6,
        )
        for what, times in timed(case.device, actions, max(3, repeats // 3)).items()
    ]


def _scores(
    case: Case, kernels: Kernels, backend: Any, context: int, repeats: int
) -> list[harness.Row]:
    positions = torch.arange(context - QUESTION, context, device=case.device)
    query = torch.randn(QUESTION, case.heads, case.head_size, device=case.device)
    args = (
        query.to(torch.bfloat16),
        positions,
        backend.pages,
        backend.layout.keys,
        backend.block_table(context),
        context,
        case.scale,
    )
    measured = timed(
        case.device,
        {
            "ours": lambda: kernels.token_scores(*args),
            "torch": lambda: reference.token_scores(*args),
        },
        repeats,
    )
    return [_row("scores", what, context, times) for what, times in measured.items()]


def _row(kernel: str, what: str, size: int, rounds_ms: list[float], **more: float) -> harness.Row:
    return {
        "kernel": kernel,
        "what": what,
        "size": size,
        "median_ms": statistics.median(rounds_ms),
        "rounds_ms": rounds_ms,
        **more,
    }


def timed(
    device: torch.device, actions: dict[str, Action], repeats: int, burst: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of each action, round by round; they take turns, in an order that changes.

    Args:
        burst: how often an action runs when it is its turn. Bandwidth is one of a steady state: the
            first of a burst is not counted, since it writes into caches that another action left.
            Of the others, a round has the median.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in harness.progress(range(repeats + 1), "kernels"):
        for name in harness.rotated(list(actions), turn):
            elapsed = [_milliseconds(device, actions[name]) for _ in range(burst)]
            if turn > 0:  # the first round warms up
                times[name].append(statistics.median(elapsed[burst > 1 :]))
    return times


def _milliseconds(device: torch.device, action: Action) -> float:
    """On a GPU without the time that the host takes to launch: the device waits for it first."""
    if device.type == "cpu":
        started = time.perf_counter()
        action()
        return (time.perf_counter() - started) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_LAUNCHING_CYCLES)
    begin.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


class _Layer(torch.nn.Module):
    """What `discover_layout` needs of a vLLM attention layer of the CPU backend."""

    def __init__(self, case: Case, blocks: int) -> None:
        from vllm.v1.attention.backends import cpu_attn

        super().__init__()
        self.layer_name = "bench"
        self.num_kv_heads, self.head_size = case.kv_heads, case.head_size
        self.kv_cache_torch_dtype = torch.bfloat16
        self.kv_cache_dtype = "auto"
        self.kv_cache = torch.zeros(
            blocks, case.kv_heads, case.block_size, 2 * case.head_size, dtype=torch.bfloat16
        )
        self.isa = cpu_attn._get_attn_isa(torch.bfloat16, case.block_size, case.head_size, "auto")

    @property
    def impl(self) -> _Layer:
        return self

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, heads, size, _ = self.kv_cache.shape
        key, value = self.kv_cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
        return key, value

    def do_kv_cache_update(
        self, _: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor
    ) -> None:
        from vllm import _custom_ops as ops

        ops.cpu_attn_reshape_and_cache(
            key,
            value,
            *self.halves(),
            slots,
            self.isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="auto",
        )


def cpu_layout(case: Case) -> PageLayout:
    """How vLLM's CPU backend packs a page."""
    from vllm_segreuse.model.kv_layout import discover_layout

    return discover_layout(_Layer(case, 2), case.block_size)


class CpuBackend:
    """vLLM's CPU attention, on pages it packed itself."""

    dense_kernel = "vLLM's CPU attention"

    def __init__(self, case: Case) -> None:
        from vllm_segreuse.model.kv_layout import discover_layout

        self._case = case
        blocks = max(case.contexts) // case.block_size + 2
        self._layer = _Layer(case, blocks)
        self.layout = discover_layout(self._layer, case.block_size)
        slots = torch.arange(blocks * case.block_size)
        size = (len(slots), case.kv_heads, case.head_size)
        key, value = (torch.randn(size).to(torch.bfloat16) for _ in range(2))
        self._layer.do_kv_cache_update(None, key, value, None, slots)
        self.pages = self._layer.kv_cache.flatten(1)
        generator = torch.Generator().manual_seed(0)
        self._blocks = (torch.randperm(blocks - 1, generator=generator) + 1).int()

    def block_table(self, context: int) -> torch.Tensor:
        """Blocks of a context, in an order of its own."""
        return self._blocks[: context // self._case.block_size]

    def dense(self, query: torch.Tensor, positions: torch.Tensor, context: int) -> Action:
        """The whole context as one row."""
        return self._attention(query, [0, context], [context], context)

    def rows(self, query: torch.Tensor, positions: torch.Tensor, context: int) -> Action:
        """A row per run of neighbours."""
        return self._attention(query, *runs_of(positions), context)

    def _attention(
        self, query: torch.Tensor, bounds: list[int], lengths: list[int], context: int
    ) -> Action:
        from vllm import _custom_ops as ops

        case, out = self._case, torch.empty_like(query)
        starts, seen = torch.tensor(bounds).int(), torch.tensor(lengths).int()
        table = self.block_table(context)[None].expand(len(lengths), -1).contiguous()
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_size,
            seq_lens=seen,
            dtype=torch.bfloat16,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self._layer.isa,
            enable_kv_split=True,
            dynamic_causal=None,
            kv_cache_dtype="auto",
        )
        key, value = self._layer.halves()
        return lambda: ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key,
            value_cache=value,
            output=out,
            query_start_loc=starts,
            seq_lens=seen,
            scale=case.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0,
            scheduler_metadata=metadata,
            s_aux=None,
            dynamic_causal=None,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="auto",
        )


class GpuBackend:
    """NHD pages; the dense kernel is FlashAttention 3 on those pages where vLLM has it, or else
    torch's on the same keys and values."""

    def __init__(self, case: Case) -> None:
        self._case = case
        shape = (case.kv_heads, case.block_size, case.head_size)
        row = case.kv_heads * case.head_size
        half = case.block_size * row
        rest = (case.head_size, case.block_size, 0, row, case.head_size, 0, 1)
        self.layout = PageLayout(TiledStrides(shape, 0, *rest), TiledStrides(shape, half, *rest))
        blocks = max(case.contexts) // case.block_size
        size = (blocks, 2 * half)
        self.pages = torch.randn(size, dtype=torch.bfloat16, device=case.device)
        self._blocks = torch.randperm(blocks, device=case.device).int()
        self._flash3 = _flash_attention_3()
        self.dense_kernel = "FlashAttention 3" if self._flash3 else "torch's attention"

    def block_table(self, context: int) -> torch.Tensor:
        """Blocks of a context, in an order of its own."""
        return self._blocks[: context // self._case.block_size]

    def dense(self, query: torch.Tensor, positions: torch.Tensor, context: int) -> Action:
        """Causal attention of the whole context."""
        if self._flash3:
            return self._rows(query, [0, context], [context], context)
        key, value = self._keys_and_values(context)
        queries = query.transpose(0, 1)[None].contiguous()
        return lambda: torch.nn.functional.scaled_dot_product_attention(
            queries, key, value, is_causal=True, scale=self._case.scale, enable_gqa=True
        )

    def rows(self, query: torch.Tensor, positions: torch.Tensor, context: int) -> Action:
        """A row per run of neighbours; without FlashAttention 3 one query after the other, 64 of
        them."""
        if self._flash3:
            return self._rows(query, *runs_of(positions), context)
        key, value = self._keys_and_values(context)
        some = torch.linspace(0, len(positions) - 1, 64, device=query.device).long()
        queries, ends = query[some], (positions[some] + 1).tolist()

        def each() -> None:
            for one, end in zip(queries, ends, strict=True):
                torch.nn.functional.scaled_dot_product_attention(
                    one[None, :, None],
                    key[:, :, :end],
                    value[:, :, :end],
                    scale=self._case.scale,
                    enable_gqa=True,
                )

        return each

    def _rows(
        self, query: torch.Tensor, bounds: list[int], lengths: list[int], context: int
    ) -> Action:
        case, attend, device = self._case, self._flash3, query.device
        assert attend is not None
        key, value = (
            half.view(-1, case.block_size, case.kv_heads, case.head_size)
            for half in self.pages.unflatten(1, (2, -1)).unbind(1)
        )
        out = torch.empty_like(query)
        table = self.block_table(context)[None].expand(len(lengths), -1).contiguous()
        longest = max(end - start for start, end in itertools.pairwise(bounds))
        starts = torch.tensor(bounds, dtype=torch.int32, device=device)
        seen = torch.tensor(lengths, dtype=torch.int32, device=device)
        return lambda: attend(
            q=query,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            seqused_k=seen,
            max_seqlen_k=context,
            softmax_scale=case.scale,
            causal=True,
            block_table=table,
            fa_version=3,
        )

    def _keys_and_values(self, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self.pages[self.block_table(context).long()]
        key, value = (
            part.tokens(pages).transpose(0, 1)[None].contiguous()
            for part in (self.layout.keys, self.layout.values)
        )
        return key, value


def _flash_attention_3() -> Callable[..., Any] | None:
    """vLLM's, if it can run here."""
    try:
        from vllm.vllm_flash_attn import flash_attn_interface as flash
    except ImportError:
        return None
    return flash.flash_attn_varlen_func if flash.is_fa_version_supported(3) else None


def runs_of(positions: torch.Tensor) -> tuple[list[int], list[int]]:
    """Runs of neighbours as rows of varlen attention: first queries and the end, keys seen."""
    starts = torch.ones(len(positions), dtype=torch.bool)
    starts[1:] = (positions[1:] != positions[:-1] + 1).cpu()
    bounds = [*starts.nonzero().flatten().tolist(), len(positions)]
    ends = torch.tensor(bounds[1:]) - 1
    return bounds, (positions.cpu()[ends] + 1).tolist()
