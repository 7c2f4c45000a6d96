# SPDX-License-Identifier: Apache-2.0
"""`scripts/setup_env.sh`: what it does anew when interpreter, folder or requirements have changed.

Interpreters are shell scripts that note what they are asked: nothing is installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SCRIPT = "scripts/setup_env.sh"
INTERPRETER = """\
#!/usr/bin/env bash
case "$*" in
    -VV) echo "Python VERSION" ;;
    "-m venv"*)
        echo venv >>"$NOTES"
        [ "$3" != --clear ] || find "${@: -1}/" -mindepth 1 -delete 2>/dev/null
        mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"
        echo "#!$(pwd)/${@: -1}/bin/python" >"${@: -1}/bin/pip" ;;
    "-m pip"*)
        echo pip >>"$NOTES"
        [ ! -f "${@: -1}" ] || cat "${@: -1}" >>"$NOTES.packages"
        [[ "$*" != *${PIP_FAILS_AT:-nowhere} ]] ;;
    *importlib.metadata*) exit 1 ;;
    "-c import "*vllm*)
        [[ "$*" != *"${IMPORT_FAILS_OF:-nowhere}"* ]] || { echo "no such module"; exit 1; } ;;
    *) exec PYTHON "$@" ;;
esac
"""
UPDATE = ["pip"] * 3  # two halves of the packages, and ours
NO_IMPORT = "setup: the environment does not import: no such module (see"
NEW = ["venv", *UPDATE]


class Checkout:
    """A folder with what the script reads, and two interpreters beside it."""

    def __init__(self, folder: Path) -> None:
        self.beside = folder
        self.root = folder / "here"
        for name in (SCRIPT, "requirements/cpu.txt", "pyproject.toml", "setup.py"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, self.root / name)
        for name in ("csrc/a/b.cpp", "kernels/a/b.cpp"):
            (self.root / name).parent.mkdir(parents=True)
            (self.root / name).write_text("")
        for version in ("3.11", "3.12"):
            told = INTERPRETER.replace("VERSION", version).replace("PYTHON", sys.executable)
            (folder / version).write_text(told)
            (folder / version).chmod(0o755)

    def run(self, version: str = "3.11", **environment: str) -> subprocess.CompletedProcess[str]:
        notes = self.beside / "notes"
        notes.write_text("")
        own = {"NOTES": str(notes), "TMPDIR": str(self.beside)}
        return subprocess.run(
            ["bash", self.root / SCRIPT, self.beside / version],
            env=os.environ | own | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def done(self, version: str = "3.11") -> list[str]:
        """What of `venv` and `pip` was called."""
        found = self.run(version)
        assert found.returncode == 0, found.stderr
        return (self.beside / "notes").read_text().split()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    assert made.done() == NEW
    return made


def test_nothing_is_done_where_nothing_has_changed(checkout: Checkout) -> None:
    assert checkout.done() == []


def test_other_requirements_are_installed_into_the_environment_as_it_is(checkout: Checkout) -> None:
    with (checkout.root / "requirements/cpu.txt").open("a") as file:
        file.write("new==1\n")
    assert checkout.done() == UPDATE
    assert checkout.done() == []


def test_another_interpreter_gets_an_environment_of_its_own(checkout: Checkout) -> None:
    former = checkout.root / ".venv/a package"
    former.touch()
    assert checkout.done("3.12") == NEW
    assert checkout.done("3.12") == []
    assert not former.exists()
    made = subprocess.check_output([checkout.root / ".venv/bin/python", "-VV"], text=True)
    assert made == "Python 3.12\n"


def test_a_moved_checkout_gets_scripts_that_name_its_folder(checkout: Checkout) -> None:
    moved = checkout.beside / "there"
    checkout.root = checkout.root.rename(moved)
    assert checkout.done() == NEW
    assert (moved / ".venv/bin/pip").read_text() == f"#!{moved}/.venv/bin/python\n"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("PIP_FAILS_AT=half0.txt", "setup: pip failed"),
        ("PIP_FAILS_AT=half1.txt", "setup: pip failed"),
        ("PIP_FAILS_AT=--editable .", "setup: pip failed"),
        ("IMPORT_FAILS_OF=torch", NO_IMPORT),
        ("IMPORT_FAILS_OF=vllm_segreuse", NO_IMPORT),
    ],
)
def test_what_failed_is_told_and_goes_on_where_it_was(
    tmp_path: Path, fault: str, told: str
) -> None:
    checkout, (variable, where) = Checkout(tmp_path), fault.split("=")
    failed = checkout.run(**{variable: where})
    assert failed.returncode == 1
    assert told in failed.stderr
    assert checkout.done() == UPDATE


def test_the_halves_have_every_package_once(checkout: Checkout) -> None:
    installed = (checkout.beside / "notes.packages").read_text().split("\n")
    wanted = (checkout.root / "requirements/cpu.txt").read_text().split("\n")
    assert sorted(filter(None, installed)) == sorted(line for line in wanted if "==" in line)


@pytest.mark.parametrize("moved", [False, True])
def test_an_environment_from_before_this_stamp_is_known_by_its_scripts(
    checkout: Checkout, moved: bool
) -> None:
    for name in ("origin", "setup"):
        (checkout.root / f".venv/.segreuse-{name}").unlink()
    if moved:
        checkout.root = checkout.root.rename(checkout.beside / "there")
    assert checkout.done() == (NEW if moved else UPDATE)
    (checkout.root / ".venv/bin/pip").unlink()
    (checkout.root / ".venv/.segreuse-setup").unlink()
    assert checkout.done() == UPDATE, "and then has the stamp"


def test_another_checkouts_environment_is_not_cleared(checkout: Checkout) -> None:
    (checkout.beside / "other").mkdir()
    other = Checkout(checkout.beside / "other")
    (other.root / ".venv").symlink_to(checkout.root / ".venv")
    refused = other.run()
    assert refused.returncode == 1
    assert ".venv is a link to" in refused.stderr
    assert checkout.done() == []


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    (tmp_path / "large").mkdir()
    (checkout.root / ".venv").symlink_to(tmp_path / "large")
    assert checkout.done() == NEW
    assert checkout.done() == []
