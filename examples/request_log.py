# SPDX-License-Identifier: Apache-2.0
"""A request log to try `vllm-segreuse estimate` on: `python examples/request_log.py > log.jsonl`.

Retrieval in the language of `models/lab`: 300 questions, each behind 8 of 80 passages in the order
of their rank. A passage that is ranked high is retrieved more often.
"""

import json
import random
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parent.parent / "models" / "lab" / "tokenizer.json"
REQUESTS, PASSAGES, IN_EACH = 300, 80, 8


def bodies(requests: int = REQUESTS) -> list[dict[str, Any]]:
    """So many completions, the same in every run."""
    rng = random.Random(0)
    vocabulary = json.loads(TOKENIZER.read_text(encoding="utf-8"))["model"]["vocab"]
    words = sorted(word for word in vocabulary if word.isalpha())

    def text(count: int) -> str:
        return " ".join(rng.choices(words, k=count))

    passages = [text(rng.randint(80, 240)) for _ in range(PASSAGES)]
    ranks = [1 / (rank + 8) for rank in range(PASSAGES)]
    instructions = text(40)
    found = []
    for _ in range(requests):
        chosen: list[str] = []
        while len(chosen) < IN_EACH:
            [passage] = rng.choices(passages, ranks)
            if passage not in chosen:
                chosen.append(passage)
        found.append({"prompt": " ".join([instructions, *chosen, text(15)]), "max_tokens": 40})
    return found


if __name__ == "__main__":
    for body in bodies():
        print(json.dumps(body))
