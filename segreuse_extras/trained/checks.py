# SPDX-License-Identifier: Apache-2.0
"""Requests with documents, to a model that was trained on documents computed alone.

For such a request the engine has no other way: without its documents it can only end it with an
error. What rules a request out is found here, before the engine gets it: in the body, and once the
prompt is tokenised, but before an answer begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from segreuse_extras.trained.folder import layout_of, names_of
from segreuse_extras.trained.layout import Layout, LayoutError, Names, Span, blocks_needed
from vllm_segreuse.engine.kv_slots import KvSlots
from vllm_segreuse.options.parsing import DOCUMENTS as NAMED
from vllm_segreuse.options.parsing import EXTRA_KEYS, FREEZE, RequestError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

DOCUMENTS = "documents"
"""Of a request's body: vLLM passes it on to the chat template."""

NAMESPACE_KEYS = (EXTRA_KEYS, "cache_salt")
"""What no document has of its own."""

expected: ContextVar[int | None] = ContextVar("segreuse_documents", default=None)
"""Documents in the body of the request that is being handled; None: it says nothing of them."""


def check_body(body: Mapping[str, Any], model_config: ModelConfig) -> None:
    """Checks the body of a request to a model.

    Raises:
        RequestError: says which of its documents is wrong, and how.
    """
    names = names_of(model_config)
    if names is not None:
        check_documents(body, names)


_RULES: WeakKeyDictionary[Any, PromptRules | None] = WeakKeyDictionary()


def check_prompt(
    processor: Any,
    tokens: Sequence[int] | None,
    params: Any,
    unusual: str | None,
    is_apart: bool,
) -> None:
    """Checks a prompt by the layout of the model; see `PromptRules.check`.

    Args:
        processor: vLLM's input processor.
    """
    if processor not in _RULES:
        _RULES[processor] = PromptRules.of(processor.vllm_config)
    rules = _RULES[processor]
    if rules is not None:
        rules.check(tokens, params, unusual, is_apart)


def check_documents(body: Mapping[str, Any], names: Names) -> None:
    """Checks `documents` of a body, and notes how many the prompt must have.

    Raises:
        RequestError: says which of them is wrong, and how.
    """
    documents = body.get(DOCUMENTS)
    expected.set(None)
    if documents is None:
        return
    if not isinstance(documents, list):
        raise RequestError(
            DOCUMENTS,
            f"{DOCUMENTS} must be a list of objects with a text, not {type(documents).__name__}",
        )
    if len(documents) > names.max_documents:
        raise RequestError(
            DOCUMENTS,
            f"{DOCUMENTS} has {len(documents)}, and the model was trained for at most "
            f"{names.max_documents}: send fewer",
        )
    for number, document in enumerate(documents):
        _check_document(f"{DOCUMENTS}[{number}]", document, names)
    expected.set(len(documents) or None)


def _check_document(which: str, document: Any, names: Names) -> None:
    if names.anchors is not None:
        if not isinstance(document, dict) or document.keys() != {"base", "id"}:
            raise RequestError(
                DOCUMENTS,
                f"{which}: this model reads compressed documents only: add it to a knowledge base, "
                'and send {"base": "...", "id": "..."}',
            )
        return
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str) or not text:
        raise RequestError(DOCUMENTS, f'{which} has no text: send {{"text": "..."}}')
    if wrong := next((key for key in NAMESPACE_KEYS if key in document), None):
        raise RequestError(
            DOCUMENTS,
            f"{which} has {wrong}, and all documents of a request are in its namespace: set it "
            "for the request",
        )
    held = next((token for token in names.texts if token in text), None)
    if held is not None:
        raise RequestError(
            DOCUMENTS,
            f"{which}.text has {held!r}, which is a special token of documents: remove it",
        )


@dataclass(frozen=True)
class PromptRules:
    """What a tokenised prompt must be like.

    Attributes:
        layout: of the model's prompts.
        block_size: tokens per KV block.
        slots: of the KV cache that vLLM takes for a prompt.
        num_blocks: KV blocks of an engine; 0: not known here.
    """

    layout: Layout
    block_size: int
    slots: KvSlots
    num_blocks: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self | None:
        """Those of a running engine; None: an ordinary model."""
        layout = layout_of(vllm_config.model_config)
        if layout is None:
            return None
        cache = vllm_config.cache_config
        engines = vllm_config.parallel_config.data_parallel_size
        # vLLM adds up the blocks of several engines.
        blocks = cache.num_gpu_blocks if engines == 1 else 0
        return cls(layout, cache.block_size, KvSlots.of(vllm_config), blocks or 0)

    def check(
        self,
        tokens: Sequence[int] | None,
        params: Any,
        unusual: str | None = None,
        is_apart: bool = False,
    ) -> None:
        """Checks a prompt before it is submitted.

        Args:
            tokens: of the prompt; None: it consists of embeddings.
            params: vLLM's sampling parameters, or others.
            unusual: what it comes with beside text, such as images; None: nothing.
            is_apart: whether it has an adapter or a salt, and so a namespace of its own.

        Raises:
            RequestError: the engine could not answer it; says why.
        """
        extra_args = getattr(params, "extra_args", None)
        if extra_args and FREEZE in extra_args:  # a document of a knowledge base
            return
        if tokens is None:
            raise RequestError(
                "prompt_embeds",
                "prompt_embeds: this model finds documents by their tokens: send text or token ids",
            )
        try:
            spans = self.layout.spans(tokens)
        except LayoutError as error:
            raise RequestError(DOCUMENTS, f"{DOCUMENTS}: {error}") from None
        wanted = expected.get()
        if wanted is not None and len(spans) != wanted:
            raise RequestError(
                DOCUMENTS,
                f"{DOCUMENTS}: {wanted} were sent, and the prompt has {len(spans)}: this endpoint "
                "or the chat template does not put each of them into the prompt",
            )
        if spans:
            self._check_options(params, unusual)
            self._check_room(tokens, spans)
        if spans and self.layout.anchors is not None:
            _check_named(extra_args or {}, len(spans), is_apart)

    def _check_options(self, params: Any, unusual: str | None) -> None:
        if getattr(params, "prompt_logprobs", None) is not None:
            raise RequestError(
                "prompt_logprobs",
                "prompt_logprobs: documents are not computed in their places: leave it away",
            )
        if unusual is not None:
            raise RequestError(
                DOCUMENTS,
                f"{DOCUMENTS}: they are reused in a prompt of text only: send it without {unusual}",
            )
        if getattr(params, "skip_reading_prefix_cache", None):
            raise RequestError(
                DOCUMENTS,
                f"{DOCUMENTS}: they are reused from the cache, which skip_reading_prefix_cache "
                "forbids: leave that away",
            )

    def _check_room(self, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        size = self.block_size
        longest = max(stop - start for start, stop in spans)
        alone = -(-longest // size) * size + 2  # padded, the token behind, and one of output
        if alone > self.slots.max_tokens:
            raise RequestError(
                DOCUMENTS,
                f"{DOCUMENTS}: one of {longest} tokens takes {alone} where it is computed alone, "
                f"and the model {self.slots.max_tokens} at most: shorten it",
            )
        needed = blocks_needed(tokens, spans, size, self.slots.needed(len(tokens)))
        if self.num_blocks and needed > self.num_blocks - 1:  # vLLM keeps one for itself
            raise RequestError(
                DOCUMENTS,
                f"{DOCUMENTS}: with the prompt they take {needed} KV blocks at a time, and there "
                f"are {self.num_blocks - 1}: send fewer, or enlarge the KV cache",
            )


def _check_named(extra_args: Mapping[str, Any], count: int, is_apart: bool) -> None:
    """Compressed documents are named, in the namespace of their knowledge base."""
    named = extra_args.get(NAMED) or ()
    num_named = 1 if isinstance(named, str) else len(named)
    if num_named != count or not extra_args.get(EXTRA_KEYS):
        raise RequestError(
            DOCUMENTS,
            f"{DOCUMENTS}: the prompt has {count}, and the request names {num_named}: name each of "
            f"them in {NAMED}, in their order, with the {EXTRA_KEYS} of their knowledge base",
        )
    if is_apart:
        raise RequestError(
            DOCUMENTS,
            f"{DOCUMENTS}: they are in the namespace of their knowledge base, which no adapter and "
            "no cache_salt is part of: leave these away",
        )
