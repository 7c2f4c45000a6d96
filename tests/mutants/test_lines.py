# SPDX-License-Identifier: Apache-2.0
"""A mistake is tried on the files of tests that run its line."""

from pathlib import Path

import pytest

from tests.mutants import lines
from tests.mutants.copies import MutantsError
from tests.mutants.lines import Traced

pytestmark = pytest.mark.slow

ANSWER = """
A = 1


def asked():
    return 42


def shouted():
    return "42!"
"""
ASKED = """
from answers.answer import asked


def test_it():
    assert asked() == 42
"""
SHOUTED = """
import subprocess
import sys


def test_it():
    program = "from answers.answer import shouted; print(shouted())"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "42!\\n"
"""
KILLED = """

def test_a_process_that_is_killed_leaves_no_data():
    import coverage, os, pathlib

    folder = pathlib.Path(coverage.Coverage.current().config.data_file).parent
    (folder / "data.killed.pid1.Xabcdefg").write_bytes(b"")
"""
BROKEN = ASKED.replace("== 42", "== 41")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project as small as can be, with this package's plugin."""
    for name, text in {
        "answers/__init__.py": "",
        "answers/answer.py": ANSWER,
        "tests/__init__.py": "",
        "tests/mutants/__init__.py": "",
        "tests/mutants/tracing.py": Path(lines.tracing.__file__).read_text(),
        "tests/conftest.py": "from hypothesis import settings\nsettings.register_profile('quick')",
        "tests/test_asked.py": ASKED,
        "tests/test_shouted.py": SHOUTED,
        "tests/test_broken.py": BROKEN,
        "pytest.ini": "[pytest]\nmarkers = e2e\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_lines_know_their_tests_those_of_other_processes_too(root: Path) -> None:
    (root / "tests/test_asked.py").write_text(f"{ASKED}{KILLED}")
    traced = lines.traced(root, ["answers"], 2)
    assert traced.failed == {"tests/test_broken.py": "tests/test_broken.py::test_it"}
    assert traced.seconds.keys() == {
        *("tests/test_asked.py", "tests/test_broken.py", "tests/test_shouted.py")
    }
    assert traced.tests("answers/answer.py", 6) == ["tests/test_asked.py"]
    assert traced.tests("answers/answer.py", 10) == ["tests/test_shouted.py"]
    # Whoever imports it runs its first line.
    everybody = {"tests/test_asked.py", "tests/test_shouted.py"}
    assert {*traced.tests("answers/answer.py", 2)} == everybody
    assert traced.tests("answers/other.py", 1) == []


def test_a_line_that_is_not_seen_to_run_belongs_to_all_who_run_its_file() -> None:
    seconds = {"slow": 9.0, "quick": 1.0, "broken": 0.1}
    lines_of = {"f.py": {3: {"slow"}, 9: {"quick"}}, "of_f.py": {1: {"", "other"}}}
    importers = {"f.py": {"of_f.py", "never_run.py"}}
    traced = Traced({**seconds, "other": 2.0}, {"broken": "broken::it"}, lines_of, importers)
    assert traced.tests("f.py", 3) == ["slow"]
    assert traced.tests("f.py", 5) == ["quick", "other", "slow"]
    assert traced.tests("of_f.py", 1) == ["other"]


def test_a_run_that_does_not_come_to_an_end_is_said(root: Path) -> None:
    (root / "pytest.ini").write_text("[pytest]\naddopts = --unknown\n")
    with pytest.raises(MutantsError, match=r"(?s)no test could be run: .*--unknown"):
        lines.traced(root, ["answers"], 1)
