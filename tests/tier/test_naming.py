# SPDX-License-Identifier: Apache-2.0
"""Keys of records: equal for equal content, in every process; of approximate KV in none."""

import hashlib

from vllm_segreuse.features.tier.naming import exact_key, record_keys

NAMES = {1: (b"hash", True), 2: (b"hash", False), 3: (b"other", True)}


def test_exact_keys_are_equal_in_every_process_with_the_model() -> None:
    one, other = record_keys(b"model", NAMES.get), record_keys(b"model", NAMES.get)
    assert one(1) == other(1)
    assert len(one(1) or b"") == 32
    assert record_keys(b"finetuned", NAMES.get)(1) != one(1)
    assert one(1) != one(3)


def test_approximate_keys_are_one_processs_own() -> None:
    one, other = record_keys(b"model", NAMES.get), record_keys(b"model", NAMES.get)
    assert one(2) == one(2)
    assert one(2) not in (one(1), other(2))


def test_a_key_is_a_digest_of_28_bytes_and_the_group() -> None:
    """As files of earlier versions have it."""
    digest = hashlib.blake2b(b"hash", digest_size=28, key=b"model").digest()
    assert record_keys(b"model", NAMES.get)(1) == exact_key(b"model", b"hash") == digest + bytes(4)


def test_a_block_without_a_name_has_no_key() -> None:
    assert record_keys(b"model", NAMES.get)(4) is None


def test_vllm_reads_one_group_from_all_keys() -> None:
    from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

    key_of = record_keys(b"model", NAMES.get)
    assert {get_offload_group_idx(OffloadKey(key_of(i) or b"")) for i in NAMES} == {0}
