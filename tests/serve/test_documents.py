# SPDX-License-Identifier: Apache-2.0
"""Requests with documents that the engine could not answer are refused before it gets them."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

import vllm_segreuse
from segreuse_extras.trained.anchors import AnchorNames, Anchors
from segreuse_extras.trained.checks import PromptRules, check_documents, expected
from segreuse_extras.trained.layout import Layout, Names, blocks_needed
from segreuse_extras.viewer.recent import watched
from tests.serve.vllm_app import MESSAGES, make_app
from vllm_segreuse.compat import async_llm, input_processor
from vllm_segreuse.engine.kv_slots import KvSlots
from vllm_segreuse.options.parsing import FREEZE, RequestError
from vllm_segreuse.serve.requests import check_params, check_prompt

NAMES = Names(1, 2, "<s>", "</s>", "<{document}_{index}>")
LAYOUT = Layout(100, 101, ((110,), (120,)))
PROMPT = [1, 100, 5, 6, 101, 110, 100, 7, 101, 120, 2]
RULES = PromptRules(LAYOUT, block_size=4, slots=KvSlots(1, 32), num_blocks=10)


@pytest.fixture(autouse=True)
def _nothing_is_expected() -> Iterator[None]:
    token = expected.set(None)
    yield
    expected.reset(token)


BODIES: list[tuple[Any, str]] = [
    ("a text", "must be a list of objects with a text, not str"),
    ({"text": "a"}, "not dict"),
    ([{"text": "a"}, "b"], r"documents\[1\] has no text"),
    ([{}], r"documents\[0\] has no text"),
    ([{"text": ""}], "no text"),
    ([{"text": None}], "no text"),
    ([{"text": ["a"]}], "no text"),
    ([{"text": "a"}] * 3, "has 3, and the model was trained for at most 2"),
    ([{"text": "a"}, {"text": "b</s>c"}], r"documents\[1\].text has '</s>'"),
    ([{"text": "<s>"}], "special token"),
    ([{"text": "see <2_1>"}], "'<2_1>'"),
    ([{"text": "a", "extra_keys": "other"}], "extra_keys, and all documents of a request are in"),
    ([{"text": "a", "cache_salt": "other"}], "cache_salt"),
]


@pytest.mark.parametrize(("documents", "reason"), BODIES, ids=[str(b)[:40] for b, _ in BODIES])
def test_bad_documents_are_named(documents: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        check_documents({"documents": documents}, NAMES)
    assert caught.value.option == "documents"


COMPRESSED = replace(NAMES, anchors=AnchorNames(8, 4))


@pytest.mark.parametrize(
    "document", [{"text": "a"}, {"base": "a"}, {"base": "a", "id": "b", "text": "c"}, "a", None]
)
def test_a_model_with_anchors_reads_documents_of_knowledge_bases_only(document: Any) -> None:
    with pytest.raises(RequestError, match=r"documents\[0\]: this model reads compressed docum"):
        check_documents({"documents": [document]}, COMPRESSED)
    check_documents({"documents": [{"base": "a", "id": "b"}]}, COMPRESSED)
    assert expected.get() == 1


ANCHORED = PromptRules(replace(LAYOUT, anchors=Anchors(8, (130, 131))), 4, KvSlots(1, 64), 20)
TWO = [1, 100, 130, 131, 101, 110, 100, 130, 101, 120, 2]
OF_BOTH = {"extra_keys": ["key"], "segreuse_documents": ["a", "b"]}


@pytest.mark.parametrize(
    ("extra_args", "is_apart", "reason"),
    [
        ({}, False, "the prompt has 2, and the request names 0"),
        (
            OF_BOTH | {"segreuse_documents": ["a"]},
            False,
            "names 1: name each of them in",
        ),
        (OF_BOTH | {"segreuse_documents": "a"}, False, "names 1"),
        (OF_BOTH | {"extra_keys": None}, False, "with the extra_keys of their knowledge base"),
        (OF_BOTH, True, "no adapter and no cache_salt"),
    ],
)
def test_compressed_documents_are_named_in_their_namespace(
    extra_args: Any, is_apart: bool, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        ANCHORED.check(TWO, SamplingParams(extra_args=extra_args), None, is_apart)
    ANCHORED.check(TWO, SamplingParams(extra_args=OF_BOTH))
    ANCHORED.check([1, 2, 3], SamplingParams(), None, is_apart)
    RULES.check(PROMPT, SamplingParams(), None, is_apart)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_they_are_400_at_every_endpoint(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    client = TestClient(app)
    body = {"messages": MESSAGES, "prompt": "a", "documents": [{}]}
    assert "no text" not in client.post(path, json=body).text, "an ordinary model takes any"
    app.state.segreuse_model = object()
    monkeypatch.setattr("segreuse_extras.trained.checks.names_of", lambda model: NAMES)
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "documents"
    assert "documents[0] has no text" in response.json()["error"]["message"]


@pytest.mark.parametrize(("documents", "count"), [(None, None), ([], None), ([{"text": "a"}], 1)])
def test_good_documents_are_counted(documents: Any, count: int | None) -> None:
    expected.set(7)
    check_documents({"documents": documents}, NAMES)
    assert expected.get() == count


PROMPTS: list[tuple[list[int], dict[str, Any], str, str]] = [
    ([1, 101, 2], {}, "documents", "an end token outside of a document"),
    ([100, 5, 101], {}, "documents", "its 1 link tokens must follow"),
    ([100, 5, 100, 6, 101, 110, 2], {}, "documents", "a start token inside document 1"),
    ([*PROMPT[:-1], 100, 8, 101, 2], {}, "documents", "more than 2 documents"),
    (PROMPT, {"prompt_logprobs": 0}, "prompt_logprobs", "not computed in their places"),
    (PROMPT, {"skip_reading_prefix_cache": True}, "documents", "which skip_reading_prefix_cache"),
    ([100, *[5] * 27, 101, 110, 2], {}, "documents", "29 tokens takes 34 .* the model 32"),
    ([1, 100, *[5] * 18, 101, 110, 2], {}, "documents", "take 11 KV blocks .* there are 9"),
]


@pytest.mark.parametrize(("tokens", "options", "named", "reason"), PROMPTS)
def test_prompts_that_cannot_be_answered(
    tokens: list[int], options: dict[str, Any], named: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        RULES.check(tokens, SamplingParams(**options))
    assert caught.value.option == named


@pytest.mark.parametrize("prompt", [[1, 2, 3], PROMPT, [1, 100, *[5] * 13, 101, 110, 2]])
def test_prompts_that_can(prompt: list[int]) -> None:
    RULES.check(prompt, SamplingParams())


def test_drafts_take_blocks_too() -> None:
    tokens = [1, 100, *[5] * 13, 101, 110, 2]
    RULES.check(tokens, SamplingParams())
    with pytest.raises(RequestError, match="take 10 KV blocks"):
        replace(RULES, slots=KvSlots(3, 32)).check(tokens, SamplingParams())


def test_text_without_documents_may_ask_for_anything() -> None:
    RULES.check([1, 2], SamplingParams(prompt_logprobs=1), unusual="images")


def test_images_and_parts_do_not_go_with_documents() -> None:
    for unusual in ("images, audio or video", "parts to come"):
        with pytest.raises(RequestError, match=f"send it without {unusual}$"):
            RULES.check(PROMPT, SamplingParams(), unusual=unusual)


def test_embeddings_hide_documents() -> None:
    with pytest.raises(RequestError, match="by their tokens") as caught:
        RULES.check(None, SamplingParams())
    assert caught.value.option == "prompt_embeds"


def test_a_document_of_a_base_is_its_own_prompt() -> None:
    RULES.check([100, 5, 101], SamplingParams(extra_args={FREEZE: "e:0:1:0"}))


@pytest.mark.parametrize("count", [1, 3])
def test_the_template_must_have_put_in_all(count: int) -> None:
    expected.set(count)
    with pytest.raises(RequestError, match=f"{count} were sent, and the prompt has 2"):
        RULES.check(PROMPT, SamplingParams())
    expected.set(2)
    RULES.check(PROMPT, SamplingParams())


@pytest.mark.parametrize(("length", "takes"), [(25, 30), (28, 30), (29, 34), (32, 34)])
def test_a_document_may_take_as_much_as_the_model_has(length: int, takes: int) -> None:
    """Whole blocks, the token behind, and one of output."""
    tokens = [1, 100, *[5] * (length - 2), 101, 110, 2]
    enough = replace(RULES, slots=KvSlots(1, takes), num_blocks=0)
    enough.check(tokens, SamplingParams())
    with pytest.raises(RequestError, match=f"{length} tokens takes {takes} .* {takes - 1} at most"):
        replace(enough, slots=KvSlots(1, takes - 1)).check(tokens, SamplingParams())


@pytest.mark.parametrize("needed", [8, 9])
def test_documents_may_take_all_blocks_but_one(needed: int) -> None:
    tokens = [1, 100, *[5] * (4 * (needed - 6)), 101, 110, 2]
    needed = blocks_needed(tokens, LAYOUT.spans(tokens), 4, RULES.slots.needed(len(tokens)))
    replace(RULES, num_blocks=needed + 1).check(tokens, SamplingParams())
    with pytest.raises(RequestError, match=f"take {needed} KV blocks .* there are {needed - 1}:"):
        replace(RULES, num_blocks=needed).check(tokens, SamplingParams())


@pytest.mark.parametrize(("engines", "blocks", "known"), [(1, 77, 77), (1, None, 0), (2, 77, 0)])
def test_rules_are_those_of_the_engine(
    engines: int, blocks: int | None, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [LAYOUT, None]
    monkeypatch.setattr("segreuse_extras.trained.checks.layout_of", lambda model: layouts.pop(0))
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=99),
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=8),
        parallel_config=SimpleNamespace(data_parallel_size=engines),
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
    )
    assert PromptRules.of(config) == PromptRules(LAYOUT, 8, KvSlots(1, 99), known)
    assert PromptRules.of(config) is None, "an ordinary model"


@pytest.mark.parametrize("number", [2, 3])
def test_a_request_has_as_many_documents_as_the_model_was_trained_for(number: int) -> None:
    names = replace(NAMES, max_documents=number)
    check_documents({"documents": [{"text": "a"}] * number}, names)
    assert expected.get() == number
    with pytest.raises(RequestError, match=f"has {number + 1}, and .* at most {number}: send"):
        check_documents({"documents": [{"text": "a"}] * (number + 1)}, names)
    assert expected.get() is None


def test_where_engines_share_the_number_of_blocks_none_is_known() -> None:
    rules = PromptRules(LAYOUT, 4, KvSlots(1, 64), 0)
    rules.check([1, 100, *[5] * 40, 101, 110, 2], SamplingParams())


def test_equal_documents_and_one_at_the_start_take_blocks_once() -> None:
    tokens = [100, 5, 101, 110, 100, 5, 101, 120, 1]
    spans = LAYOUT.spans(tokens)
    assert blocks_needed(tokens, spans, 2, 10) == 5 + 1
    assert blocks_needed(tokens, spans, 3, 10) == 4
    assert blocks_needed([1, *tokens], LAYOUT.spans([1, *tokens]), 2, 11) == 6 + 2
    assert blocks_needed(tokens, spans, 2, 21) == 11 + 1


class Processor:
    """Of a vLLM whose model has a layout."""

    vllm_config: Any = SimpleNamespace(kv_transfer_config=vllm_segreuse.kv_transfer_config())


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Processor:
    monkeypatch.setattr(PromptRules, "of", lambda vllm_config: RULES)
    return Processor()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], Any]:
    """vLLM's processing of a request, which has been processed before, with our check behind it."""
    monkeypatch.setattr(InputProcessor, "process_inputs", lambda self, request: request)
    monkeypatch.setattr(InputProcessor, "_validate_params", lambda self, params: None)
    input_processor.install(check_params, check_prompt)
    process: Any = InputProcessor.process_inputs
    return process


def processed(**changes: Any) -> Any:
    request = {
        "prompt_token_ids": PROMPT,
        "prompt_embeds": None,
        "mm_features": None,
        "resumable": False,
        "lora_request": None,
        "cache_salt": None,
        "sampling_params": SamplingParams(),
    }
    return SimpleNamespace(**request | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": [1, 101, 2]},
        {"prompt_embeds": "some"},
        {"mm_features": ["an image"]},
        {"resumable": True},
        {"sampling_params": SamplingParams(prompt_logprobs=1)},
    ],
)
def test_what_vllm_has_processed_is_checked(
    processor: Processor, process: Any, changes: dict[str, Any]
) -> None:
    assert process(processor, processed()).prompt_token_ids == PROMPT
    with pytest.raises(ValueError, match="document"):
        process(processor, processed(**changes))


def test_without_segment_reuse_or_a_layout_nothing_is_checked(
    processor: Processor, process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = Processor()
    plain.vllm_config = SimpleNamespace(kv_transfer_config=None)
    assert process(plain, processed(prompt_token_ids=[101]))
    monkeypatch.setattr(PromptRules, "of", lambda vllm_config: None)
    assert process(Processor(), processed(prompt_token_ids=[101]))


@pytest.mark.parametrize(
    "prompt",
    [
        {"type": "token", "prompt_token_ids": [1, 101, 2]},
        {"type": "embeds", "prompt_embeds": "some", "prompt_token_ids": PROMPT},
        {"type": "multimodal", "prompt_token_ids": PROMPT},
    ],
)
def test_a_stream_does_not_begin(
    processor: Processor, prompt: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = SimpleNamespace(input_processor=processor)
    begun: list[Any] = []

    async def outputs(*args: Any) -> Any:
        begun.append(args)
        yield args

    monkeypatch.setattr(AsyncLLM, "generate", outputs)
    async_llm.install(check_prompt, watched)
    generate: Any = AsyncLLM.generate
    with pytest.raises(ValueError, match="document"):
        generate(engine, prompt, SamplingParams(), "one")

    async def read(good: Any) -> None:
        async for _ in generate(engine, good, SamplingParams(), "one"):
            pass

    for good in ({"type": "token", "prompt_token_ids": PROMPT}, {"prompt": "text"}, "text"):
        asyncio.run(read(good))
    assert len(begun) == 3
