# SPDX-License-Identifier: Apache-2.0
"""Copies of the sources, to be changed and tested; nothing stale may hide the change."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent

CPU_S = 900
TIMEOUT_S = 3600
"""Who spins or hangs has failed; a machine with other things to do has not."""

PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "haste", "--hypothesis-profile=quick")

_COMPILED = ("vllm_segreuse", "segreuse_extras")
"""Packages with functions that numba compiles."""
_running: set[subprocess.Popen[str]] = set()
_HASTE = """# Found is enough: nobody reads the smallest example.
from hypothesis.internal.conjecture import engine

engine.MAX_SHRINKING_SECONDS = 1
"""


class MutantsError(Exception):
    """The mutants say nothing: the sources fail unchanged, or other sources would be tested."""


def copy_sources(to: Path) -> None:
    """All that git knows or would add, the native libraries, and numba's machine code.

    Git knows the commits there, for tests that ask for one. Byte code does not come along; machine
    code is valid since times are copied, too.
    """
    _git("clone", "--quiet", "--shared", "--no-checkout", str(REPOSITORY), str(to))
    listed = ("ls-files", "--cached", "--others", "--exclude-standard", "-z")
    names = _git("-C", str(REPOSITORY), *listed).rstrip("\0").split("\0")
    made = [*REPOSITORY.glob("vllm_segreuse/kernels/*.so")]
    made += [path for it in _COMPILED for path in REPOSITORY.glob(f"{it}/**/*.nb[ci]")]
    for name in [*names, *(str(path.relative_to(REPOSITORY)) for path in made)]:
        source, target = REPOSITORY / name, to / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    _git("-C", str(to), "reset", "--quiet")
    (to / "haste.py").write_text(_HASTE)


def restore(root: Path, sources: Path) -> None:
    """Make a copy equal to the sources again, whatever a mutant or its tests have done there.

    Times count, too: byte code and machine code are valid by them. The history is left alone.
    """
    wanted = stamps(sources)
    for name, stamp in stamps(root).items():
        if wanted.get(name) == stamp:
            del wanted[name]
        else:
            (root / name).unlink()
    for name in wanted:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(sources / name, root / name, follow_symlinks=False)


def failure(root: Path, *arguments: str) -> str | None:
    """How the tests of a copy fail, or None. Tests that hang, or end their process, have failed.

    Args:
        arguments: of pytest.

    Raises:
        MutantsError: the tests would run other sources than those of the copy.
    """
    environment = dict(os.environ, PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1")
    where = [sys.executable, "-c", "import vllm_segreuse; print(vllm_segreuse.__path__[0])"]
    found = subprocess.run(where, cwd=root, env=environment, capture_output=True, text=True)
    if not found.returncode and not found.stdout.startswith(str(root.resolve())):
        raise MutantsError(f"the tests would run {found.stdout.strip()}, not the copy in {root}")
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *PYTEST, *arguments],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 9)),
    ) as process:
        _running.add(process)
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"not done within {TIMEOUT_S} s"
        finally:  # with what a test has left behind: servers, engines
            _running.discard(process)
            _kill(process)
    return told(process.returncode, output)


def end_all() -> None:
    """End the runs that are under way in other threads; what they say does not count."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def told(code: int, output: str) -> str | None:
    """How the tests failed, from pytest's exit status and output, or None."""
    if code in (0, 5):  # 5: none of these tests is wanted here
        return None
    return first_failure(output) or f"pytest ended with {code}: {output[-500:]}"


def first_failure(output: str) -> str | None:
    """The first test that fails, if pytest has come so far."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found and found[1]


def drop_machine_code(root: Path, file: str) -> None:
    """Drop numba's code of a source file, and of all whose constants and types come from it."""
    files = [path for it in _COMPILED for path in REPOSITORY.glob(f"{it}/**/*.py")]
    package = {path: imported(path, REPOSITORY) for path in files}
    stale: set[Path] = set()
    new = {REPOSITORY / file}
    while new:
        stale |= new
        new = {path for path, others in package.items() if others & new} - stale
    for path in (root / path.relative_to(REPOSITORY) for path in stale):
        for made in path.parent.glob(f"__pycache__/{path.stem}.*.nb[ci]"):
            made.unlink()


def imported(path: Path, root: Path) -> set[Path]:
    """Where the modules are that a module imports, if they are below a root."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {(root / name.replace(".", "/")).with_suffix(".py") for name in names}


def stamps(root: Path) -> dict[str, tuple[int, ...]]:
    """What makes a file another one, by its path below `root`."""
    found: dict[str, tuple[int, ...]] = {}
    for folder, folders, files in os.walk(root):
        if ".git" in folders:
            folders.remove(".git")
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for path in (Path(folder, name) for name in [*files, *links]):
            status = path.lstat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_mode)
            found[str(path.relative_to(root))] = stamp
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
    return done.stdout
