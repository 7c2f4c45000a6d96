# SPDX-License-Identifier: Apache-2.0
"""Request logs of passages that appear in changing order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_SYLLABLES = ["ka", "lo", "mi", "ren", "tos", "va", "dun", "pel", "qui", "sor"]


def words(rng: random.Random, count: int) -> str:
    """So many words of no language."""
    return " ".join("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(count))


def bodies(requests: int, passages: int = 12, in_each: int = 4, seed: int = 0) -> list[Any]:
    """Chat completions and completions in turn, each with some of the passages."""
    rng = random.Random(seed)
    texts = [words(rng, rng.randint(40, 90)) for _ in range(passages)]
    found = []
    for number in range(requests):
        text = "\n\n".join(rng.sample(texts, in_each)) + f"\n\nQuestion {number}: {words(rng, 7)}?"
        body: dict[str, Any] = {"max_tokens": 1 + number % 9, "temperature": 0, "ignore_eos": True}
        if number % 3:
            system = {"role": "system", "content": "Answer from the passages."}
            body["messages"] = [system, {"role": "user", "content": text}]
        else:
            body["prompt"] = text
        found.append(body)
    return found


def write(file: Path, lines: list[Any]) -> Path:
    """One JSON object in each line."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file
