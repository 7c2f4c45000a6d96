# SPDX-License-Identifier: Apache-2.0
"""The block `tier` of the server's options: what is refused, and what it comes to."""

from typing import Any

import pytest

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.features.tier.options import TierOptions
from vllm_segreuse.options.server import ConfigError

NUMBERS: dict[str, tuple[float, float]] = {
    "wait_ms": (0, 60_000),
    "min_run_tokens": (1, 2**31 - 1),
    "io_threads": (1, 64),
}


def tier(**options: Any) -> TierOptions:
    found = SegReuseConfig.from_options({"tier": options}).tier
    assert found is not None
    return found


def test_it_is_off_unless_there_is_a_block() -> None:
    assert SegReuseConfig().tier is None
    assert SegReuseConfig.from_options({"tier": None}).tier is None
    assert tier() == TierOptions()


@pytest.mark.parametrize("option", NUMBERS)
def test_numbers_are_taken_within_their_range_only(option: str) -> None:
    low, high = NUMBERS[option]
    for value in (low, high):
        assert getattr(tier(**{option: value}), option) == value
    for bad in (low - 1, high + 1, True, float("nan"), str(low), [low], None):
        with pytest.raises(ConfigError, match=r"^segreuse: tier"):
            tier(**{option: bad})


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (7, "tier=7 must be a mapping"),
        ({"host": 1}, "unknown option 'host'; allowed are admission, "),
        ({"host_gib": 0}, "tier.host_gib=0 must be a number above 0"),
        ({"host_gib": True}, "must be a number above 0"),
        ({"disk_gib": -1, "path": "x"}, "must be a number from 0 on"),
        ({"path": ""}, "must be a path, or null"),
        ({"path": "x"}, "needs both path and disk_gib"),
        ({"disk_gib": 1}, "needs both path and disk_gib"),
        ({"admission": "all"}, "must be evicted or knowledge"),
        ({"key_file": 1}, "must be a path, or null"),
        ({"zeroise": 1}, "must be true or false"),
    ],
)
def test_what_makes_no_sense_is_refused(block: Any, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SegReuseConfig.from_options({"tier": block})
    assert why in str(caught.value)


def test_boundary_states_are_not_stored() -> None:
    options = {"tier": {}, "similarity": {"w_exact": {2: 16}}}
    with pytest.raises(ConfigError, match="tier cannot be combined with similarity"):
        SegReuseConfig.from_options(options)
    assert SegReuseConfig.from_options({"tier": {}, "similarity": {}}).tier == TierOptions()


def test_sizes_are_gibibytes() -> None:
    options = tier(path="records", disk_gib=2)
    assert options.disk_bytes == 2**31
