# SPDX-License-Identifier: Apache-2.0
"""What a manifest that was read becomes in the catalogue, whole or damaged."""

from itertools import permutations

import numpy as np
import pytest

from vllm_segreuse.features.knowledge.catalogue import Catalogue
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.restoring import restore
from vllm_segreuse.features.knowledge.store import BaseRecord, DocumentRecord, Manifest

SHAPE = Shape(block_size=4, max_prompt_tokens=63, chunk_tokens=20)
NOTHING = np.empty(0, np.int32)


def document(entry: str, fault: str | None = None) -> DocumentRecord:
    tokens = np.arange(8, dtype=np.int32)
    return DocumentRecord("base", "one", NOTHING, tokens, {}, entry, fault)


def restored(*documents: DocumentRecord, bases: tuple[BaseRecord, ...] = ()) -> Catalogue:
    catalogue = Catalogue(SHAPE)
    base = BaseRecord("base", "key", None, {}, 0.0)
    manifest = Manifest([*bases] or [base], iter(documents), {"kept": (3, 5.0), "gone": (1, None)})
    restore(catalogue, manifest, SHAPE, lambda _: NOTHING)
    return catalogue


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_documents_with_one_id_the_sound_one_stays(order: tuple[int, int]) -> None:
    both = document("kept"), document("lost", "torn")
    catalogue = restored(*(both[i] for i in order))
    [found] = catalogue.base("base").documents.values()
    assert (found.entry, found.fault) == ("kept", None)


def test_a_damaged_document_stays_with_its_fault() -> None:
    [found] = restored(document("lost", "torn")).base("base").documents.values()
    assert found.fault == "torn"


def test_of_two_bases_with_one_name_the_sound_one_stays() -> None:
    sound = BaseRecord("base", "key", None, {}, 0.0)
    torn = BaseRecord("base", "other", None, {}, 0.0, fault="torn")
    for bases in permutations((sound, torn)):
        catalogue = restored(document("kept"), bases=bases)
        assert catalogue.base("base").record.extra_key == "key"


def test_uses_are_those_of_entries_that_are_there() -> None:
    catalogue = restored(document("kept"))
    assert (catalogue.entries["kept"].hits, catalogue.entries["kept"].last_used) == (3, 5.0)
    assert "gone" not in catalogue.entries
