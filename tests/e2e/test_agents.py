# SPDX-License-Identifier: Apache-2.0
"""`bench agents` over HTTP, on the server that modules share: a model with random weights, whose
answers mean nothing. Distances from full prefill are in `test_english`."""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from bench.agents import arms, traces
from bench.agents.serving import Client, Taken
from bench.agents.tokens import Tokens
from bench.shapes import make_model
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e


class Keeping(Client):
    """Leaves the caches of the others alone."""

    def reset(self) -> None:
        pass


@pytest.fixture
def client(shared_server: Server) -> Client:
    return Keeping(shared_server, traces.Writer(AutoTokenizer.from_pretrained(make_model("llama"))))


def total(taken: list[Taken]) -> Tokens:
    return sum((it.answered.tokens for it in taken), Tokens())


def test_arms_find_what_they_are_to_find(client: Client) -> None:
    trace = traces.draw("clock", 0, "tuning")
    trace = replace(trace, requests=trace.requests[:6])  # two of each user
    chosen = arms.find(["none", "prefix", "content"])
    # By its own budget the default would recompute all of so little, and so reuse nothing.
    chosen[2] = replace(chosen[2], options={"similarity": 0, "policy": "shift"})
    found = {arm.name: client.trace(trace, arm) for arm in chosen}
    none, prefix, content = (total(taken) for taken in found.values())
    assert none.prompt == prefix.prompt == content.prompt
    assert none.computed == none.prompt
    assert prefix.computed == prefix.prompt - prefix.prefix < none.prompt
    assert content.equal > 0, "instructions behind another session"
    # What was reused has no name for the prefix cache: a later step finds it as a segment.
    assert content.prefix <= prefix.prefix < content.prefix + content.equal
    for taken in found["content"]:
        assert 0 < taken.answered.ttft_s <= taken.answered.total_s


def test_a_model_that_says_nothing_useful_leads_a_short_conversation(client: Client) -> None:
    [arm] = arms.find(["content"])
    led = client.free(traces.draw("single", 0, "tuning"), 0, arm)
    assert (led.success, led.good_calls) == (0.0, 0)
    assert led.calls == 1, "text without a call counts as one"
