# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as a person reads it, line for line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from segreuse_tools.doctor.composed import ComposedStates
from segreuse_tools.doctor.diagnosis import Diagnosis
from segreuse_tools.doctor.diagnosis_text import as_text
from segreuse_tools.doctor.memory_use import Memory
from segreuse_tools.doctor.trained_documents import TrainedDocuments
from segreuse_tools.doctor.windowed_kv import WindowedKv

MEMORY = Memory(
    weight_bytes=16 * 2**30 + 2**29,
    kv_bytes_per_token=144 * 2**10,
    kv_bytes_per_document=1023,
    kv_bytes_per_longest_prompt=2**40,
    documents_per_gib=1007,
    tokens_per_gib=7264,
    index_bytes_per_block=1024,
    index_bytes_per_gib=99 * 2**20 + 2**19,
    pass_bytes=100 * 2**20,
)
DIAGNOSIS = Diagnosis(
    works=True,
    architectures=("AForCausalLM", "BForCausalLM"),
    reasons=(),
    notes=("one thing", "another"),
    versions={"vllm": "1.2", "vllm_segreuse": "3.4"},
    machine={"device": "cpu", "name": "8 cores", "memory_bytes": 64 * 2**30},
    model={
        "layers": 36,
        "attention_heads": 32,
        "kv_heads": 8,
        "head_size": 128,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "max_model_len": 40960,
        "block_size": 16,
        "tensor_parallel_size": 1,
    },
    policy={"name": "epic", "recompute_ratio": 0.25, "max_drift": None, "enabled": True},
    backend="CPU_ATTN",
    kernels="some kernels",
    memory=MEMORY,
)
TEXT = """\
AForCausalLM, BForCausalLM: works with segment reuse
  versions  vLLM 1.2, vllm-segreuse 3.4
  machine   cpu, 8 cores, 64.0 GiB
  model     36 layers, 32 heads and 8 KV heads of 128 channels, bfloat16, prompts up to 40,960 \
tokens, KV blocks of 16
  attention CPU_ATTN
  kernels   some kernels
  policy    epic, 25% of the reused tokens recomputed
  weights   16.5 GiB on each device
  KV        144 KiB per token, 1,023 bytes per document of 1,000 tokens, 1,024 GiB per prompt of \
maximum length; a GiB holds 1,007 such documents (7,264 tokens)
  tables    1.0 KiB per KV block, 99.5 MiB per GiB of KV cache; a pass holds up to 100 MiB
  note      one thing
  note      another
Start-up proves page layout, rotations and the pass on the loaded weights."""


def test_a_model_that_works() -> None:
    assert as_text(DIAGNOSIS) == TEXT


def test_a_refused_model_has_reasons_and_what_is_known() -> None:
    refused = replace(
        DIAGNOSIS,
        works=False,
        architectures=("AForCausalLM",),
        reasons=("this", "that"),
        notes=(),
        model=None,
        policy=DIAGNOSIS.policy | {"recompute_ratio": None, "enabled": False},
        backend=None,
        kernels=None,
        memory=None,
    )
    assert as_text(refused) == (
        "AForCausalLM: refused\n"
        "  - this\n"
        "  - that\n"
        "  versions  vLLM 1.2, vllm-segreuse 3.4\n"
        "  machine   cpu, 8 cores, 64.0 GiB\n"
        "  policy    epic, the policy's own share of the reused tokens recomputed; starts with "
        "enabled: False"
    )


DOCUMENTS = TrainedDocuments(2, 2, ("<s>", "<e>", "<l11>", "<l12>", "<l21>", "<l22>"), None, None)


@pytest.mark.parametrize(
    ("documents", "text"),
    [
        (
            DOCUMENTS,
            "at most 2 in a prompt, each computed alone between <s> and <e>, with 2 link tokens "
            "behind it, <l11> to <l22>",
        ),
        (
            replace(DOCUMENTS, link_tokens=0, tokens=("<s>", "<e>"), tokenizer="no tokenizer"),
            "at most 2 in a prompt, each computed alone between <s> and <e>, with 0 link tokens "
            "behind it; no tokenizer: start-up checks it",
        ),
        (
            replace(
                DOCUMENTS,
                link_tokens=1,
                tokens=("<s>", "<e>", "<l1>", "<l2>", "<a1>", "<a2>"),
                anchors={"chunk_tokens": 16, "anchor_tokens": 8},
            ),
            "at most 2 in a prompt, each computed alone between <s> and <e>, with 1 link tokens "
            "behind it, <l1> to <l2>; 8 anchors stand for 16 tokens of its text",
        ),
    ],
    ids=["links", "no links", "anchors"],
)
def test_documents_that_a_model_was_trained_for(documents: TrainedDocuments, text: str) -> None:
    lines = as_text(replace(DIAGNOSIS, documents=documents)).splitlines()
    assert lines[6:8] == [f"  documents {text}", "  policy    epic, no reused token is recomputed"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1.0 KiB"), (1024 * 100 - 52, "99.9 KiB")),
        *((1024 * 100, "100 KiB"), (1024**2 - 1, "1,024 KiB"), (1024**2, "1.0 MiB")),
        *((1024**3, "1.0 GiB"), (1024**4 * 3, "3,072 GiB")),
    ],
)
def test_bytes_have_the_largest_unit_below_them(count: int, text: str) -> None:
    machine = DIAGNOSIS.machine | {"memory_bytes": count}
    line = as_text(replace(DIAGNOSIS, machine=machine)).splitlines()[2]
    assert line == f"  machine   cpu, 8 cores, {text}"


WINDOWS = WindowedKv(12, 24, 1024, 32768, 3 * 2**30, 2**30, keeps_windows=False)


@pytest.mark.parametrize(
    ("keeps", "text"),
    [
        (
            False,
            "3.0 GiB while it is answered, as all of their blocks are kept: 3.0 times the 1.0 GiB "
            "that it holds with --no-disable-hybrid-kv-cache-manager",
        ),
        (True, "1.0 GiB while it is answered, 3.0 GiB if all of their blocks were kept"),
    ],
)
def test_a_model_with_windows(keeps: bool, text: str) -> None:
    told = as_text(replace(DIAGNOSIS, windows=replace(WINDOWS, keeps_windows=keeps)))
    assert (
        "  windows   12 of 24 layers attend to 1,024 tokens at most; a prompt of 32,768 tokens "
        f"holds {text}\n" in told
    )


def test_a_model_whose_states_are_composed() -> None:
    states = ComposedStates(36, 29037312, 36, ("nothing is known of this",))
    assert (
        "  states    36 layers hand one on; what a segment changes of it takes 27.7 MiB, and "
        "state_bytes holds 36 of these; nothing is known of this\n"
    ) in as_text(replace(DIAGNOSIS, states=states))
