# SPDX-License-Identifier: Apache-2.0
"""Every small change of one module (cosmic-ray's operators), and which of them no test notices.

    python scripts/mutation.py vllm_segreuse/plan/reuse.py tests/test_plan.py

For modules without torch and without numba, whose tests take seconds: each change is a run of the
named tests. Works on a copy of the sources. Exit status 1 if a change survives.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.mutants import copies

TIMEOUT_S = 300
COSMIC_RAY = (sys.executable, "-m", "cosmic_ray.cli")


def survivors(module: str, tests: list[str]) -> Iterator[tuple[bool, str]]:
    """(whether it survived, the change) of all changes of a module."""
    pytest = ["python", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = " ".join([*pytest, "-p haste", "--hypothesis-profile=quick", *tests])
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        root = Path(directory).resolve() / "copy"
        copies.copy_sources(root)
        config = root / "cosmic-ray.toml"
        config.write_text(
            f'[cosmic-ray]\nmodule-path = "{module}"\ntimeout = {TIMEOUT_S}\n'
            f'excluded-modules = []\ntest-command = "{command}"\n'
            '[cosmic-ray.distributor]\nname = "local"\n'
        )
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        made = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "PATH": path}
        environment = os.environ | made | {"OMP_NUM_THREADS": "1"}

        def run(*arguments: str) -> str:
            done = subprocess.run(
                [*COSMIC_RAY, *arguments], cwd=root, env=environment, stdout=subprocess.PIPE
            )
            if done.returncode:
                sys.exit(f"cosmic-ray {arguments[0]} ended with {done.returncode}")
            return done.stdout.decode()

        run("baseline", config.name)
        run("init", config.name, "session.sqlite")
        run("exec", config.name, "session.sqlite")
        for line in run("dump", "session.sqlite").splitlines():
            _, result = json.loads(line)
            yield result["test_outcome"] == "survived", result["diff"]


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", help="file of a module without torch and numba")
    parser.add_argument("tests", nargs="+", help="files of tests that should notice")
    options = parser.parse_args(arguments)
    found = list(survivors(options.module, options.tests))
    left = [change for survived, change in found if survived]
    print("\n".join(left))
    print(f"{options.module}: {len(found)} changes, {len(left)} survived")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
