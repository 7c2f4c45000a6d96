# SPDX-License-Identifier: Apache-2.0
"""Segments are reused from int8 and fp8 records: twice as many in the same memory, near what the
GPU's own copy gives, and never encoded a second time."""

from collections.abc import Iterator

import pytest

from tests.e2e.engine import Answer, Engine, Prompts, engine
from tests.e2e.test_equality import EVERYTHING, assert_same
from tests.e2e.test_tier import ARGUMENTS, IDLE, NOISE, SHIFT, ask, counts, evict, worker_tier
from vllm_segreuse.kernels.codecs import Codec

CODED = [Codec.INT8, Codec.FP8]
ROUNDED = {Codec.INT8: 0.05, Codec.FP8: 0.3}
"""How far log-probabilities may move: a step is 1/254 of the largest, or 1/16 of a number."""


@pytest.fixture(scope="module", params=CODED, ids=str)
def tiered(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Codec]]:
    options = {"tier": {"host_gib": 0.008, "min_run_tokens": 32, "codec": str(request.param)}}
    with engine("llama", segreuse=options, **ARGUMENTS) as started:
        yield started, request.param


@pytest.fixture
def running(tiered: tuple[Engine, Codec]) -> Iterator[Engine]:
    subject, _ = tiered
    subject.reset()
    yield subject
    subject.check_idle()
    assert counts(subject) | IDLE == counts(subject), "rows are still held"


@pytest.fixture
def codec(tiered: tuple[Engine, Codec]) -> Codec:
    return tiered[1]


@pytest.fixture
def text(running: Engine, request: pytest.FixtureRequest) -> Prompts:
    return Prompts(running.vocab_size, seed=sum(map(ord, request.node.name)))


def largest_difference(one: Answer, other: Answer) -> float:
    """Of the first token's log-probabilities."""
    mine, theirs = one.logprobs[0], other.logprobs[0]
    return max(abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys())


def test_what_was_evicted_is_reused_rounded(running: Engine, codec: Codec, text: Prompts) -> None:
    document = text.tokens(230)
    donor, question = text.around(document), text.around(document, gaps=(11, 7))
    ask(running, donor, SHIFT)
    from_gpu = ask(running, question, SHIFT)
    running.reset()
    ask(running, donor, SHIFT)
    evict(running, text)
    from_host = ask(running, question, SHIFT)
    assert from_host.report["tiered_tokens"] == from_gpu.report["reused_tokens"] > 150
    assert 0 < largest_difference(from_host, from_gpu) < ROUNDED[codec]
    shape = worker_tier(running).region.shape
    assert shape.cell_bytes < 0.32 * 65536, "of a cache in float32"


def test_recomputing_all_that_comes_from_records_equals_full_prefill(
    running: Engine, text: Prompts
) -> None:
    document = text.tokens(200)
    question = text.around(document)
    reference = ask(running, question, {})
    running.reset()
    ask(running, text.around(document), SHIFT)
    evict(running, text)
    answer = ask(running, question, EVERYTHING)
    assert answer.report["tiered_tokens"] > 150
    assert_same(answer, reference, NOISE)


def test_what_was_decoded_is_not_encoded_again(running: Engine, text: Prompts) -> None:
    document = text.tokens(230)
    ask(running, text.around(document), SHIFT)
    evict(running, text)
    kept = counts(running)["host"]
    answer = ask(running, text.around(document, gaps=(11, 7)), SHIFT)
    assert answer.report["tiered_tokens"] > 150
    evict(running, text)
    running.ask(text.tokens(40), max_tokens=1)
    # The blocks with the question's own tokens beside the document's hold decoded ones, too.
    assert counts(running)["host"] <= kept + 1
