# SPDX-License-Identifier: Apache-2.0
"""Window hashes and anchors depend on a window's tokens alone, and spread evenly."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.cache import rolling_hash
from vllm_segreuse.cache.rolling_hash import window_anchors, window_hashes

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
tokens_of_any_length = st.lists(st.integers(0, 2**31 - 1), max_size=80)


def mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def polynomial_hash(window: list[int], seed: int) -> int:
    total, base = 0, mixed(seed ^ GOLDEN) // 8 * 8 + 5
    for token in window:
        total = (total * base + mixed((token * GOLDEN & MASK) ^ seed)) & MASK
    return mixed(total)


@given(tokens_of_any_length, st.integers(1, 40), st.integers(0, MASK))
def test_rolling_equals_hashing_each_window_by_itself(tokens, width, seed):
    hashes = window_hashes(np.array(tokens, np.int32), width, np.uint64(seed))
    expected = [polynomial_hash(tokens[i : i + width], seed) for i in range(len(hashes))]
    assert hashes.tolist() == expected
    assert hashes.size == max(0, len(tokens) - width + 1)


@given(tokens_of_any_length, st.integers(1, 40))
def test_an_anchor_depends_on_its_window_alone(tokens, width):
    array = np.array(tokens, np.int32)
    anchors = window_anchors(array, width)
    assert anchors.size == max(0, len(tokens) - width + 1)
    for i, anchor in enumerate(anchors):
        assert window_anchors(array[i : i + width], width).tolist() == [anchor]


def test_anchors_run_through_few_stretches():
    tokens = np.random.default_rng(1).integers(0, 100_000, 20_000).astype(np.int32)
    anchors = window_anchors(tokens, 32).astype(np.int64)
    # A minimizer over 17 positions changes about every 9 tokens.
    assert np.count_nonzero(np.diff(anchors) != -1) < len(tokens) / 7


@pytest.mark.parametrize("bits", [slice(0, 12), slice(52, 64)])
@pytest.mark.parametrize("kind", ["counting", "two values", "random"])
def test_low_and_high_bits_are_even(bits, kind):
    rng = np.random.default_rng(2)
    tokens = {
        "counting": np.arange(40_000),
        "two values": rng.integers(0, 2, 40_000),
        "random": rng.integers(0, 150_000, 40_000),
    }[kind].astype(np.int32)
    hashes = np.unique(window_hashes(tokens, 32, np.uint64(7)))
    slots = (hashes >> np.uint64(bits.start)) & np.uint64(4095)
    counts = np.bincount(slots.astype(np.int64), minlength=4096)
    mean = len(hashes) / 4096
    chi_square = ((counts - mean) ** 2 / mean).sum()
    assert abs(chi_square - 4095) < 6 * np.sqrt(2 * 4095)


def test_one_changed_bit_changes_half_of_the_hash():
    rng = np.random.default_rng(3)
    flipped_bits = []
    for _ in range(300):
        tokens = rng.integers(0, 1000, 16).astype(np.int32)
        changed = tokens.copy()
        changed[rng.integers(16)] ^= 1 << rng.integers(10)
        difference = int(window_hashes(tokens, 16)[0] ^ window_hashes(changed, 16)[0])
        flipped_bits.append(difference.bit_count())
    assert 31 < np.mean(flipped_bits) < 33


def test_seeds_are_unrelated():
    tokens = np.arange(100, dtype=np.int32)
    one, other = (window_hashes(tokens, 8, np.uint64(seed)) for seed in (1, 2))
    assert not np.intersect1d(one, other).size


def test_seeds_have_bases_of_their_own():
    """Windows prepared for one base would collide whatever the tokens' values are."""
    bases = {int(rolling_hash.base_of(np.uint64(seed))) for seed in range(100)}
    assert len(bases) == 100
    assert {base % 8 for base in bases} == {5}


def test_no_two_processes_hash_alike():
    """Who knew the seed could prepare prompts whose windows collide."""
    script = "from vllm_segreuse.cache.rolling_hash import PROCESS_SEED; print(PROCESS_SEED)"
    seeds = [subprocess.check_output([sys.executable, "-c", script]) for _ in range(2)]
    assert len({*map(int, seeds), int(rolling_hash.PROCESS_SEED)}) == 3
    tokens = np.arange(9, dtype=np.int32)
    own = window_hashes(tokens, 4, rolling_hash.PROCESS_SEED)
    assert window_hashes(tokens, 4).tolist() == own.tolist(), "the seed is not used"


def test_read_only_and_strided_arrays_need_no_further_kernel():
    tokens = np.arange(64, dtype=np.int32)
    expected = window_hashes(tokens, 8)
    kernel = rolling_hash._window_hashes
    compiled = len(kernel.signatures)
    frozen = tokens.copy()
    frozen.setflags(write=False)
    assert np.array_equal(window_hashes(frozen, 8), expected)
    assert np.array_equal(window_hashes(np.repeat(tokens, 2)[::2], 8), expected)
    assert len(kernel.signatures) == compiled


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="windows of 0 tokens"):
        window_hashes(np.arange(4, dtype=np.int32), 0)
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        window_anchors(np.zeros((2, 2), np.int32), 2)
