# SPDX-License-Identifier: Apache-2.0
"""What codecs of the second tier cost in quality: first tokens after documents read from records.

Examples of `bench english`. Documents are computed in another prompt, in the opposite order
(`reversed`), and evicted from the cache. As they are stored, they are stored by every codec, each
in rows of its own. Then the question is asked once with each, under the default policy, and the
distribution of the first token is compared with that of full prefill. So examples, donors and plans
are the same for all codecs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench import engine, harness
from bench.english.engine import EXACT_DONORS, Answered, Lab, english_engine
from bench.english.tape import divergences
from bench.quality import seeds, statistics
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.model.cells import views
from vllm_segreuse.prefill.mover import InPlace, LoadedRows

if TYPE_CHECKING:
    from vllm_segreuse.prefill.align import Aligner

CODECS = tuple(Codec)
DONORS = "reversed"
LEAST = 3
"""Of which a figure can be made."""
HOST_GIB = 0.25
"""Holds the documents of an example; each starts with an empty tier."""
DIGITS = 6


class Copies:
    """A mover that stores by every codec, and reads by one.

    Args:
        backlog: of the worker, whose pass reads by that codec.
        rows: of the host region.

    Attributes:
        codec: that is read.
        read: rows that were read.
    """

    def __init__(self, backlog: Any, rows: int) -> None:
        from vllm_segreuse.prefill.align import Aligner

        self.codec, self.read = Codec.RAW, 0
        self._backlog = backlog
        self._movers: dict[Codec, InPlace] = {}
        self._aligners: dict[Codec, Aligner] = {}
        for codec in CODECS:
            aligner = Aligner(backlog.prefill.aligner.layers, codec, self)
            stored = aligner.stored_pages()
            size = sum(page.num_bytes for page in stored)
            cells = torch.zeros(rows, size, dtype=torch.int8)
            self._movers[codec] = InPlace(aligner.copy_blocks, views(cells, stored))
            self._aligners[codec] = aligner
        self.choose(Codec.RAW)

    def store(self, blocks: Any, rows: Any) -> torch.Tensor | None:
        """Of `Mover`."""
        found = [mover.store(blocks, rows) for mover in self._movers.values()]
        encoded = torch.ones(len(rows), dtype=torch.bool)
        for each in found:
            encoded &= True if each is None else each
        return encoded

    def load(self, rows: Any) -> Iterator[LoadedRows]:
        """Of `Mover`."""
        self.read += len(rows)
        return self._movers[self.codec].load(rows)

    def mark(self) -> None:
        """Of `Mover`."""

    def close(self) -> None:
        """Of `Mover`; its rows are no part of the region."""

    def choose(self, codec: Codec) -> None:
        """Read by this codec from here on."""
        self.codec = codec
        self._backlog.prefill = self._backlog.prefill.with_aligner(self._aligners[codec])


def measure(
    model: Path, tasks: Sequence[str], samples: int, dtype: str = "auto"
) -> harness.SuiteResult:
    """So many examples of each task; an interrupt (Ctrl-C) ends it early.

    Args:
        model: its folder.
        tasks: of `bench english`.
        samples: examples of each.
        dtype: vLLM's option.

    Raises:
        BenchError: the model cannot be loaded, or documents did not come from the tier.
    """
    from bench.english.tasks import draw

    # A record of a block at least, and no runs that are too short for one.
    tier = {"host_gib": HOST_GIB, "min_run_tokens": engine.BLOCK_TOKENS}
    rows: list[harness.Row] = []
    with english_engine(model, 1, segreuse={**EXACT_DONORS, "tier": tier}, dtype=dtype) as lab:
        subject = _Subject(lab)
        used = str(lab.llm.model_config.dtype).removeprefix("torch.")
        steps = [(number, task) for number in range(samples) for task in tasks]
        try:
            for number, task in harness.progress(steps, "codecs"):
                which = seeds.chosen()
                example = draw(task, number, seeds.rng(which, task, number), lab.prompts.measure)
                rng = seeds.rng(which, f"{task} {DONORS}", number)
                found = subject.ask(example, rng, len(rows))
                rows.append({"part": "quality", "task": task, "number": number, **found})
        except KeyboardInterrupt:
            print(f"interrupted: {len(rows)} of {len(steps)} examples", file=sys.stderr)
    if len(rows) < LEAST:
        raise harness.BenchError(f"{len(rows)} examples are too few: take {LEAST} or more")
    return {
        "rows": rows,
        "summary": {**summary(rows, model.resolve().name), "dtype": used},
        "interrupted": len(rows) < len(steps),
    }


def summary(rows: Sequence[Mapping[str, Any]], model: str) -> dict[str, Any]:
    """Of each codec, what the first token diverges by; and how much more than with raw records."""
    found: dict[str, Any] = {"model": model, "quality_samples": len(rows)}
    for codec in CODECS:
        kl = [row[f"{codec}_kl"] for row in rows]
        found[f"{codec}_kl_median"] = round(float(np.median(kl)), DIGITS)
        found[f"{codec}_kl_p90"] = round(float(np.quantile(kl, 0.9)), DIGITS)
        if codec is Codec.RAW:
            continue
        more = [row[f"{codec}_kl"] - row["raw_kl"] for row in rows]
        low, high = statistics.bootstrap_interval(more)
        found[f"{codec}_kl_more_median"] = round(float(np.median(more)), DIGITS)
        found[f"{codec}_kl_more_mean"] = round(float(np.mean(more)), DIGITS)
        if low is not None and high is not None:
            found[f"{codec}_kl_more_low"] = round(low, DIGITS)
            found[f"{codec}_kl_more_high"] = round(high, DIGITS)
        from_raw = [row[f"{codec}_from_raw_kl"] for row in rows]
        found[f"{codec}_from_raw_kl_p90"] = round(float(np.quantile(from_raw, 0.9)), DIGITS)
        found[f"{codec}_same_token"] = round(
            float(np.mean([row[f"{codec}_same_token"] for row in rows])), 4
        )
    return found


class _Subject:
    """The engine, with every codec in its tier."""

    def __init__(self, lab: Lab) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._lab = lab
        self._scheduler = lab.llm.llm_engine.engine_core.engine_core.scheduler
        from vllm_segreuse.features.tier.worker import TierCopying

        side = get_kv_transfer_group().worker_side
        (tier,) = [it for it in side.features if isinstance(it, TierCopying)]
        self._copies = Copies(side.backlog, tier.region.shape.rows)
        tier.worker.mover = self._copies

    def ask(self, example: Any, rng: Random, number: int) -> dict[str, Any]:
        """An example in full, and with its documents from records of every codec."""
        from bench.english.donors import PROMPTS

        lab = self._lab
        prompt = lab.prompts.prompt(example.documents, example.question)
        full = lab.ask(prompt, 1, None, salt=f"codecs {number}")
        space = {"extra_keys": [f"codecs-{number}"]}
        for donor in PROMPTS[DONORS](example, lab.prompts, rng):
            lab.ask(donor, 1, {**space, "segreuse_min_reused_tokens": 2**31 - 1})
        found: dict[str, Any] = {"prompt_tokens": len(prompt)}
        answers: dict[Codec, Answered] = {}
        for codec in harness.rotated(CODECS, number):
            self._evict()
            self._copies.choose(codec)
            answers[codec] = answer = lab.ask(prompt, 1, space)
            report = answer.report or {}
            if not report.get("tiered_tokens"):
                raise harness.BenchError(f"no document came from the tier: {dict(report)}")
            found["tiered_tokens"] = report.get("tiered_tokens", 0)
            found["work"] = report["computed_share"]
        for codec, answer in answers.items():
            found[f"{codec}_kl"] = round(divergences(full.logits, answer.logits)[0], DIGITS)
            found[f"{codec}_same_token"] = answer.tokens == full.tokens
            if codec is not Codec.RAW:
                apart = divergences(answers[Codec.RAW].logits, answer.logits)[0]
                found[f"{codec}_from_raw_kl"] = round(apart, DIGITS)
        if not lab.llm.reset_prefix_cache():
            raise harness.BenchError("the prefix cache could not be reset: a request still runs")
        return found

    def _evict(self) -> None:
        """Take every free block as vLLM does for a request, and give it back: what donates goes to
        the tier with the next step."""
        pool = self._scheduler.kv_cache_manager.block_pool
        pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
        self._lab.ask([1, 2, 3], 1, None, salt="evict")
