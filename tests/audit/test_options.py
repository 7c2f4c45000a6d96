# SPDX-License-Identifier: Apache-2.0
"""The block `audit`: what is refused, and which class a namespace is of."""

from pathlib import Path
from typing import Any

import pytest

from segreuse_extras.audit.options import OTHER, AuditOptions
from vllm_segreuse.config import RequestOptions, SegReuseConfig
from vllm_segreuse.options.server import ConfigError

NUMBERS: dict[str, tuple[float, float]] = {
    "share": (0, 1),
    "per_minute": (1, 6000),
    "max_prompt_tokens": (1, 2**31 - 1),
    "tokens": (1, 64),
    "max_running": (0, 65536),
    "max_wait_s": (0, 3600),
    "log_bytes": (4096, 2**31 - 1),
    "log_files": (1, 1000),
    "min_audits": (1, 50),
    "recover_s": (0, 10**9),
}


@pytest.mark.parametrize("option", NUMBERS)
def test_numbers_are_taken_within_their_range_only(option: str) -> None:
    low, high = NUMBERS[option]
    for value in (low, high):
        config = SegReuseConfig.from_options({"audit": {option: value}})
        assert getattr(config.audit, option) == value
    for bad in (low - 1, high + 1, True, float("nan"), str(low), [low], None):
        with pytest.raises(ConfigError, match=r"^segreuse: audit"):
            SegReuseConfig.from_options({"audit": {option: bad}})


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (7, "audit=7 must be a mapping"),
        ({"shar": 1}, "unknown option 'shar'; allowed are classes, fallback, "),
        (
            {"log": "/no/such/audit.jsonl"},
            "'/no/such/audit.jsonl' must be a file in a folder that ex",
        ),
        ({"log": "/"}, "must be a file in a folder that exists"),
        ({"log_text": 1}, "audit.log_text=1 must be true or false"),
        ({"classes": ["docs"]}, "must map prefixes"),
        ({"classes": {"": "docs"}}, "must map prefixes"),
        ({"classes": {"docs": "a b"}}, "names the class 'a b'"),
        ({"classes": {"docs": 7}}, "names the class 7"),
        ({"classes": {str(i): str(i) for i in range(33)}}, "must name 32 classes at most"),
        ({"on_drift": "stop"}, "must be report or fallback"),
        ({"share": 1, "on_drift": "fallback"}, "on_drift: fallback without max_kl"),
        (
            {"share": 1, "max_kl": 0.1, "on_drift": "fallback", "recover_s": 0},
            "has on_drift: fallback and recover_s: 0, so that no request falls back",
        ),
        ({"max_kl": 0.1}, "audits nothing"),
        ({"share": 1, "max_wait_s": 0}, "has max_wait_s: 0, so that every audit is dropped"),
        ({"window": 9}, "min_audits above window"),
        ({"fallback": "none"}, "must be full, or a mapping"),
        ({"fallback": {}}, "must be full, or a mapping"),
        ({"fallback": {"policy": "none"}}, "audit.fallback: policy='none' must be one of"),
        ({"fallback": {"polcy": "focus"}}, "audit.fallback: unknown option 'polcy'"),
        ({"fallback": {"similarity": True}}, "the server has no option `similarity`"),
    ],
)
def test_what_makes_no_sense_is_refused(block: Any, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SegReuseConfig.from_options({"audit": block})
    assert why in str(caught.value)


def test_a_folder_that_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "audit.jsonl")
    assert SegReuseConfig.from_options({"audit": {"log": path}}).audit.log == path
    monkeypatch.setattr("os.access", lambda folder, mode: False)
    with pytest.raises(ConfigError, match="that this user may write"):
        SegReuseConfig.from_options({"audit": {"log": path}})


def test_the_longest_prefix_names_the_class() -> None:
    options = AuditOptions(classes={"docs": "docs", "docs/legal/": "legal", "acme": "tenants"})
    classes = {
        "docs": "docs",
        "docs/x": "docs",
        "docs/legal/x": "legal",
        "acme corp": "tenants",
        "tenant 7": OTHER,
        "\x01" + 64 * "0": OTHER,
    }
    assert {key: options.class_of((key, "docs")) for key in classes} == classes
    assert AuditOptions().class_of(("docs",)) == OTHER


def test_a_fallback_is_laid_over_a_requests_own_options() -> None:
    own = RequestOptions(policy="shift", min_reused_tokens=7, recompute_ratio=0.0)
    full = SegReuseConfig.from_options({})
    assert full.fallback_options(own) is None
    careful = SegReuseConfig.from_options(
        {"audit": {"fallback": {"policy": "focus", "recompute_ratio": 0.5}}}
    ).fallback_options(own)
    assert careful == RequestOptions(policy="focus", min_reused_tokens=7, recompute_ratio=0.5)


def test_the_block_survives_the_trip_to_the_engine() -> None:
    given = {"audit": {"share": 0.5, "classes": {"docs": "docs"}}}
    sent = SegReuseConfig.from_options(given).model_dump(exclude_unset=True)
    assert sent == given
    assert SegReuseConfig.from_options(sent).audit.share == 0.5
