# SPDX-License-Identifier: Apache-2.0
"""Requests that decode on a server while long prompts of known documents come in beside them."""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai

from bench import harness
from bench.engine import BLOCK_TOKENS
from bench.server import Server

_REUSED = r'^vllm:segreuse_tokens_total\{.*kind="reused".*\} (\S+)$'

Span = tuple[float, float]
"""When something began, and when it ended, s."""


class Texts:
    """Documents as text, and prompts that have them in ever new orders."""

    def __init__(self, model: Path, tokens: int, share: float) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        self._draw = random.Random(7)
        self._words = [w for w in map(tokenizer.decode, range(300, 4000)) if w.isascii()]
        self._tokenizer = tokenizer
        self.new_tokens = max(8, tokens - int(tokens * share))
        size = (tokens - self.new_tokens) // 4
        self.documents = [self._text(size) for _ in range(4)]

    @property
    def known_tokens(self) -> int:
        """Of a prompt, in whole blocks of its documents."""
        sizes = [len(self._tokenizer.encode(document)) for document in self.documents]
        return sum(size // BLOCK_TOKENS * BLOCK_TOKENS for size in sizes)

    def prompt(self) -> str:
        """A prompt that no prefix cache knows."""
        documents = self._draw.sample(self.documents, 4)
        head = self._text(self.new_tokens // 2)
        return "\n".join([head, *documents, self._text(self.new_tokens // 2)])

    def _text(self, tokens: int) -> str:
        ids = self._tokenizer.encode("".join(self._draw.choices(self._words, k=tokens)))
        return str(self._tokenizer.decode(ids[:tokens]))


def know(server: Server, texts: Texts, extra_keys: Sequence[str]) -> None:
    """Have the documents computed."""
    client = server.client()
    body = {"vllm_xargs": {"extra_keys": list(extra_keys)}}
    for document in texts.documents:
        client.completions.create(
            model=server.model_name, prompt=document, max_tokens=1, extra_body=body
        )


class Beside(NamedTuple):
    """What was seen.

    Attributes:
        gaps_ms: between tokens of the requests that decode, where a prompt was in flight meanwhile:
            sent, and its first token not there yet.
        ttft_ms: of the prompts that came in.
    """

    gaps_ms: list[float]
    ttft_ms: list[float]

    @property
    def p99_gap_ms(self) -> float:
        """99th percentile of the gaps."""
        return sorted(self.gaps_ms)[int(0.99 * (len(self.gaps_ms) - 1))]

    @property
    def p50_ttft_ms(self) -> float:
        """Median time to the first token."""
        return statistics.median(self.ttft_ms)

    def row(self) -> harness.Row:
        """For a table."""
        return {
            "p50_beside_ms": statistics.median(self.gaps_ms),
            "p99_beside_ms": self.p99_gap_ms,
            "max_beside_ms": max(self.gaps_ms),
            "gaps_beside": len(self.gaps_ms),
            "p50_ttft_ms": self.p50_ttft_ms,
            "max_ttft_ms": max(self.ttft_ms),
            "prompts": len(self.ttft_ms),
        }


def reused_tokens(server: Server) -> float:
    """Tokens that requests have reused so far, of the server's metrics."""
    found = re.findall(_REUSED, server.read("/metrics"), re.MULTILINE)
    return sum(map(float, found))


def reused_share(
    server: Server, policy: str | None, before: float, known: int, least: float = 0.9
) -> float:
    """Share of the known tokens that were reused since `before`.

    Args:
        server: that was asked.
        policy: that was to reuse them; None: nothing was to be reused.
        before: `reused_tokens` then.
        known: tokens of the prompts that the server knows.
        least: the share that a policy must have reused.

    Raises:
        BenchError: it is less than that.
    """
    reused = reused_tokens(server) - before
    if policy is not None and reused < least * known:
        raise harness.BenchError(
            f"policy {policy} reused {reused:.0f} of {known} tokens that were known: "
            "does the KV cache hold the documents?"
        )
    return reused / known


def overlapping_ms(gaps: Iterable[Span], prompts: Sequence[Span]) -> list[float]:
    """Lengths of those gaps during which a prompt was in flight."""
    return [
        (end - start) * 1e3
        for start, end in gaps
        if any(start < answered and sent < end for sent, answered in prompts)
    ]


async def decode_beside(
    server: Server, texts: Texts, options: dict[str, Any], streams: int, prompts: int
) -> Beside:
    """Streams decode while prompts come in, one after the other.

    Args:
        server: to ask.
        texts: the prompts.
        options: what their requests have beside the prompt.
        streams: how many decode at a time.
        prompts: how many come in.

    Raises:
        BenchError: no token was decoded meanwhile.
    """
    gaps: list[Span] = []
    in_flight: list[Span] = []
    working = True

    async def decode(client: openai.AsyncOpenAI, number: int) -> None:
        while working:
            stream = await client.completions.create(
                model=server.model_name,
                prompt=f"stream {number} {random.random()}",
                max_tokens=64,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            last = None
            async for _ in stream:
                now = time.perf_counter()
                if last is not None:
                    gaps.append((last, now))
                last = now

    async with openai.AsyncOpenAI(
        base_url=server.base_url, api_key="none", max_retries=0
    ) as client:
        tasks = [asyncio.create_task(decode(client, number)) for number in range(streams)]
        await asyncio.sleep(0.5)
        for _ in range(prompts):
            sent = time.perf_counter()
            await client.completions.create(
                model=server.model_name, prompt=texts.prompt(), max_tokens=1, extra_body=options
            )
            in_flight.append((sent, time.perf_counter()))
            await asyncio.sleep(0.05)
        working = False
        await asyncio.gather(*tasks)
    gaps_ms = overlapping_ms(gaps, in_flight)
    if not gaps_ms:
        raise harness.BenchError("no token was decoded while prompts came in")
    return Beside(gaps_ms, [(answered - sent) * 1e3 for sent, answered in in_flight])
