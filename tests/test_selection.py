# SPDX-License-Identifier: Apache-2.0
"""What is left out of a push says what runs there in its place, and that does run."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import selection

TESTS = Path(__file__).parent
ENGINES = TESTS / "e2e"


def item(module: str, *marks: Any) -> Any:
    """A test of this module, with its own marks and its module's."""
    found = [it.mark for it in marks]
    return SimpleNamespace(
        path=TESTS / f"{module}.py",
        nodeid=f"tests/{module}.py::test",
        iter_markers=lambda name: [it for it in found if it.name == name],
        get_closest_marker=lambda name: next((it for it in found if it.name == name), None),
    )


def slow(*why: Any, **named: Any) -> Any:
    return pytest.mark.slow(*why, **named)


RANKS = slow("two ranks", instead="e2e/test_tier test_selection")


def test_modules_that_run_at_a_push_may_stand_in() -> None:
    left_out = item("e2e/test_tier_ranks", RANKS)
    selection.check([left_out, item("e2e/test_tier"), item("test_selection")], ENGINES)
    # A part of a module may be left out; what was not collected has to be a file.
    long = item("e2e/test_tier", slow("400 requests", instead="e2e/test_tier"))
    selection.check([long, item("e2e/test_tier")], ENGINES)
    selection.check([left_out], ENGINES)


def test_a_module_that_runs_at_no_push_may_not() -> None:
    left_out = item("e2e/test_tier_ranks", RANKS)
    other = item("e2e/test_tier", slow("long", instead="e2e/test_tier_exact"))
    with pytest.raises(pytest.UsageError, match=r"test_tier_ranks.*tests/e2e/test_tier\.py is to"):
        selection.check([left_out, other], ENGINES)
    alone = item("e2e/test_tier", slow("long", instead="e2e/test_tier"))
    with pytest.raises(pytest.UsageError, match="has no test that does"):
        selection.check([alone], ENGINES)


def test_every_mark_of_a_test_counts() -> None:
    """One of its module, and one of its own."""
    own = slow("long", instead="e2e/test_gone")
    with pytest.raises(pytest.UsageError, match=r"no tests/e2e/test_gone\.py"):
        selection.check([item("e2e/test_tier_ranks", RANKS, own)], ENGINES)


@pytest.mark.parametrize(
    "mark",
    [
        pytest.mark.slow,
        slow("two ranks"),
        slow(instead="e2e/test_tier"),
        slow("", instead="e2e/test_tier"),
        slow("two\nranks", instead="e2e/test_tier"),
        slow("two ranks", instead=" "),
        slow("two ranks", instead=("e2e/test_tier",)),
        slow("two ranks", "e2e/test_tier"),
        slow("two ranks", instead="e2e/test_tier", reason="two ranks"),
    ],
)
def test_a_mark_of_another_form_is_refused(mark: Any) -> None:
    with pytest.raises(pytest.UsageError, match="left out of every push; say why: "):
        selection.check([item("e2e/test_tier_ranks", mark)], ENGINES)


def test_tests_without_an_engine_need_no_reason() -> None:
    selection.check([item("kernels/test_cuda_align", pytest.mark.slow)], ENGINES)


@pytest.mark.slow  # a push collects the folder, and fails if one is not
def test_all_tests_with_engines_are_marked_so() -> None:
    """Of the whole folder, so that no module is taken to run at a push only since it is there."""
    command = [sys.executable, "-m", "pytest", str(ENGINES), "--collect-only", "-q", "-n", "0"]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "e2e/test_requests.py" in ran.stdout
    assert "e2e/test_tier_ranks.py" not in ran.stdout
