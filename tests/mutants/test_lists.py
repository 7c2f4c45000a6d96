# SPDX-License-Identifier: Apache-2.0
"""The lists of mutants fit the sources, and leave no module out."""

import json
from pathlib import Path

import pytest

from tests.mutants import lists
from tests.mutants.lists import Mutant

# Not among the quick tests: with it, these would notice any change of a listed line, which says
# nothing about what the code does.
BESIDES = pytest.mark.slow

LISTED = [*lists.load_all(), *lists.load(lists.EQUAL)]


@BESIDES
@pytest.mark.parametrize("mutant", LISTED, ids=lambda mutant: f"{mutant.origin}: {mutant.why[:40]}")
def test_a_mutant_fits_the_sources_and_names_tests_that_are_there(mutant: Mutant) -> None:
    assert mutant.misfit(lists.REPOSITORY) is None
    assert all(edit.find != edit.replace for edit in mutant.edits)
    files = [test.partition("::")[0] for test in mutant.tests]
    assert [file for file in files if not (lists.REPOSITORY / file).is_file()] == []


@BESIDES
def test_every_long_module_and_every_native_kernel_has_three() -> None:
    assert lists.with_too_few(LISTED) == []


def test_what_has_too_few_is_told() -> None:
    some = lists.modules()[0]
    assert some in lists.with_too_few([mutant for mutant in LISTED if some not in mutant.files])
    assert "kernels/cpu/align.cpp" in lists.modules()
    assert "vllm_segreuse/kernels/dispatch.py" in lists.modules()
    assert "vllm_segreuse/cache/jit.py" not in lists.modules()


@pytest.mark.parametrize("text", ["", "{}", '[{"file": "a", "find": "b"}]', "[1]"])
def test_what_is_no_list_is_refused_by_name(tmp_path: Path, text: str) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(text)
    if text == "{}":
        assert lists.load(broken) == []
        return
    with pytest.raises(lists.MutantsError, match=r"broken\.json is no list of mutants"):
        lists.load(broken)


def test_a_mutant_from_elsewhere_gets_the_tests_that_a_list_names(tmp_path: Path) -> None:
    known = lists.load_all()[0]
    (edit,) = known.edits
    entry = {"file": edit.file, "find": edit.find, "replace": edit.replace, "why": "the same"}
    other = tmp_path / "other.json"
    other.write_text(json.dumps([entry]))
    (found,) = (mutant for mutant in lists.load_all([other]) if mutant.edits == known.edits)
    assert (found.origin, found.tests) == ("other", known.tests)
