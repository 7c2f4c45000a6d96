# SPDX-License-Identifier: Apache-2.0
"""Models trained on documents computed alone answer on two ranks as plain torch does.

The two ranks live in processes of their own; as a script, this file is the engine above them:
    python -m tests.e2e.test_isolated_ranks ANSWERS.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Prompts, engine
from tests.e2e.isolated_models import Reference, layout_of, make_isolated, prompt_of
from tests.e2e.ranks import CORES, NOISE, run_script

MODULE = "tests.e2e.test_isolated_ranks"
LINK_TOKENS = 5
MINE = {"extra_keys": ["mine"]}

pytestmark = [
    pytest.mark.slow("two ranks", instead="e2e/test_isolated_documents e2e/test_tensor_parallel"),
    pytest.mark.skipif(
        len(CORES) < 2,
        reason=f"tensor parallelism needs 2 CPUs, one per rank; there is {len(CORES)}",
    ),
]


def prompts() -> list[list[int]]:
    """Two orders of the same documents."""
    text, layout = Prompts(8000, seed=9), layout_of(make_isolated(LINK_TOKENS))
    head, question = text.tokens(9), text.tokens(12)
    documents = [text.tokens(count) for count in (70, 94, 41)]
    return [
        prompt_of(layout, head, [documents[number] for number in order], question)
        for order in ((0, 1, 2), (2, 0))
    ]


def engine_of_two_ranks(path: Path) -> None:
    """Write what cold and warm documents get."""
    model = str(make_isolated(LINK_TOKENS))
    with engine("qwen3", model=model, dtype="float32", tensor_parallel_size=2) as running:
        found: dict[str, Any] = {}
        for way in ("cold", "warm"):
            found[way] = [
                vars(answer)
                for prompt in prompts()
                for answer in running.ask(prompt, options=MINE, max_tokens=32, ignore_eos=True)
            ]
        running.check_idle()
        path.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found, _ = run_script(MODULE, tmp_path_factory.mktemp("isolated") / "answers.json")
    return found


@pytest.mark.parametrize("way", ["cold", "warm"])
def test_two_ranks_answer_as_plain_torch(way: str, answers: dict[str, Any]) -> None:
    reference = Reference(make_isolated(LINK_TOKENS), "float32")
    for prompt, answer in zip(prompts(), answers[way], strict=True):
        assert answer.report["policy"] == "link"
        assert answer.report["reused_tokens"] == answer.report["exact_tokens"] > 100
        assert len(answer.token_ids) == 32
        found = [step[token] for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        wanted = reference.logprobs(prompt, answer.token_ids)
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= NOISE


if __name__ == "__main__":
    engine_of_two_ranks(Path(sys.argv[1]))
