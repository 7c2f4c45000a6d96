# SPDX-License-Identifier: Apache-2.0
"""How requests are sent to an engine in this process, without one."""

from types import SimpleNamespace
from typing import Any

from bench.engine import Request, generate, generate_all


class FakeEngine:
    """Stands for vLLM's: a prefill takes two steps, each step gives one more token to who has one.

    Attributes:
        log: what happened: a request was added, has its first token, or has ended.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.added: list[Any] = []
        self._left: dict[str, int] = {}
        self._said: dict[str, list[int]] = {}
        self._prefill: dict[str, int] = {}

    def add_request(self, name: str, tokens: dict[str, Any], sampling: int) -> None:
        self.added.append(tokens)
        self.log.append(f"add {len(self.added)}")
        self._left[name], self._said[name], self._prefill[name] = sampling, [], 2

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        outputs = []
        for name in [*self._left]:
            self._prefill[name] -= 1
            if self._prefill[name] > 0:
                continue
            said, number = self._said[name], [*self._said].index(name) + 1
            if not said:
                self.log.append(f"first of {number}")
            said.append(len(said))
            completion = SimpleNamespace(token_ids=[*said])
            outputs.append(SimpleNamespace(request_id=name, outputs=[completion]))
            self._left[name] -= 1
            if not self._left[name]:
                del self._left[name]
                self.log.append(f"end of {number}")
        return outputs


def test_each_is_sent_once_the_one_before_has_its_first_token_and_all_decode_together() -> None:
    engine = FakeEngine()
    lengths = (5, 1, 3)
    found = generate_all(
        SimpleNamespace(llm_engine=engine),
        [Request([n], n, salt="s" if n == 1 else None) for n in lengths],
    )
    assert [len(output.outputs[0].token_ids) for output, _ in found] == [5, 1, 3]
    assert engine.log[:3] == ["add 1", "first of 1", "add 2"]
    assert engine.log[3:6] == ["first of 2", "end of 2", "add 3"]
    assert engine.log[6:] == ["end of 1", "first of 3", "end of 3"], "both decoded beside the first"
    assert all(ms > 0 for _, ms in found)
    assert engine.added == [
        {"prompt_token_ids": [5]},
        {"prompt_token_ids": [1], "cache_salt": "s"},
        {"prompt_token_ids": [3]},
    ]


def test_one_request_is_run_to_its_end() -> None:
    output, ms = generate(SimpleNamespace(llm_engine=FakeEngine()), [7], 4)
    assert output.outputs[0].token_ids == [0, 1, 2, 3]
    assert ms > 0
