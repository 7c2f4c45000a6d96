# SPDX-License-Identifier: Apache-2.0
"""Requests of a trace as lines of hash ids, which load generators make text of.

`vllm bench serve --dataset-name timed_trace` and AIPerf's `mooncake_trace` read them. An id stands
for a block of so many tokens wherever it is, so parts are rounded to whole blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self, TextIO

import numpy as np

from segreuse_tools.estimate.traces.request import PromptPart, mixed_ids
from segreuse_tools.model_folder import InputError


class HashIdFile:
    """A file that is written, for the length of a `with` block.

    Args:
        file: its name; what is there is replaced.
        block_tokens: that an id stands for.

    Raises:
        InputError: on entering, if it cannot be written.
    """

    def __init__(self, file: Path, block_tokens: int) -> None:
        self._file = file
        self._size = block_tokens
        self._out: TextIO | None = None
        self._ms = 0
        self._first_ms: int | None = None

    def __enter__(self) -> Self:
        try:
            self._out = self._file.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {self._file}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._out is not None:
            self._out.close()

    def write(
        self, parts: tuple[PromptPart, ...], answer_tokens: int, time_s: float | None
    ) -> None:
        """One more request.

        Args:
            parts: of the prompt.
            answer_tokens: to generate; written as one if it is none.
            time_s: when it is sent. Where that is before the request in front, as at the beginning
                of another conversation, time goes on from there. None: with that one.
        """
        assert self._out is not None
        ids = blocks_of(parts, self._size)
        line = {
            "timestamp": self._at(time_s),
            "input_length": len(ids) * self._size,
            "output_length": max(1, answer_tokens),
            "hash_ids": ids,
        }
        self._out.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _at(self, time_s: float | None) -> int:
        if time_s is not None:
            ms = round(1e3 * time_s)
            if self._first_ms is None or ms - self._first_ms < self._ms:
                self._first_ms = ms - self._ms
            self._ms = ms - self._first_ms
        return self._ms


def blocks_of(parts: tuple[PromptPart, ...], size: int) -> list[int]:
    """Ids of the blocks that stand for the parts; equal parts give equal ids. A part has at least
    one block."""
    counts = np.array([max(1, round(part.tokens / size)) for part in parts])
    ids = np.fromiter((part.id for part in parts), np.uint64, len(parts))
    first = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(first, counts)
    mixed = mixed_ids(np.repeat(ids, counts), within.astype(np.uint64))
    return [int(id) for id in mixed >> np.uint64(11)]  # 53 bits: every reader of JSON keeps them
