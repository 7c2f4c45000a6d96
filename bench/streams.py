# SPDX-License-Identifier: Apache-2.0
"""Requests that decode on a server while long prompts of known documents come in beside them."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai

from bench import harness
from bench.engine import BLOCK_TOKENS
from bench.server import Server


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
        gaps_ms: between tokens of the requests that decode.
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
            "p50_itl_ms": statistics.median(self.gaps_ms),
            "p99_itl_ms": self.p99_gap_ms,
            "max_itl_ms": max(self.gaps_ms),
            "gaps": len(self.gaps_ms),
            "p50_ttft_ms": self.p50_ttft_ms,
            "max_ttft_ms": max(self.ttft_ms),
            "prompts": len(self.ttft_ms),
        }


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
    seen, working = Beside([], []), True

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
                if last is not None and working:
                    seen.gaps_ms.append((now - last) * 1e3)
                last = now

    async with openai.AsyncOpenAI(
        base_url=server.base_url, api_key="none", max_retries=0
    ) as client:
        tasks = [asyncio.create_task(decode(client, number)) for number in range(streams)]
        await asyncio.sleep(0.5)
        for _ in range(prompts):
            began = time.perf_counter()
            await client.completions.create(
                model=server.model_name, prompt=texts.prompt(), max_tokens=1, extra_body=options
            )
            seen.ttft_ms.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.05)
        working = False
        await asyncio.gather(*tasks)
    if not seen.gaps_ms:
        raise harness.BenchError("no token was decoded while prompts came in")
    return seen
