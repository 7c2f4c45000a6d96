# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases without a server, for programs that use `vllm.LLM`.

    llm = LLM("MODEL", kv_transfer_config=vllm_segreuse.kv_transfer_config())
    base = KnowledgeBase(llm, "handbook")
    base.add({"a.txt": "...", "b.txt": "..."})
    llm.generate(prompt, SamplingParams(extra_args={"extra_keys": ["handbook"]}))

Everything is as on a server (`features/knowledge/service.py`), but happens within the calls;
between them nothing runs.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.launch import names_connector
from vllm_segreuse.features.knowledge.engine import (
    Answer,
    Tokenizer,
    answer_of,
    ingesting,
    own_parameters,
    was_frozen,
)
from vllm_segreuse.features.knowledge.naming import NamedDocument
from vllm_segreuse.features.knowledge.scheduler_calls import call_scheduler_of
from vllm_segreuse.features.knowledge.schemas import (
    MAX_DOCUMENTS,
    AddDocuments,
    Context,
    CreateBase,
    Document,
    DocumentText,
    NewDocument,
    Stats,
    WarmDocuments,
)
from vllm_segreuse.features.knowledge.service import KnowledgeService, start_service
from vllm_segreuse.plan import FreezeOrder

_T = TypeVar("_T")


class OfflineEngine(Tokenizer):
    """A `vllm.LLM` that runs segment reuse."""

    def __init__(self, llm: Any) -> None:
        engine = llm.llm_engine
        super().__init__(engine.tokenizer)
        self._llm = weakref.proxy(llm)
        self.vocab_size: int = engine.model_config.get_vocab_size()

    def num_others(self, own: int) -> int:
        """Nobody else can use it during a call."""
        return 0

    async def compute(self, tokens: list[int], extra_key: str, order: FreezeOrder) -> bool:
        """One request of one token."""
        with ingesting(extra_key, order) as params:
            (output,) = self._llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        return was_frozen(output)

    async def answers(
        self, tokens: list[int], extra_args: Mapping[str, Any], **sampling: Any
    ) -> list[Answer]:
        """One request of one token."""
        with own_parameters(extra_args, **sampling) as params:
            (output,) = self._llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        return [answer_of(output, tokens)]

    async def frozen(self) -> dict[str, Any]:
        """`SchedulerSide.frozen`."""
        return dict(call_scheduler_of(self._llm, "segreuse_call", "frozen"))

    async def unfreeze(self, entries: list[str]) -> None:
        """`SchedulerSide.unfreeze`."""
        call_scheduler_of(self._llm, "segreuse_call", "unfreeze", entries)


class _Offline:
    """The service of one LLM, on a loop that runs during calls only.

    The loop has a thread of its own: callers may have a running loop already, as notebooks do.
    """

    def __init__(self, llm: Any) -> None:
        vllm_config = llm.llm_engine.vllm_config
        transfer = vllm_config.kv_transfer_config
        if not names_connector(transfer):
            raise ValueError(
                "this LLM does not run segment reuse: make it with "
                "kv_transfer_config=vllm_segreuse.kv_transfer_config()"
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="segreuse-offline")
        self._loop = asyncio.new_event_loop()
        config = SegReuseConfig.from_options(transfer.kv_connector_extra_config)
        self.service: KnowledgeService = self.run(
            start_service(OfflineEngine(llm), vllm_config, config)
        )

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`, which nothing else runs beside."""
        return self._thread.submit(self._loop.run_until_complete, work).result()


_of_llm: weakref.WeakKeyDictionary[Any, _Offline] = weakref.WeakKeyDictionary()


class KnowledgeBase:
    """A knowledge base of an LLM in this process.

    With `knowledge_path` among the options of `kv_transfer_config` it is remembered; documents of
    an earlier run are cold until `warm` is called.

    Args:
        llm: a `vllm.LLM` with segment reuse.
        name: of the base; one that exists is opened.
        extra_key: requests that name it reuse the documents; the name by default.
        preamble: text before every document while it is computed.
        context: `siblings`: documents are computed behind the beginnings of two others of the base;
            `none`: alone; None: `siblings`, or as the base is that exists.
        metadata: anything that JSON can hold.

    Raises:
        ValueError: the LLM does not run segment reuse, or a value is out of range.
        KnowledgeError: the base exists with other values.
    """

    def __init__(
        self,
        llm: Any,
        name: str,
        *,
        extra_key: str | None = None,
        preamble: str | None = None,
        context: Context | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        body = CreateBase(
            name=name,
            extra_key=extra_key,
            preamble=preamble,
            context=context,
            metadata=dict(metadata or {}),
        )
        if llm not in _of_llm:
            _of_llm[llm] = _Offline(llm)
        self._offline = _of_llm[llm]
        self._service = self._offline.service
        self.name = name
        self.extra_key = self._run(self._service.create_base(body))[0].extra_key

    def add(
        self, documents: Mapping[str, str | Sequence[int]] | Sequence[NewDocument]
    ) -> list[Document]:
        """Compute documents and keep them in memory; equal ones stay as they are.

        Others of the base are computed again if their context changes. More than 1,000 documents
        are added in batches of so many, each as a whole or not at all.

        Args:
            documents: text or token ids by id.

        Raises:
            ValueError: an id, a text or a token is out of range.
            KnowledgeError: a batch does not fit into the share of knowledge bases; those before it
                were added.
        """
        if isinstance(documents, Mapping):
            documents = [_document(i, content) for i, content in documents.items()]
        added: list[Document] = []
        for first in range(0, len(documents), MAX_DOCUMENTS):
            batch = list(documents[first : first + MAX_DOCUMENTS])
            body = AddDocuments(documents=batch, wait=True)
            added += self._run(self._service.add(self.name, body))
        self._run(self._service.finish())
        return added

    def warm(self, ids: Sequence[str] | None = None) -> list[Document]:
        """Bring documents back to memory, by default all."""
        body = WarmDocuments(ids=None if ids is None else list(ids), wait=True)
        return self._run(self._service.warm(self.name, body))

    def documents(self) -> list[Document]:
        """All documents, by id."""
        found: list[Document] = []
        after: str | None = None
        while True:
            page = self._run(self._service.documents(self.name, after, MAX_DOCUMENTS))
            found += page.data
            after = page.next
            if after is None:
                return found

    def text(self, document_id: str) -> DocumentText:
        """What was made of a document: prompts that contain it reuse it.

        Raises:
            KnowledgeError: there is none of this id, or it cannot be read.
        """
        return self._run(self._service.text(self.name, document_id))

    def named(self, document_id: str) -> NamedDocument:
        """A compressed document: its `tokens` stand in a prompt of token ids, whose request has its
        `entry` among the `segreuse_documents` of its `extra_args`.

        Raises:
            KnowledgeError: there is none of this id, or it is not compressed.
        """
        name = f"{self.name}/{document_id}"
        return self._run(self._service.named([name], [self.extra_key]))[0]

    def remove(self, *ids: str) -> None:
        """Forget documents; those that were removed already are no error."""
        for document_id in ids:
            self._run(self._service.delete(self.name, document_id))
        self._run(self._service.finish())

    def delete(self) -> None:
        """Forget the base and its documents."""
        self._run(self._service.delete_base(self.name))

    def stats(self) -> Stats:
        """All bases of this LLM together."""
        return self._run(self._service.stats())

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        async def whole() -> _T:
            result = await work
            await self._service.save_uses()
            return result

        return self._offline.run(whole())


def _document(document_id: str, content: str | Sequence[int]) -> NewDocument:
    if isinstance(content, str):
        return NewDocument(id=document_id, text=content)
    return NewDocument(id=document_id, token_ids=list(content))
