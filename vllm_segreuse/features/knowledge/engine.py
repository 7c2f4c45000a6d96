# SPDX-License-Identifier: Apache-2.0
"""What knowledge bases need of an engine, and the engine behind vLLM's API server."""

from __future__ import annotations

import copy
import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from vllm_segreuse.engine.priorities import LAST_PRIORITY
from vllm_segreuse.features.knowledge.errors import UnavailableError
from vllm_segreuse.features.knowledge.origin import own_requests
from vllm_segreuse.features.knowledge.scheduler_calls import call_scheduler
from vllm_segreuse.options.parsing import EXTRA_KEYS, FREEZE
from vllm_segreuse.plan import FreezeOrder


class NotFrozenError(Exception):
    """What was computed is not frozen, for this reason; in words for who administers the server."""


class Answer(NamedTuple):
    """What is known of a request of our own that has ended.

    Attributes:
        report: of segment reuse.
        logprobs: log-probability of each token of its prompt, 0 for the first; None: not asked for.
    """

    report: Mapping[str, Any]
    logprobs: Sequence[float] | None = None


class Engine(Protocol):
    """An engine that runs segment reuse. `encode`, `decode` and `start_tokens` may
    block."""

    vocab_size: int

    def start_tokens(self) -> list[int]:
        """Tokens that every sequence of the model starts with."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""

    def decode(self, tokens: list[int]) -> str | None:
        """Text of tokens, special ones too; None: there is no tokenizer."""

    def fingerprint(self) -> str:
        """Differs between tokenizers."""

    def num_others(self, own: int) -> int:
        """Requests that have not ended, without `own` of our own."""

    async def compute(self, tokens: list[int], extra_key: str, order: FreezeOrder) -> bool:
        """Compute a prompt and freeze what the order says; whether that was done.

        Raises:
            NotFrozenError: it was not, for this reason.
        """

    async def answers(
        self, tokens: list[int], extra_args: Mapping[str, Any], **sampling: Any
    ) -> list[Answer]:
        """Compute a prompt as one request of one token on every engine; what each answers.

        Args:
            extra_args: of the request.
            sampling: other sampling parameters of it.
        """

    async def frozen(self) -> dict[str, Any]:
        """`SchedulerSide.frozen`."""

    async def unfreeze(self, entries: list[str]) -> None:
        """`SchedulerSide.unfreeze`."""


class Tokenizer:
    """Of a model; None where vLLM was told to load none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def start_tokens(self) -> list[int]:
        """What the tokenizer puts before every text."""
        if self._tokenizer is None:
            return []
        bare, whole = self.encode("a"), list(self._tokenizer.encode("a"))
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start]
        return []

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""
        if self._tokenizer is None:
            raise UnavailableError("this engine has no tokenizer: send token_ids", "text")
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str | None:
        """Text of tokens, special ones too, as it stands."""
        if self._tokenizer is None:
            return None
        # Those of transformers may change white space, unless they are told not to.
        options = {"skip_special_tokens": False}
        if hasattr(self._tokenizer, "clean_up_tokenization_spaces"):
            options["clean_up_tokenization_spaces"] = False
        return str(self._tokenizer.decode(tokens, **options))

    def fingerprint(self) -> str:
        """Differs between tokenizers."""
        return "" if self._tokenizer is None else repr(self.encode(_PROBE))


def unshared(tokenizer: Any) -> Any:
    """vLLM's tokenizer for another thread: a copy, unless it is safe to share.

    Each call of a fast tokenizer sets in the object how texts are truncated. vLLM's renderer for
    most models (`HfRenderer`) makes a pool of copies; others, such as `cohere`, share one object.
    """
    from transformers import TokenizersBackend
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

    is_fast = isinstance(tokenizer, TokenizersBackend)
    if is_fast and not isinstance(tokenizer, ThreadSafeHFTokenizerMixin):
        return copy.deepcopy(tokenizer)
    return tokenizer


_PROBE = "The quick brown fox: 0123456789, (naïve) café — 東京, ½ x += 1;\n\tЖ"


def fingerprint(vllm_config: Any, engine: Engine) -> str:
    """Names a model and its tokenizer, wherever its files are."""
    config = vllm_config.model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    text = repr(sorted(config.items(), key=str)) + engine.fingerprint()
    return hashlib.sha256(text.encode()).hexdigest()


def ingesting(extra_key: str, order: FreezeOrder) -> AbstractContextManager[Any]:
    """Sampling parameters of a request that freezes what it computes; valid in this context."""
    return own_parameters({EXTRA_KEYS: [extra_key], FREEZE: order.encode()})


@contextmanager
def own_parameters(extra_args: Mapping[str, Any], **sampling: Any) -> Iterator[Any]:
    """Sampling parameters of a request of ours of one token; valid in this context."""
    from vllm import SamplingParams

    with own_requests():
        yield SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            extra_args=dict(extra_args) or None,
            **sampling,
        )


def answer_of(output: Any, tokens: Sequence[int]) -> Answer:
    """What a finished request's output says."""
    report = (output.kv_transfer_params or {}).get("segreuse") or {}
    given = output.prompt_logprobs
    if given is None:
        return Answer(report)
    pairs = zip(given, tokens, strict=True)
    return Answer(report, [of[token].logprob if of else 0.0 for of, token in pairs])


def was_frozen(output: Any) -> bool:
    """Whether a finished request's output says that its order was carried out.

    Raises:
        NotFrozenError: it says why not.
    """
    return all_frozen([(output.kv_transfer_params or {}).get("segreuse") or {}])


def all_frozen(reports: Iterable[Mapping[str, Any]]) -> bool:
    """Whether reports of requests say that their orders were carried out.

    Raises:
        NotFrozenError: one says why not.
    """
    for report in reports:
        if not report.get("frozen"):
            if reason := report.get("not_frozen"):
                raise NotFrozenError(reason)
            return False
    return True


class ServedEngine(Tokenizer):
    """The engine client of an API server (vLLM's `AsyncLLM`)."""

    def __init__(self, client: Any) -> None:
        super().__init__(unshared(client.get_tokenizer()) if client.renderer.tokenizer else None)
        self._client = client
        self.vocab_size: int = client.model_config.get_vocab_size()
        policy = client.vllm_config.scheduler_config.policy
        self._priority = LAST_PRIORITY if policy == "priority" else 0

    def num_others(self, own: int) -> int:
        """Requests of this API server that have not ended."""
        return max(0, int(self._client.get_num_unfinished_requests()) - own)

    async def compute(self, tokens: list[int], extra_key: str, order: FreezeOrder) -> bool:
        """On the only engine."""
        return await self.compute_on(None, tokens, extra_key, order)

    async def compute_on(
        self, rank: int | None, tokens: list[int], extra_key: str, order: FreezeOrder
    ) -> bool:
        """One request of one token; at lowest priority where priorities count.

        Args:
            rank: of the engine, where there are several.
        """
        with ingesting(extra_key, order) as params:
            output = await self._last_output(rank, tokens, params)
        return output is not None and was_frozen(output)

    async def answers(
        self, tokens: list[int], extra_args: Mapping[str, Any], **sampling: Any
    ) -> list[Answer]:
        """Of the only engine."""
        return [await self.answer_on(None, tokens, extra_args, **sampling)]

    async def answer_on(
        self, rank: int | None, tokens: list[int], extra_args: Mapping[str, Any], **sampling: Any
    ) -> Answer:
        """As `compute_on`, of any request of ours."""
        with own_parameters(extra_args, **sampling) as params:
            output = await self._last_output(rank, tokens, params)
        return answer_of(output, tokens)

    async def _last_output(self, rank: int | None, tokens: list[int], params: Any) -> Any:
        last = None
        async for output in self._client.generate(
            {"type": "token", "prompt_token_ids": tokens},
            params,
            f"segreuse-{uuid.uuid4().hex}",
            priority=self._priority,
            data_parallel_rank=rank,
        ):
            last = output
        return last

    async def frozen(self) -> dict[str, Any]:
        """Asked between two steps."""
        return dict(await call_scheduler(self._client, "segreuse_call", "frozen"))

    async def unfreeze(self, entries: list[str]) -> None:
        """Between two steps."""
        await call_scheduler(self._client, "segreuse_call", "unfreeze", entries)
