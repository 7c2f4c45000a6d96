# SPDX-License-Identifier: Apache-2.0
"""What kinds of requests reuse, through the real engine; see docs/guarantees.md."""

from collections.abc import Iterator

import pytest

from tests.e2e.engine import BF16_NOISE, BLOCK_SIZE, NAMESPACE, Engine, Prompts, engine
from tests.e2e.stepping import drain, step, submit
from tests.e2e.test_equality import assert_same
from tests.parts import parts_of

pytestmark = pytest.mark.patches(
    "attention_impl",
    "block_pool",
    "custom_op",
    "engine_args",
    "input_processor",
    "kv_cache_manager",
    "metadata_builder",
    "model_runner",
    "scheduler",
    "triton_dispatcher",
)

SHIFT = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 16}


@pytest.fixture(scope="module")
def reusing() -> Iterator[Engine]:
    with engine("qwen3", max_model_len=1024, max_num_batched_tokens=1024) as running:
        yield running


@pytest.fixture(autouse=True)
def _clean(reusing: Engine) -> Iterator[None]:
    reusing.reset()
    yield
    reusing.check_idle()


@pytest.fixture
def text(reusing: Engine) -> Prompts:
    return Prompts(reusing.vocab_size, seed=3)


def ingest(reusing: Engine, *documents: list[int]) -> None:
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)


def test_07_without_extra_keys_nothing_is_reused_or_donated(reusing: Engine, text: Prompts) -> None:
    document = text.tokens(200)
    reusing.ask(document)
    assert len(reusing.index) == 0
    assert reusing.ask(text.around(document), options=SHIFT)[0].report["reused_tokens"] == 0
    reusing.reset()
    ingest(reusing, document)
    answer = reusing.ask(text.around(document))[0]
    assert answer.report == {}
    assert answer.cached_tokens == 0


@pytest.mark.parametrize(
    "other",
    [["test"], ["tests", "x"], ["te", "sts"], ["TESTS"]],
)
def test_09_another_namespace_is_a_miss(reusing: Engine, text: Prompts, other: list[str]) -> None:
    document = text.tokens(200)
    ingest(reusing, document)
    answer = reusing.ask(text.around(document), options=SHIFT | {"extra_keys": other})[0]
    assert answer.report["reused_tokens"] == 0
    assert answer.report["bypass_reason"] == "too_few_reused_tokens"


def test_09_another_salt_is_a_miss(reusing: Engine, text: Prompts) -> None:
    from vllm import SamplingParams

    document = text.tokens(200)
    ingest(reusing, document)
    params = SamplingParams(max_tokens=1, extra_args=SHIFT)
    inputs = {"prompt_token_ids": text.around(document), "cache_salt": "pepper"}
    output = reusing.llm.generate([inputs], params, use_tqdm=False)[0]
    assert output.kv_transfer_params["segreuse"]["reused_tokens"] == 0


@pytest.mark.parametrize("length", [1, 5, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_11_short_prompts_are_bypassed(reusing: Engine, text: Prompts, length: int) -> None:
    prompt = text.tokens(length)
    ingest(reusing, prompt)
    report = reusing.ask(prompt, options=SHIFT)[0].report
    assert report["bypass_reason"] == "too_few_tokens"
    assert report["reused_tokens"] == 0


def test_12_odd_offset_repeats_and_overlaps(reusing: Engine, text: Prompts) -> None:
    first, second = text.tokens(200), text.tokens(150)
    overlap = first[100:] + second[:60]
    ingest(reusing, first, second, overlap)
    prompt = text.tokens(13) + first + text.tokens(3) + first + second + text.tokens(4)
    report = reusing.ask(prompt, options=SHIFT)[0].report
    # Nothing but what fills a block is in the cache: the documents' tails are new text.
    assert report["reused_tokens"] >= 2 * (200 // BLOCK_SIZE * BLOCK_SIZE) + 128
    repeated = reusing.ask(prompt[:-4] + text.tokens(4), options=SHIFT)[0].report
    assert repeated["reused_tokens"] == report["reused_tokens"]


def test_13_a_whole_prompt_match_still_computes_the_last_token(
    reusing: Engine, text: Prompts
) -> None:
    document = text.tokens(320)
    ingest(reusing, document)
    shifted = document[5:]
    answer = reusing.ask(shifted, options=SHIFT)[0]
    assert answer.report["reused_tokens"] == len(shifted) - 1
    assert answer.report["new_tokens"] == 1
    assert len(answer.token_ids) == 4


def test_14_a_prompt_as_long_as_the_model_allows(reusing: Engine, text: Prompts) -> None:
    documents = [text.tokens(300) for _ in range(3)]
    ingest(reusing, *documents)
    prompt = text.tokens(1024 - 901) + documents[2] + documents[0] + documents[1]
    assert len(prompt) == 1023
    report = reusing.ask(prompt, options=SHIFT, max_tokens=1)[0].report
    assert report["reused_tokens"] >= 3 * (300 // BLOCK_SIZE * BLOCK_SIZE)
    with pytest.raises(Exception, match="maximum context length is 1024"):
        reusing.ask([*prompt, 17, 18], options=SHIFT, max_tokens=1)


def test_15_prompt_logprobs_bypass(reusing: Engine, text: Prompts) -> None:
    document = text.tokens(200)
    ingest(reusing, document)
    prompt = text.around(document)
    answer = reusing.ask(prompt, options=SHIFT, prompt_logprobs=1)[0]
    assert answer.report["bypass_reason"] == "prompt_logprobs"
    assert answer.cached_tokens == 0


def test_16_every_child_of_n_is_right(reusing: Engine, text: Prompts) -> None:
    """With everything computed again, each child answers as the same child of a plain request."""
    document = text.tokens(320)
    prompt = text.around(document)
    sampling = {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 6}
    plain = reusing.children(prompt, **sampling)
    reusing.reset()
    ingest(reusing, document)
    everything = SHIFT | {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 1.0}
    reused = reusing.children(prompt, options=everything, **sampling)
    assert all(child.report["reused_tokens"] >= 256 for child in reused), reused[0].report
    assert len({tuple(child.token_ids) for child in reused}) == 3
    for child, reference in zip(reused, plain, strict=True):
        assert len(child.token_ids) == 6
        assert_same(child, reference, noise=BF16_NOISE)


def test_17_stop_strings_seeds_and_logprobs_work_behind_reuse(
    reusing: Engine, text: Prompts
) -> None:
    document = text.tokens(320)
    ingest(reusing, document)
    prompt = text.around(document)
    options = SHIFT | {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 1.0}
    twice = [
        reusing.ask(prompt, options=options, temperature=1.0, seed=5, max_tokens=8)[0]
        for _ in range(2)
    ]
    assert twice[0].token_ids == twice[1].token_ids
    assert len(twice[0].logprobs[0]) >= 8
    stopped = reusing.ask(
        prompt,
        options=options,
        max_tokens=8,
        seed=5,
        temperature=1.0,
        stop_token_ids=[twice[0].token_ids[2]],
    )[0]
    assert stopped.token_ids == twice[0].token_ids[:3]


def test_22_a_donor_or_prefix_hashed_in_this_step_is_waited_for(
    reusing: Engine, text: Prompts
) -> None:
    """A document and prompts that need it arrive together: whose plan would stand behind its blocks
    waits a step, who would move them finds none yet, and all answers are right."""
    document, known, tail = text.tokens(256), text.tokens(128), text.tokens(9)
    prompts = {
        "document": document,
        "prefix": document + known + tail,
        "segment": text.tokens(11) + document + tail,
    }
    everything = {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 1.0}
    options = NAMESPACE | everything | {"segreuse_min_reused_tokens": 16}
    alone = {}
    for name, prompt in prompts.items():
        [alone[name]] = reusing.ask(prompt)
        reusing.reset()
    ingest(reusing, known)
    for name, prompt in prompts.items():
        submit(reusing, name, prompt, options)
    answers = step(reusing)
    admitted = {request.request_id.split("-")[0] for request in reusing.scheduler.running}
    assert admitted == {"document", "segment"}
    submit(reusing, "late", text.tokens(5) + document + tail, options)  # now it is a donor
    answers |= drain(reusing)
    found = {name.split("-")[0]: answer for name, answer in answers.items()}
    assert found["prefix"].report["prefix_tokens"] == 256
    assert found["prefix"].report["reused_tokens"] >= 128
    assert found["segment"].report["reused_tokens"] == 0
    assert found["late"].report["reused_tokens"] >= 256
    for name, reference in alone.items():
        assert_same(found[name], reference, noise=BF16_NOISE)


def test_generated_text_donates(reusing: Engine, text: Prompts) -> None:
    question = text.tokens(40)
    answer = reusing.ask(question, options=NAMESPACE, max_tokens=200, ignore_eos=True)[0]
    prompt = text.tokens(21) + answer.token_ids + text.tokens(8)
    report = reusing.ask(prompt, options=SHIFT)[0].report
    assert report["reused_tokens"] >= 150


def test_a_prefix_computed_without_extra_keys_donates_to_those_who_bring_it(
    reusing: Engine, text: Prompts
) -> None:
    document = text.tokens(256)
    reusing.ask(document)
    first = reusing.ask([*document, 17], options=SHIFT)[0]
    assert first.report["prefix_tokens"] == 256
    assert reusing.ask(text.around(document), options=SHIFT)[0].report["reused_tokens"] == 256


def test_a_prefix_computed_in_another_namespace_donates_in_mine_too(
    reusing: Engine, text: Prompts
) -> None:
    document = text.tokens(256)
    ingest(reusing, document)
    mine, third = SHIFT | {"extra_keys": ["mine"]}, SHIFT | {"extra_keys": ["third"]}
    first = reusing.ask([*document, 17], options=mine)[0]
    assert first.report["prefix_tokens"] == 256
    for options, expected in ((mine, 256), (SHIFT, 256), (third, 0)):
        report = reusing.ask(text.around(document), options=options)[0].report
        assert report["reused_tokens"] == expected


def test_ended_requests_give_their_namespaces_back(reusing: Engine, text: Prompts) -> None:
    """However they end; a namespace with cached blocks stays until nothing refers to it."""
    from vllm import SamplingParams

    namespaces = parts_of(reusing.scheduler.connector.scheduler_side).namespaces
    vllm_engine = reusing.llm.llm_engine

    def in_use() -> int:
        return len(namespaces.references())

    assert in_use() == 0
    for name in ("finished", "waiting", "running"):
        options = {"extra_keys": [name]}
        if name == "finished":
            reusing.ask(text.tokens(BLOCK_SIZE // 2), options=options)
            continue
        params = SamplingParams(extra_args=options, max_tokens=8, ignore_eos=True)
        prompt = {"prompt_token_ids": text.tokens(BLOCK_SIZE // 2)}
        request_id = vllm_engine.add_request(name, prompt, params)
        if name == "running":
            vllm_engine.step()
        assert in_use() == 1
        vllm_engine.abort_request([request_id], internal=True)
        assert in_use() == 0
    ingest(reusing, text.tokens(200))
    assert in_use() == 0


def test_26_reset_empties_the_index(reusing: Engine, text: Prompts) -> None:
    document = text.tokens(256)
    ingest(reusing, document)
    assert len(reusing.index) == 8
    reusing.reset()
    assert len(reusing.index) == 0
    assert reusing.ask(text.around(document), options=SHIFT)[0].report["reused_tokens"] == 0
