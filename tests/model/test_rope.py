# SPDX-License-Identifier: Apache-2.0
"""Moving a key agrees with rotating it anew, for every kind of rotary embedding vLLM has."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from vllm_segreuse.model.rope import DeltaRope, RopeError, derive

HEAD_SIZE, HEADS, LIMIT, BLOCK = 64, 2, 16384, 32

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "large base": {"rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LIMIT // 4},
    "deepseek yarn": {
        "rope_type": "deepseek_yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": LIMIT // 4,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "partial": {"partial_rotary_factor": 0.5},
    "partial yarn": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": LIMIT // 2,
        "partial_rotary_factor": 0.25,
    },
}
SHIFTS = [0, 1, -1, BLOCK - 1, BLOCK, BLOCK + 1, -BLOCK, 4097, LIMIT - 1, 1 - LIMIT]

pytestmark = pytest.mark.usefixtures("_vllm_config")


@pytest.fixture
def _vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


class Angles(TorchFunctionMode):
    """Cosines and sines are not taken: a table of them is one of angles."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cos, torch.Tensor.sin):
            return args[0]
        return func(*args, **(kwargs or {}))


def make(kind: dict[str, Any], neox: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    return get_rope(HEAD_SIZE, LIMIT, neox, kind, dtype)


def table_of(rotary: Any) -> torch.Tensor:
    """vLLM's cosines and sines of each position, float32 `[positions, rotary_dim]`."""
    return rotary._compute_cos_sin_cache()


def with_table(rotary: Any, table: torch.Tensor) -> Any:
    """The same module, made with another table."""
    rotary._compute_cos_sin_cache = lambda: table
    return rotary


def rotated(rotary: Any, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys `[tokens, heads, size]` as the model caches them, with its angles in float64."""
    magnitude = getattr(rotary, "mscale", 1.0)  # YaRN's
    unscaled = copy.copy(rotary)
    unscaled.mscale = 1.0
    with Angles():
        frequencies = table_of(unscaled)[1].double().chunk(2)[0]
    angles = positions.double()[:, None] * frequencies
    out, half = keys.double(), rotary.rotary_dim // 2
    for i in range(half):
        a, b = (i, i + half) if rotary.is_neox_style else (2 * i, 2 * i + 1)
        c, s = angles[:, i : i + 1].cos() * magnitude, angles[:, i : i + 1].sin() * magnitude
        out[..., a], out[..., b] = (
            keys[..., a] * c - keys[..., b] * s,
            keys[..., b] * c + keys[..., a] * s,
        )
    return out


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("neox", [True, False], ids=["halves", "interleaved"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_key_is_the_key_rotated_there(kind: str, neox: bool, shift: int) -> None:
    rotary = make(KINDS[kind], neox)
    rope = derive(rotary, "layer")
    old = torch.tensor([max(0, -shift), LIMIT - 1 - max(0, shift)])
    keys = torch.randn(len(old), HEADS, HEAD_SIZE)
    moved = rope.rotate(rotated(rotary, keys, old).float(), torch.full((2,), shift))
    expected = rotated(rotary, keys, old + shift)
    torch.testing.assert_close(moved.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("neox", [True, False], ids=["halves", "interleaved"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_vllms_own_rotation(kind: str, neox: bool) -> None:
    """Whose angles are rounded to float32: loosely at large positions."""
    rotary = make(KINDS[kind], neox)
    rope = derive(rotary, "layer")
    old = torch.tensor([0, 1, 5, 300, 31, 32, 33, 2000])
    new = torch.tensor([7, 0, 5, 299, 332, 0, 1999, 3])
    keys = torch.randn(len(old), HEADS, HEAD_SIZE)
    at_old, at_new = (
        rotary.forward_native(where, keys.clone(), keys.clone())[1] for where in (old, new)
    )
    moved = rope.rotate(at_old, new - old)
    torch.testing.assert_close(moved, at_new, atol=2e-3, rtol=0)
    assert (at_old - at_new)[old != new].abs().max() > 0.5  # else nothing was to be moved


FACTORS = {
    "short": [1.0 + i / 100 for i in range(HEAD_SIZE // 2)],
    "long": [1.0 + i / 2 for i in range(HEAD_SIZE // 2)],
}


@pytest.mark.parametrize("length", FACTORS)
def test_long_rope_turns_by_the_factors_that_the_longest_prompt_asks_for(
    length: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which vLLM decides once, when the model is loaded."""
    from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as vllms

    longest = 4096 if length == "short" else 4097
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=longest))
    monkeypatch.setattr(vllms, "get_current_vllm_config", lambda: config)
    rotary = vllms.Phi3LongRoPEScaledRotaryEmbedding(
        *(HEAD_SIZE, HEAD_SIZE, LIMIT, 4096, 10000.0, True, torch.bfloat16),
        short_factor=FACTORS["short"],
        long_factor=FACTORS["long"],
    )
    rope = derive(rotary, "layer")
    expected = [
        1 / (factor * 10000.0 ** (2 * i / HEAD_SIZE)) for i, factor in enumerate(FACTORS[length])
    ]
    torch.testing.assert_close(
        rope.frequencies, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0
    )
    keys, old, new = torch.randn(3, HEADS * HEAD_SIZE), torch.tensor([0, 7, 900]), torch.tensor([5])
    at_old, at_new = (
        rotary(where, keys, keys)[1].view(-1, HEADS, HEAD_SIZE) for where in (old, new.expand(3))
    )
    moved = rope.rotate(at_old, new - old)
    torch.testing.assert_close(moved, at_new, atol=0.1, rtol=0)  # its table is in bfloat16
    assert (at_old - at_new).abs().max() > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["default", "yarn", "partial"])
def test_a_key_that_stays_is_bit_identical(kind: str, dtype: torch.dtype) -> None:
    rope = derive(make(KINDS[kind]), "layer")
    keys = torch.randn(50, HEADS, HEAD_SIZE).to(dtype)
    deltas = torch.zeros(50, dtype=torch.int64)
    assert torch.equal(rope.rotate(keys, deltas), keys)


def test_channels_that_carry_no_position_pass_through() -> None:
    rope = derive(make(KINDS["partial"]), "layer")
    assert rope.rotary_dim == HEAD_SIZE // 2
    keys = torch.randn(9, HEADS, HEAD_SIZE).to(torch.bfloat16)
    moved = rope.rotate(keys, torch.arange(100, 109))
    assert torch.equal(moved[..., 32:], keys[..., 32:])
    assert not torch.equal(moved[..., :32], keys[..., :32])


def test_each_token_is_moved_by_its_own_distance() -> None:
    rope = derive(make({}), "layer")
    keys = torch.randn(6, HEADS, HEAD_SIZE)
    deltas = torch.tensor([5, -3, 5, 0, 9000, -3])
    together = rope.rotate(keys, deltas)
    for i in range(6):
        alone = rope.rotate(keys[i : i + 1], deltas[i : i + 1])
        assert torch.equal(together[i : i + 1], alone)


def test_a_rotation_does_not_change_magnitudes() -> None:
    """YaRN's scale is in the cached key already."""
    rope = derive(make(KINDS["yarn"]), "layer")
    cos, sin = rope.tables(torch.tensor([1, -77, 12345]))
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))


def test_tables_are_shared_by_equal_rotations_only() -> None:
    one = derive(make({}), "layer")
    assert one.same_as(derive(make({}, dtype=torch.bfloat16), "other layer"))
    for other in (make(KINDS["linear"]), make({}, neox=False), make(KINDS["partial"])):
        assert not one.same_as(derive(other, "other layer"))
    assert not one.same_as(DeltaRope(one.frequencies * 1.0000001, one.rotary_dim, one.neox))


def positions_squared() -> Any:
    rotary = make({"rope_theta": 5000})
    return with_table(rotary, table_of(rotary)[torch.arange(LIMIT) ** 2 % LIMIT])


def larger_behind_the_middle() -> Any:
    """As attention that is scaled by the length of the prompt."""
    rotary = make({"rope_theta": 7000})
    scale = torch.where(torch.arange(LIMIT) < LIMIT // 2, 1.0, 1.05)
    return with_table(rotary, table_of(rotary) * scale[:, None])


def table_of_another_width() -> Any:
    rotary = make({"rope_theta": 6000})
    return with_table(rotary, table_of(rotary)[:, :-2])


@pytest.mark.parametrize(
    ("rotary", "why"),
    [
        (positions_squared, "is not a rotation by the position difference"),
        (larger_behind_the_middle, "is not a rotation by the position difference"),
        (table_of_another_width, "angles for 64 channels"),
        (torch.nn.Identity, "gives no table of angles"),
    ],
)
def test_what_is_no_rotation_by_the_distance_is_refused(rotary: Any, why: str) -> None:
    with pytest.raises(RopeError, match=why) as refusal:
        derive(rotary(), "model.layers.3")
    assert str(refusal.value).startswith("model.layers.3: ")
