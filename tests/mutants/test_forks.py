# SPDX-License-Identifier: Apache-2.0
"""What a fork says of a copy, and that the next one sees nothing of it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import cached_cxx, copies, forking, lists
from tests.mutants.forks import Forks, foreign_imports
from tests.mutants.lists import Edit, Mutant, MutantsError

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


def edit(find: str, replace: str) -> Mutant:
    return Mutant((Edit("vllm_segreuse/answer.py", find, replace),), "wrong", (), "here")


@pytest.mark.slow
def test_each_fork_sees_its_own_copy_as_it_is(sources: Path, forks: Forks, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sources, copy)
    assert forks.failure(copy) is None
    edit("42", "41").apply(copy)  # of the same length, and maybe within the same second
    assert forks.failure(copy) == "tests/test_answer.py::test_the_answer"
    assert forks.failure(sources) is None
    copies.restore(copy, sources)
    assert forks.failure(copy) is None
    with pytest.raises(MutantsError, match="is not there"):
        forks.failure(copy, "tests/test_answer.py::test_a_question")


@pytest.mark.slow
def test_the_end_of_the_forks_is_no_failure(sources: Path) -> None:
    with Forks(sources) as forks:
        forks.stop()
        assert forks.failure(sources) is None


def test_a_process_with_our_sources_or_with_threads_is_not_forked() -> None:
    assert "loaded before the fork" in str(forking.unready(["vllm_segreuse", "pytest"]))
    program = "import threading, sys; sys.path[:0] = ['tests/mutants']; import forking\n"
    program += "assert forking.unready(['vllm_segreuse']) is None\n"
    program += "threading.Thread(target=input, daemon=True).start(); print(forking.unready([]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=lists.REPOSITORY,
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
    before = copies._stamps(copy)
    edit("42", "41").apply(copy)
    (copy / "haste.py").unlink()
    (copy / "link").unlink()
    (copy / "build").mkdir()
    (copy / "build/left.o").write_text("left")
    (copy / "tests/test_answer.py").chmod(0o600)
    copies.restore(copy, sources)
    assert copies._stamps(copy) == before
    assert (copy / "vllm_segreuse/answer.py").read_text() == "ANSWER = 42\n"
    assert (copy / "link/answer.py").is_file()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_what_was_compiled_is_taken_until_a_header_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX_CACHE", str(tmp_path))
    source, header, target = tmp_path / "a.cpp", tmp_path / "a.h", tmp_path / "a.o"
    source.write_text('#include "b.h"\nint answer() { return ANSWER; }\n')
    (tmp_path / "b.h").write_text('#include "a.h"\n')

    def compiled(value: str) -> bytes:
        header.write_text(f"#define ANSWER {value}\n")
        target.unlink(missing_ok=True)
        if cached_cxx.main(["-c", str(source), "-o", str(target)]):
            raise OSError("does not compile")
        return target.read_bytes()

    first = compiled("1")
    assert compiled("2") != first
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler: what is there must do
    assert compiled("1") == first
    monkeypatch.undo()
    monkeypatch.setenv("CXX_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="does not compile"):
        compiled("nothing that there is")
