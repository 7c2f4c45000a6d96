# SPDX-License-Identifier: Apache-2.0
"""What passing tests show of families of models and of patches of vLLM: `docs/support.json`, by
device and version of vLLM.

A test says so by the marker `shows`: `@pytest.mark.shows("recompute")`. The family is its parameter
`shape`, that which `by=` names (or the first value of it), or `family=` of the marker. The marker
`patches` names files of `compat/` that the test runs, in a real engine or server. `--support
record` adds what a run has shown to the file; `--support check` fails if the file has anything else
for this device and version, but for what only tests show that the run leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parent.parent / "docs" / "support.json"
FEATURES = {
    "recompute": "recomputing everything equals full prefill",
    "partial": "partial reuse by the default policy",
    "window": "layers with a sliding window",
    "fp8": "quantised KV cache",
    "lora": "LoRA adapters",
    "tp": "tensor parallelism",
    "ep": "expert parallelism",
    "pp": "pipeline parallelism",
    "images": "images that were seen before",
    "drafts": "speculative decoding",
    "documents": "models trained on documents computed alone",
    "anchors": "models trained on anchors of compressed documents",
    "states": "composed states of linear attention",
}
"""What `shows` may name, and the columns of the table."""

NEEDS = {
    "fp8_cache": "vLLM keeps fp8 KV caches only on CPUs with AVX-512 or AMX",
    "amx": "vLLM has a prefix cache for latent attention (MLA) only on CPUs with AMX",
    "nixl": "NIXL is not installed: pip install --no-deps nixl nixl-cu12",
}
"""What `needs` may name: what not every machine has, and why a test is left out there."""

PATCH = "compat/"
"""What a patch's name begins with in the file, where it stands beside families."""

Shown = dict[str, dict[str, list[str]]]
"""Features by family or patch, by device and version of vLLM."""

_LEFT_OUT = "support_left_out"


def note(item: pytest.Item) -> None:
    """Keep with the test what it shows if it passes.

    Raises:
        UsageError: no such feature, or no family.
    """
    for marker in item.iter_markers("shows"):
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        family = marker.kwargs.get("family", parameters.get(marker.kwargs.get("by", "shape")))
        if isinstance(family, tuple):
            family = family[0]
        if family is None or not set(marker.args) <= FEATURES.keys():
            raise pytest.UsageError(
                f"{item.nodeid}: shows{marker.args} needs a family, and features of "
                f"{', '.join(FEATURES)}"
            )
        item.user_properties += [("shows", f"{family} {feature}") for feature in marker.args]


def note_patches(item: pytest.Item) -> None:
    """Keep with the test which patches it needs, by its module's or its own marker `patches`."""
    for marker in item.iter_markers("patches"):
        item.user_properties += [("shows", f"{PATCH}{name} runs") for name in marker.args]


def leave_out(item: pytest.Item) -> None:
    """Skip the test if this machine lacks what it needs.

    A check of the table does not miss what such a test would show.

    Raises:
        UsageError: the marker `needs` names something unknown.
    """
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            if name not in NEEDS:
                raise pytest.UsageError(
                    f"{item.nodeid}: needs({name!r}) is not one of {', '.join(NEEDS)}"
                )
            if not has(name):
                item.user_properties.append(("lacks", name))
                item.add_marker(pytest.mark.skip(reason=NEEDS[name]))


@cache
def has(name: str) -> bool:
    """Whether this machine has one of `NEEDS`, as vllm/v1/attention/backends/cpu_attn.py asks."""
    if name == "nixl":
        return find_spec("nixl") is not None
    import torch

    has_amx = bool(torch.cpu._is_amx_tile_supported())
    return has_amx or (name == "fp8_cache" and bool(torch.cpu._is_avx512_supported()))


class Recorder:
    """Collects what is shown in a run.

    Args:
        mode: `record` or `check`.
        device: `cpu` or `gpu`, and the version of vLLM.
        file: what is written or compared.
    """

    def __init__(self, mode: str, device: str, file: Path = FILE) -> None:
        self._mode = mode
        self._device = device
        self._file = file
        self._shown: set[tuple[str, str]] = set()
        self._left_out: set[tuple[str, str]] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test is over; with xdist, in any process."""
        if report.when == "call" and report.passed:
            self._shown |= _features(report)
        elif report.skipped and "lacks" in dict(report.user_properties):
            self._left_out |= _features(report)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Tests are left out: those that are slow, or not chosen by `-m` or `-k`."""
        for item in items:
            self._left_out |= _features(item)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A process of xdist has ended; it alone knows what it has left out."""
        left_out = getattr(node, "workeroutput", {}).get(_LEFT_OUT, ())
        self._left_out |= {(family, feature) for family, feature in left_out}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """All tests are over."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_LEFT_OUT] = sorted(self._left_out)
            return
        recorded: Shown = json.loads(self._file.read_text()) if self._file.is_file() else {}
        before = {(it, one) for it, all_ in recorded.get(self._device, {}).items() for one in all_}
        if self._mode == "check":
            if wrong := sorted((before ^ self._shown) - (self._left_out - self._shown)):
                print(f"\n{self._file.name} and this run differ ({self._device}): {wrong}")
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        recorded[self._device] = _by_family(before | self._shown)
        self._file.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def _features(report: pytest.TestReport | pytest.Item) -> set[tuple[str, str]]:
    pairs = (str(value).split() for name, value in report.user_properties if name == "shows")
    return {(family, feature) for family, feature in pairs}


def _by_family(shown: set[tuple[str, str]]) -> dict[str, list[str]]:
    families = sorted({family for family, _ in shown})
    return {it: [one for one in (*FEATURES, "runs") if (it, one) in shown] for it in families}
