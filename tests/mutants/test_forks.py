# SPDX-License-Identifier: Apache-2.0
"""What a fork says of a copy, and that the next one sees nothing of it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import copies, forking
from tests.mutants.forks import Forks, foreign_imports

CONFTEST = """
from hypothesis import settings

settings.register_profile("quick")
"""
TEST = """
from vllm_segreuse.answer import ANSWER


def test_the_answer() -> None:
    assert ANSWER == 42
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A project as small as can be."""
    root = tmp_path / "sources"
    for name, text in {
        "vllm_segreuse/__init__.py": "",
        "vllm_segreuse/answer.py": "ANSWER = 42\n",
        "tests/conftest.py": CONFTEST,
        "tests/test_answer.py": TEST,
        "haste.py": "",
        "pytest.ini": "[pytest]\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def forks(sources: Path) -> Iterator[Forks]:
    with Forks(sources) as forks:
        yield forks


def answer(root: Path, value: int) -> None:
    (root / "vllm_segreuse/answer.py").write_text(f"ANSWER = {value}\n")


@pytest.mark.slow
def test_each_fork_sees_its_own_copy_as_it_is(sources: Path, forks: Forks, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sources, copy)
    assert forks.failure(copy, seconds=1) is None
    answer(copy, 41)  # of the same length, and maybe within the same second
    assert forks.failure(copy, seconds=1) == "tests/test_answer.py::test_the_answer"
    assert forks.failure(sources, seconds=1) is None
    copies.restore(copy, sources)
    assert forks.failure(copy, seconds=1) is None


@pytest.mark.slow
def test_the_end_of_the_forks_is_no_failure(sources: Path) -> None:
    with Forks(sources) as forks:
        forks.stop()
        assert forks.failure(sources, seconds=1) is None


def test_a_process_with_our_sources_or_with_threads_is_not_forked() -> None:
    assert "loaded before the fork" in str(forking.unready(["vllm_segreuse", "pytest"]))
    program = "import threading, sys; sys.path[:0] = ['tests/mutants']; import forking\n"
    program += "assert forking.unready(['vllm_segreuse']) is None\n"
    program += "threading.Thread(target=input, daemon=True).start(); print(forking.unready([]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=copies.REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=(reading := os.pipe())[0],
        capture_output=True,
        text=True,
    )
    for end in reading:
        os.close(end)
    assert done.stdout.startswith("2 threads before the fork"), done.stderr


def test_what_the_sources_import_is_found_and_nothing_of_their_own(sources: Path) -> None:
    lazy = "def late():\n    from json.decoder import JSONDecoder, JSONDecodeError\n"
    (sources / "vllm_segreuse/answer.py").write_text(f"import re\nimport bench.rows\n{lazy}")
    assert dict(foreign_imports(sources)) == {
        "re": [],
        "json.decoder": ["JSONDecodeError", "JSONDecoder"],
        "hypothesis": ["settings"],
    }


def test_a_copy_is_restored_whatever_was_done_there(sources: Path, tmp_path: Path) -> None:
    (sources / "link").symlink_to("vllm_segreuse")
    copy = tmp_path / "copy"
    shutil.copytree(sources, copy, symlinks=True)
    before = copies.stamps(copy)
    answer(copy, 41)
    (copy / "haste.py").unlink()
    (copy / "link").unlink()
    (copy / "build").mkdir()
    (copy / "build/left.o").write_text("left")
    (copy / "tests/test_answer.py").chmod(0o600)
    copies.restore(copy, sources)
    assert copies.stamps(copy) == before
    assert (copy / "vllm_segreuse/answer.py").read_text() == "ANSWER = 42\n"
    assert (copy / "link/answer.py").is_file()
