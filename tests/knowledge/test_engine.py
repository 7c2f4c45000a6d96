# SPDX-License-Identifier: Apache-2.0
"""The engine behind knowledge bases: what is asked of vLLM, and what its answers mean."""

import asyncio
from types import SimpleNamespace as Of
from typing import Any

import pytest
import tokenizers
from transformers import TokenizersBackend
from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

from vllm_segreuse.features.knowledge.engine import (
    Answer,
    NotFrozenError,
    ServedEngine,
    Tokenizer,
    answer_of,
    fingerprint,
    ingesting,
    own_parameters,
    unshared,
    was_frozen,
)
from vllm_segreuse.features.knowledge.errors import UnavailableError
from vllm_segreuse.features.knowledge.origin import Origin, origin
from vllm_segreuse.options.parsing import EXTRA_KEYS, FREEZE
from vllm_segreuse.plan import FreezeOrder
from vllm_segreuse.serve.offline import OfflineEngine

ORDER = FreezeOrder("entry", 1, 3, 5)


class Words:
    """A tokenizer that puts tokens before and behind every text."""

    def __init__(self, before: list[int], behind: list[int]) -> None:
        self._before, self._behind = before, behind

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokens = [ord(char) for char in text]
        return [*self._before, *tokens, *self._behind] if add_special_tokens else tokens


@pytest.mark.parametrize("before", [[], [1], [1, 2]])
@pytest.mark.parametrize("behind", [[], [3]])
def test_sequences_start_with_what_stands_before_every_text(before: Any, behind: Any) -> None:
    tokenizer = Tokenizer(Words(before, behind))
    assert tokenizer.start_tokens() == before
    assert tokenizer.encode("ab") == [97, 98], "without special tokens"


def test_without_a_tokenizer_texts_are_refused_and_nothing_starts_a_sequence() -> None:
    tokenizer = Tokenizer(None)
    assert tokenizer.start_tokens() == []
    assert tokenizer.fingerprint() == ""
    with pytest.raises(UnavailableError, match="send token_ids") as refused:
        tokenizer.encode("a")
    assert refused.value.param == "text"


def fast_tokenizer() -> Any:
    vocab = {"[UNK]": 0, "a": 1, "b": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return get_cached_tokenizer(TokenizersBackend(tokenizer_object=backend))


def test_documents_and_requests_do_not_share_how_texts_are_truncated() -> None:
    shared = fast_tokenizer()
    client = Client()
    client.get_tokenizer = lambda: shared  # type: ignore[method-assign]
    engine = ServedEngine(client)
    shared.backend_tokenizer.enable_truncation(2)  # a request in another thread
    assert engine.encode("a b a b") == [1, 2, 1, 2]
    assert shared.backend_tokenizer.truncation["max_length"] == 2, "the request's is as it was"


def test_what_is_safe_to_share_is_not_copied() -> None:
    pool, words = maybe_make_thread_pool(fast_tokenizer()), Words([], [])
    assert unshared(pool) is pool
    assert unshared(words) is words


def test_a_fingerprint_differs_by_model_and_tokenizer_and_not_by_place() -> None:
    def made(tokenizer: Any = None, **config: Any) -> str:
        hf_config = Of(to_dict=lambda: {"layers": 2, "_name_or_path": "/a"} | config)
        vllm_config = Of(model_config=Of(hf_config=hf_config))
        return fingerprint(vllm_config, Tokenizer(tokenizer))  # type: ignore[arg-type]

    same = {made(), made(_name_or_path="/b"), made(transformers_version="9")}
    assert len(same) == 1
    assert len(same | {made(layers=3), made(Words([], []))}) == 3


def test_a_request_of_ours_says_what_to_freeze_and_is_trusted() -> None:
    with ingesting("key", ORDER) as params:
        assert origin.get() is Origin.OURSELVES
        assert params.extra_args == {EXTRA_KEYS: ["key"], FREEZE: ORDER.encode()}
        assert (params.max_tokens, params.temperature, params.detokenize) == (1, 0.0, False)
    with own_parameters({}, prompt_logprobs=0) as params:
        assert (params.extra_args, params.prompt_logprobs) == (None, 0)
    assert origin.get() is not Origin.OURSELVES


@pytest.mark.parametrize(
    ("params", "frozen"),
    [
        (None, False),
        ({}, False),
        ({"segreuse": None}, False),
        ({"segreuse": {"frozen": False}}, False),
        ({"segreuse": {"frozen": True}}, True),
    ],
)
def test_only_a_report_says_that_something_was_frozen(params: Any, frozen: bool) -> None:
    assert was_frozen(Of(kv_transfer_params=params)) is frozen


def test_a_report_that_says_why_nothing_was_frozen_is_believed() -> None:
    params = {"segreuse": {"frozen": False, "not_frozen": "the pool is full"}}
    with pytest.raises(NotFrozenError, match="the pool is full"):
        was_frozen(Of(kv_transfer_params=params))


@pytest.mark.parametrize("given", [None, {}, {"segreuse": None}, {"segreuse": {"chosen": [1]}}])
def test_an_answer_has_the_report_and_what_was_expected_of_each_token(given: Any) -> None:
    report = (given or {}).get("segreuse") or {}
    bare = Of(kv_transfer_params=given, prompt_logprobs=None)
    assert answer_of(bare, [5, 6]) == Answer(report, None)
    of = [None, {6: Of(logprob=-0.5), 7: Of(logprob=-1.0)}, {7: Of(logprob=-2.0)}]
    told = Of(kv_transfer_params=given, prompt_logprobs=of)
    assert answer_of(told, [5, 6, 7]) == Answer(report, [0.0, -0.5, -2.0])


def test_a_text_is_shown_as_it_stands() -> None:
    calls: list[dict[str, bool]] = []

    class Shown:
        def decode(self, tokens: list[int], **options: bool) -> str:
            calls.append(options)
            return "".join(map(chr, tokens))

    plain, cleaning = Shown(), Shown()
    cleaning.clean_up_tokenization_spaces = True  # type: ignore[attr-defined]
    assert Tokenizer(plain).decode([97, 98]) == Tokenizer(cleaning).decode([97, 98]) == "ab"
    whole = {"skip_special_tokens": False}
    assert calls == [whole, whole | {"clean_up_tokenization_spaces": False}]
    assert Tokenizer(None).decode([97]) is None


def test_a_tokenizer_that_joins_letters_with_what_stands_before_starts_no_sequence() -> None:
    class Joining(Words):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [500] if add_special_tokens else super().encode(text, False)

    assert Tokenizer(Joining([], [])).start_tokens() == []


class Client:
    """vLLM's engine client, as far as it is asked."""

    def __init__(self, policy: str = "fcfs", unfinished: int = 3) -> None:
        self.renderer = Of(tokenizer=object())
        self.model_config = Of(get_vocab_size=lambda: 77)
        self.vllm_config = Of(scheduler_config=Of(policy=policy))
        self.engine_core = self
        self.unfinished = unfinished
        self.freezes = True
        self.asked: list[Any] = []
        self.ranks: list[int | None] = []

    def get_tokenizer(self) -> Any:
        return Words([1], [])

    def get_num_unfinished_requests(self) -> int:
        return self.unfinished

    async def generate(
        self,
        prompt: Any,
        params: Any,
        request_id: str,
        priority: int,
        data_parallel_rank: int | None,
    ) -> Any:
        self.ranks.append(data_parallel_rank)
        self.asked.append((prompt, params.extra_args, request_id, priority, origin.get()))
        yield Of(kv_transfer_params=None)
        yield Of(kv_transfer_params={"segreuse": {"frozen": self.freezes}})

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.asked.append((method, *args))
        return {"warm": {}}


@pytest.mark.parametrize(("policy", "priority"), [("fcfs", 0), ("priority", 2**31 - 1)])
def test_a_server_computes_last_where_priorities_count(policy: str, priority: int) -> None:
    client = Client(policy)
    engine = ServedEngine(client)
    assert asyncio.run(engine.compute([1, 2], "key", ORDER)) is True, "the last output tells"
    assert asyncio.run(engine.compute([1, 2], "key", ORDER)) is True
    first, second = client.asked
    assert first[0]["prompt_token_ids"] == [1, 2]
    assert first[1] == {EXTRA_KEYS: ["key"], FREEZE: ORDER.encode()}
    assert first[2] != second[2], "no two requests have one name"
    assert first[3:] == (priority, Origin.OURSELVES)


def test_a_server_tells_that_nothing_was_frozen() -> None:
    client = Client()
    client.freezes = False
    assert asyncio.run(ServedEngine(client).compute([1, 2], "key", ORDER)) is False


def test_a_server_asks_the_scheduler_and_leaves_its_own_requests_out() -> None:
    client = Client(unfinished=3)
    engine = ServedEngine(client)
    assert engine.vocab_size == 77
    assert [engine.num_others(own) for own in (0, 2, 4)] == [3, 1, 0]
    assert asyncio.run(engine.frozen()) == {"warm": {}}
    asyncio.run(engine.unfreeze(["a"]))
    assert client.asked == [("segreuse_call", "frozen"), ("segreuse_call", "unfreeze", ["a"])]


def test_a_server_without_a_tokenizer_has_none() -> None:
    client = Client()
    client.renderer.tokenizer = None
    assert ServedEngine(client).start_tokens() == []


class Offline:
    """vLLM's LLM, as far as it is asked; its engine is in this process or in another."""

    def __init__(self, own_process: bool) -> None:
        self.calls: list[Any] = []
        inner = Of(
            segreuse_call=lambda name, *given: (
                {"limit": 4} if name == "frozen" else self.calls.append(*given)
            ),
        )
        core: Any = Of(engine_core=inner)
        if own_process:
            core = Of(call_utility=lambda method, *args: getattr(inner, method)(*args))
        self.llm_engine = Of(
            tokenizer=Words([], []), model_config=Of(get_vocab_size=lambda: 77), engine_core=core
        )

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
        self.calls.append((prompts, params.extra_args, origin.get()))
        return [Of(kv_transfer_params={"segreuse": {"frozen": True}})]


@pytest.mark.parametrize("own_process", [False, True])
def test_offline_the_same_is_asked_wherever_the_engine_is(own_process: bool) -> None:
    llm = Offline(own_process)
    engine = OfflineEngine(llm)
    assert (engine.vocab_size, engine.num_others(9)) == (77, 0)
    assert asyncio.run(engine.compute([1, 2], "key", ORDER)) is True
    assert asyncio.run(engine.frozen()) == {"limit": 4}
    asyncio.run(engine.unfreeze(["a"]))
    asked = {EXTRA_KEYS: ["key"], FREEZE: ORDER.encode()}
    assert llm.calls == [([{"prompt_token_ids": [1, 2]}], asked, Origin.OURSELVES), ["a"]]
