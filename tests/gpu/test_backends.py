# SPDX-License-Identifier: Apache-2.0
"""Reuse under Model Runner V2 with two steps in flight, on one attention backend of GPUs.

Runs in a process of its own, which `test_pretending.py` starts for each backend.
"""

from collections.abc import Iterator

import pytest

from tests.gpu import pretending
from tests.parts import parts_of

if pretending.BACKEND is None:
    pytest.skip("test_pretending.py runs it", allow_module_level=True)

pretending.pretend(pretending.BACKEND)

from segreuse_extras.audit.draw import Draw  # noqa: E402
from tests.e2e.engine import NAMESPACE, Engine, Prompts, engine  # noqa: E402
from tests.e2e.test_equality import EVERYTHING, WAYS, assert_same  # noqa: E402
from vllm_segreuse.config import SegReuseConfig  # noqa: E402

BLOCK_SIZE = 16
SPREAD_TOKENS = 32
POOL_BLOCKS = 64


@pytest.fixture(scope="module")
def reusing() -> Iterator[Engine]:
    with engine(
        "llama",
        segreuse={"spread_tokens": SPREAD_TOKENS},
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=POOL_BLOCKS,
        max_num_seqs=4,
        max_model_len=512,
        max_num_batched_tokens=256,
    ) as running:
        yield running


def test_it_is_what_a_gpu_would_run(reusing: Engine) -> None:
    core = reusing.llm.llm_engine.engine_core.engine_core
    assert type(core.scheduler).__name__ == "AsyncScheduler"
    assert core.batch_queue_size == 2
    runner = core.model_executor.driver_worker.worker.model_runner
    assert type(runner).__mro__[1].__module__ == "vllm.v1.worker.gpu.model_runner"
    [[group]] = runner.attn_groups
    assert group.backend.get_name() == pretending.BACKEND


@pytest.mark.parametrize("spread", [False, True])
def test_recomputing_everything_equals_full_prefill(
    reusing: Engine, spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several plans of one step, in chunks, while others decode; or the second over several."""
    if not spread:
        monkeypatch.setattr(SegReuseConfig, "spread_work", lambda *_: None)
    text = Prompts(reusing.vocab_size, seed=3)
    documents = [text.tokens(61), text.tokens(83)]
    prompts = [text.around(*documents, gaps=(9, 20, 3)), text.around(documents[1], gaps=(1, 3))]
    reference = reusing.ask(*prompts)
    for way, options in WAYS.items():
        reusing.reset()
        reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
        for ours, theirs in zip(reusing.ask(*prompts, options=options), reference, strict=True):
            assert ours.report["bypass_reason"] is None, way
            assert ours.report["reused_tokens"] > 48
            assert_same(ours, theirs, noise=2e-3)
    reusing.check_idle()


def test_the_next_step_does_not_overwrite_what_a_pass_reads(
    reusing: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Donors are free as soon as the step has left; a pool that is full gives them to the next."""
    text, pool = Prompts(reusing.vocab_size, seed=4), reusing.pool
    assert pool.num_gpu_blocks == POOL_BLOCKS
    document = text.tokens(70)
    prompt = text.around(document, gaps=(5, 7))
    others = [text.tokens(20) for _ in range(3)]
    reference = reusing.ask(prompt)[0]
    reusing.reset()
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    donors = {block.block_id for block in pool.blocks if block.block_hash is not None}
    assert len(donors) == len(document) // BLOCK_SIZE
    # What the prompt needs, and the donors: there is no other block for what comes after it.
    left = -(-(len(prompt) + 4) // BLOCK_SIZE) + len(donors)
    held = pool.get_new_blocks(pool.get_num_free_blocks() - left)
    assert pool.get_num_free_blocks() == left
    assert not donors & {block.block_id for block in held}
    given: list[set[int]] = []
    get_new_blocks = pool.get_new_blocks

    def recorded(count: int) -> list:
        blocks = get_new_blocks(count)
        given.append({block.block_id for block in blocks})
        return blocks

    with monkeypatch.context() as patch:
        patch.setattr(pool, "get_new_blocks", recorded)
        answers = reusing.ask(prompt, *others, options=EVERYTHING | {"segreuse_dense_layers": 0})
    pool.free_blocks(held)
    assert not donors & given[0], "the prompt was given its own donors"
    assert donors & set().union(*given[1:]), "the pool was not full: donors were not given away"
    assert answers[0].report["reused_tokens"] >= 64
    assert_same(answers[0], reference, noise=2e-3)
    reusing.check_idle()


def test_an_audit_compares_what_was_answered(
    reusing: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner samples with two steps in flight; rows and positions are told by its batch."""
    audits = parts_of(reusing.scheduler.connector.scheduler_side).audits
    monkeypatch.setattr(Draw, "draw", lambda *_: "audited")
    text = Prompts(reusing.vocab_size, seed=21)
    document = text.tokens(100)
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    for options in (EVERYTHING, EVERYTHING | {"segreuse_policy": "shift"}):
        prompt = text.around(document, gaps=(9, 20))
        (answer,) = reusing.ask(prompt, options=options, max_tokens=5)
        assert answer.report["bypass_reason"] is None
        while reusing.scheduler.has_requests():
            reusing.llm.llm_engine.step()
    everything, shifted = audits.status()["recent"]
    assert everything["compared_tokens"] == shifted["compared_tokens"] == 5
    assert everything["agreed_tokens"] == 5
    assert 0 <= everything["kl"] < 1e-4 < shifted["kl"]
    reusing.check_idle()
