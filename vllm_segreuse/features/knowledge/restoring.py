# SPDX-License-Identifier: Apache-2.0
"""The catalogue of an earlier run, from its manifest, for the model and tokenizer of this one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_segreuse.features.knowledge.catalogue import Catalogue, CatalogueBase, CatalogueDocument
from vllm_segreuse.features.knowledge.chunks import Shape, shape_for
from vllm_segreuse.features.knowledge.compression import why_not_compressed
from vllm_segreuse.features.knowledge.errors import KnowledgeError
from vllm_segreuse.features.knowledge.store import BaseRecord, DocumentRecord, Manifest, Tokens

MakeContext = Callable[[BaseRecord], Tokens]
"""Tokens before every document of a base."""


def restore(
    catalogue: Catalogue, manifest: Manifest, shape: Shape, make_context: MakeContext
) -> None:
    """Fill an empty catalogue; what cannot be computed gets a fault, and the rest is as it was."""
    for found in manifest.bases:
        known = catalogue.bases.get(found.name)
        if known is None or known.record.fault:  # of two with one name, one is damaged
            catalogue.bases[found.name] = _base(found, shape, make_context)
    why_not = why_not_compressed(shape.stages)
    for record in manifest.documents:
        base = catalogue.bases[record.base]
        fault = base.record.fault or record.fault
        fault = fault or _context_fault(base, record, shape)
        if record.compression is not None:
            fault = fault or why_not
        if fault is None or record.id not in base.documents:
            catalogue.put(base, CatalogueDocument.of(record, fault))
    for name, (hits, last_used) in manifest.uses.items():
        entry = catalogue.entries.get(name)
        if entry is not None:
            entry.hits, entry.last_used = hits, last_used


def _context_fault(base: CatalogueBase, record: DocumentRecord, shape: Shape) -> str | None:
    """Whether siblings are behind the base's context, and which, is for `changes.py`."""
    begins = record.context[: len(base.context)]
    if not np.array_equal(begins, base.context):
        return "the model's first tokens, or its tokenizer, have changed: add it again"
    try:
        cut = shape_for(shape, record.compression, len(record.context))
        cut.num_chunks(len(record.context), max(1, len(record.tokens)))
    except KnowledgeError:
        return "prompts are too short now for how it was computed: add it again"
    return None


def _base(record: BaseRecord, shape: Shape, make_context: MakeContext) -> CatalogueBase:
    context = np.empty(0, np.int32)
    if record.fault is None:
        try:
            context = make_context(record)
            shape.num_chunks(len(context), 1)
        except KnowledgeError as error:
            record.fault = str(error)
    return CatalogueBase(record, context)
