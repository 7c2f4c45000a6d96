# SPDX-License-Identifier: Apache-2.0
"""What passing tests show of which family of models: `docs/support.json`, the table of models.

A test says so by the marker `shows`: `@pytest.mark.shows("recompute")`. The family is its parameter
`shape`, that which `by=` names, or `family=` of the marker. `--support record` adds what a run has
shown to the file; `--support check` is for complete runs: it fails if the file has anything else
for this device.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent / "docs" / "support.json"
FEATURES = {
    "recompute": "recomputing everything equals full prefill",
    "partial": "partial reuse by the default policy",
    "window": "layers with a sliding window",
    "fp8": "quantised KV cache",
    "lora": "LoRA adapters",
    "tp": "tensor parallelism",
    "drafts": "speculative decoding",
}
"""What `shows` may name, and the columns of the table."""

Shown = dict[str, dict[str, list[str]]]
"""Features by family, by device."""


def note(item: pytest.Item) -> None:
    """Keep with the test what it shows if it passes.

    Raises:
        UsageError: no such feature, or no family.
    """
    for marker in item.iter_markers("shows"):
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        family = marker.kwargs.get("family", parameters.get(marker.kwargs.get("by", "shape")))
        if family is None or not set(marker.args) <= FEATURES.keys():
            raise pytest.UsageError(
                f"{item.nodeid}: shows{marker.args} needs a family, and features of "
                f"{', '.join(FEATURES)}"
            )
        item.user_properties += [("shows", f"{family} {feature}") for feature in marker.args]


class Recorder:
    """Collects what is shown in a run.

    Args:
        mode: `record` or `check`.
        device: `cpu` or `gpu`.
        file: what is written or compared.
    """

    def __init__(self, mode: str, device: str, file: Path = FILE) -> None:
        self._mode = mode
        self._device = device
        self._file = file
        self._shown: set[tuple[str, str]] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test is over; with xdist, in any process."""
        if report.when == "call" and report.passed:
            for name, value in report.user_properties:
                if name == "shows":
                    family, feature = str(value).split()
                    self._shown.add((family, feature))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """All tests are over."""
        if hasattr(session.config, "workerinput"):
            return
        recorded: Shown = json.loads(self._file.read_text()) if self._file.is_file() else {}
        before = {(it, one) for it, all_ in recorded.get(self._device, {}).items() for one in all_}
        if self._mode == "check":
            if wrong := sorted(before ^ self._shown):
                print(f"\n{self._file.name} and this run differ ({self._device}): {wrong}")
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        recorded[self._device] = _by_family(before | self._shown)
        self._file.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def _by_family(shown: set[tuple[str, str]]) -> dict[str, list[str]]:
    families = sorted({family for family, _ in shown})
    return {it: [one for one in FEATURES if (it, one) in shown] for it in families}
