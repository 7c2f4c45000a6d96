# SPDX-License-Identifier: Apache-2.0
"""How fast the codecs of the second tier are, beside a plain copy of as many bytes.

Records of 1,024 tokens lie in rows, as in a host region: scales and codes, or pages as they are.
`decode` reads them into pages of a cache, four documents that move to odd offsets, keys turned.
`raw` does the same from raw rows, and `memcpy` copies raw rows to pages, whole. `encode` and
`store` are the other direction. Every repeat works elsewhere in pools that no cache holds; what is
compared takes turns, several times in a row, with the same number of threads.

Heads are those of Qwen3-8B, in pages of 32 tokens as vLLM's CPU backend packs them, in bfloat16.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench import harness
from bench.server import cpu_environment
from bench.suites import kernels as suite
from vllm_segreuse.kernels import dispatch
from vllm_segreuse.kernels.codecs import Codec, EncodedPage
from vllm_segreuse.kernels.pages import Part, Rotation

TOKENS = 1024
CASE = suite.Case(torch.device("cpu"), 4, 32, 8, 128, 32, (TOKENS,), (64,), 1 << 29)
CODECS = (Codec.INT8, Codec.FP8)
BURST = 4


def measure(quick: bool) -> harness.SuiteResult:
    """Rows of each action and codec, and shares of memcpy (`quick`: fewer repeats)."""
    for name, value in cpu_environment().items():
        os.environ.setdefault(name, value)
    pools = _Pools()
    actions = pools.actions()
    times = suite.timed(CASE.device, actions, 5 if quick else 21, burst=BURST)
    moved = TOKENS * CASE.token_bytes * CASE.layers
    rows: list[harness.Row] = [
        {
            "part": "speed",
            "what": what,
            "tokens": TOKENS,
            "threads": torch.get_num_threads(),
            "median_ms": statistics.median(each),
            "gb_per_s": moved / statistics.median(each) / 1e6,
            "kernels": pools.kernels.description,
        }
        for what, each in times.items()
    ]
    summary: dict[str, Any] = {}
    for codec in CODECS:
        decode = suite.ratio(times["memcpy"], times[f"decode {codec}"])
        encode = suite.ratio(times["memcpy"], times[f"encode {codec}"])
        name = (
            "decode_share_of_memcpy" if codec is Codec.INT8 else f"{codec}_decode_share_of_memcpy"
        )
        summary |= _with_quartiles(name, decode)
        summary |= _with_quartiles(f"{codec}_encode_share_of_memcpy", encode)
    summary |= _with_quartiles("raw_share_of_memcpy", suite.ratio(times["memcpy"], times["raw"]))
    summary["record_share_of_raw"] = pools.place.size / (2 * pools.page)
    return {"rows": rows, "summary": summary}


def _with_quartiles(name: str, found: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_q1", f"{name}_q3"), found, strict=True))


class _Pools:
    """Pages, rows of raw pages, and rows of encoded ones.

    Attributes:
        kernels: that are measured.
        page: elements of a page.
        place: of an encoded one.
    """

    def __init__(self) -> None:
        self.layout = suite.cpu_layout(CASE)
        self.kernels = dispatch.choose(CASE.device, torch.bfloat16, self.layout)
        self.parts = [
            Part(self.layout.keys, Rotation(CASE.head_size, True)),
            Part(self.layout.values, None),
        ]
        self.page = CASE.block_size * CASE.token_bytes // 2
        self.blocks = CASE.pool_bytes // CASE.layers // (2 * self.page)
        shape = self.layout.keys.shape
        self.place = EncodedPage.of(shape, shape, self.page)
        self.pages = self._pool(self.page, torch.bfloat16)
        self.raw = self._pool(self.page, torch.bfloat16)
        self.cells = {codec: self._pool(self.place.size, torch.uint8) for codec in CODECS}
        for pages in (*self.pages, *self.raw):
            pages[:] = torch.randn(1, self.page)
        for cell in itertools.chain(*self.cells.values()):
            cell[:, self.place.codes :] = torch.randint(
                0, 127, (1, self.place.size - self.place.codes)
            )
            cell[:, : self.place.codes].view(torch.float16).fill_(0.01)

    def _pool(self, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(self.blocks, elements, dtype=dtype) for _ in range(CASE.layers)]

    def actions(self) -> dict[str, suite.Action]:
        """What is measured, by name."""
        used = TOKENS // CASE.block_size
        places = suite.places_of(self.blocks, used + 1)  # documents move to odd offsets
        moves = itertools.cycle([suite.moves_of(CASE, place, TOKENS) for place in places])
        turns = itertools.cycle(places)

        def memcpy() -> None:
            source, target = next(turns)
            for pages, rows in zip(self.pages, self.raw, strict=True):
                pages[target : target + used].copy_(rows[source : source + used])

        def raw() -> None:
            self.kernels.align(self.pages, self.parts, next(moves), self.raw)

        def decode(codec: Codec) -> None:
            self.kernels.decode(self.pages, self.parts, next(moves), self.cells[codec], codec)

        def store() -> None:
            self.kernels.store(self.pages, self.raw, *self._stored(turns, used))

        def encode(codec: Codec) -> None:
            blocks, rows = self._stored(turns, used)
            self.kernels.encode(self.pages, self.parts, codec, blocks, self.cells[codec], rows)

        found: dict[str, Callable[[], None]] = {"memcpy": memcpy, "raw": raw, "store": store}
        for codec in CODECS:
            found[f"decode {codec}"] = partial(decode, codec)
            found[f"encode {codec}"] = partial(encode, codec)
        return found

    @staticmethod
    def _stored(turns: Any, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = next(turns)
        return torch.arange(source, source + used), torch.arange(target, target + used)
