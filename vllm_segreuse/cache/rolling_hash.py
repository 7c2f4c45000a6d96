# SPDX-License-Identifier: Apache-2.0
"""Hashes and anchors of token windows: one pass over a prompt serves every window of a width.

The hash of `width` tokens is a polynomial over Z/2^64,

    finalize(sum_j value(t_j) * base^(width - 1 - j)),

which rolls from one window to the next in two multiplications. Token ids are small integers, so
`value` spreads them over 64 bits first, and `finalize` makes every bit of the sum count in the low
and the high bits of the result.

The *anchor* of a window is the smallest hash among its half-width sub-windows (a minimizer:
Roberts et al., Bioinformatics 2004; winnowing: Schleimer et al., SIGMOD 2003). It depends on the
window's tokens alone, yet neighbouring windows mostly share it.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from vllm_segreuse.cache.jit import kernel

TokenArray = npt.NDArray[np.int32]
HashArray = npt.NDArray[np.uint64]
AnchorArray = npt.NDArray[np.uint32]

# Drawn per process: clients know neither `base` nor `value`, and cannot prepare prompts whose
# windows collide, unless blocks are very long: Thue-Morse sequences of 1,024 tokens collide with
# every base. Nothing depends on the hash but speed (hits are verified token by token), so results
# are the same in every process.
PROCESS_SEED = np.uint64(secrets.randbits(64))

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_FIVE, _SEVEN = np.uint64(5), np.uint64(7)
_ONE, _ZERO = np.uint64(1), np.uint64(0)
_INDEX_BITS = np.uint64(22)  # more tokens than a prompt has; a longer one just wraps
_INDEX_MASK = np.uint64(2**22 - 1)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def window_hashes(tokens: TokenArray, width: int, seed: np.uint64 = PROCESS_SEED) -> HashArray:
    """Hash every window of `width` consecutive tokens.

    Args:
        tokens: int32 `[n]`.
        width: tokens per window, at least 1.
        seed: hashes made with different seeds are unrelated.

    Returns:
        uint64 `[max(0, n - width + 1)]`; entry i is the hash of `tokens[i : i + width]`.

    Raises:
        ValueError: `width` is below 1, or `tokens` is not one-dimensional.
    """
    return _window_hashes(_checked(tokens, width), width, seed)


def window_anchors(tokens: TokenArray, width: int, seed: np.uint64 = PROCESS_SEED) -> AnchorArray:
    """Place every window in a table, so that windows beside each other are looked up side by side.

    The place is the window's anchor plus the anchor's offset in the window. It is as random as a
    hash of the window between texts, but along one text it runs through about 4 * n / width short
    stretches instead of n lonely places: that many cache misses, not n, look up all windows.

    Args and errors as for `window_hashes`.

    Returns:
        uint32 `[max(0, n - width + 1)]`; every bit of it is usable.
    """
    return _window_anchors(_checked(tokens, width), width, seed)


def _checked(tokens: TokenArray, width: int) -> TokenArray:
    if width < 1 or tokens.ndim != 1:
        raise ValueError(
            f"cannot hash windows of {width} tokens over an array of shape {tokens.shape}: "
            "pass a one-dimensional array and a width of at least 1"
        )
    # One array type, one compiled kernel: a read-only or strided view would compile another.
    return np.require(tokens, np.int32, ("C", "W"))


@kernel
def _finalize(value: np.uint64) -> np.uint64:
    """splitmix64's finalizer (Steele, Lea, Flood, OOPSLA 2014): a bijection that avalanches."""
    value = (value ^ (value >> _SHIFT_1)) * _MIX_1
    value = (value ^ (value >> _SHIFT_2)) * _MIX_2
    return value ^ (value >> _SHIFT_3)


@kernel
def base_of(seed: np.uint64) -> np.uint64:
    """The base of the rolling hash, odd, by its seed.

    It is 5 modulo 8: such a number has the largest multiplicative order, 2^62.
    """
    return (_finalize(seed ^ _GOLDEN) & ~_SEVEN) | _FIVE


@kernel
def _token_value(token: np.int32, seed: np.uint64) -> np.uint64:
    return _finalize((np.uint64(np.uint32(token)) * _GOLDEN) ^ seed)


@kernel
def _window_hashes(tokens: TokenArray, width: int, seed: np.uint64) -> HashArray:
    count = tokens.size - width + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    values = np.empty(tokens.size, np.uint64)
    for i in range(tokens.size):
        values[i] = _token_value(tokens[i], seed)
    base = base_of(seed)
    leaving = _ONE  # base^width: the weight of the token that leaves, after one more step
    rolling = _ZERO
    for i in range(width):
        leaving *= base
        rolling = rolling * base + values[i]
    hashes = np.empty(count, np.uint64)
    hashes[0] = _finalize(rolling)
    for i in range(1, count):
        entering = values[i + width - 1] - values[i - 1] * leaving
        rolling = rolling * base + entering
        hashes[i] = _finalize(rolling)
    return hashes


@kernel
def _window_anchors(tokens: TokenArray, width: int, seed: np.uint64) -> AnchorArray:
    count = tokens.size - width + 1
    if count <= 0:
        return np.empty(0, np.uint32)
    half = (width + 1) // 2
    smallest = _window_hashes(tokens, half, seed)
    for i in range(smallest.size):  # the index in the low bits: a minimum knows where it was
        smallest[i] = (smallest[i] & ~_INDEX_MASK) | (np.uint64(i) & _INDEX_MASK)
    # smallest[i] becomes the minimum of `reach` hashes, reach = 1, 2, 4, ...: no branch, SIMD.
    span, reach = width - half + 1, 1
    while 2 * reach <= span:
        for i in range(smallest.size - reach):
            smallest[i] = min(smallest[i], smallest[i + reach])
        reach *= 2
    anchors = np.empty(count, np.uint32)
    for window in range(count):
        anchor = min(smallest[window], smallest[window + span - reach])
        offset = (anchor - np.uint64(window)) & _INDEX_MASK
        anchors[window] = np.uint32((anchor >> _INDEX_BITS) + offset)
    return anchors
