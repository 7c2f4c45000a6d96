# SPDX-License-Identifier: Apache-2.0
"""Without a GPU, the tests of the Triton kernels run in Triton's interpreter.

In a process of its own: the interpreter is switched on for all of triton when it is imported, and
would stay on for every test behind these.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.triton_running import INTERPRETING

HERE = Path(__file__).parent


KERNELS = ("align", "attention", "scores", "carry")
QUICK = "the_smallest or refused or nothing"
ENDS = "tests.kernels.ends_of_cases"

without_gpu = pytest.mark.skipif(
    INTERPRETING or torch.cuda.is_available(), reason="this process runs the kernels itself"
)


@without_gpu
def test_the_smallest_cases_in_the_interpreter() -> None:
    """A few cases of each kernel, one process for all: starting it takes as long as they do."""
    assert_pass("-k", QUICK, "-p", ENDS)


@without_gpu
@pytest.mark.slow
def test_everything_in_the_interpreter() -> None:
    assert_pass()


def assert_pass(*selection: str) -> None:
    """Tests of every kernel pass, and none is skipped."""
    pytest.importorskip("triton", reason="triton is not installed")
    files = [f"test_triton_{kernel}.py" for kernel in KERNELS]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore"),
            *("-x", "-v", *selection),
            *(str(HERE / file) for file in files),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line for line in done.stdout.splitlines() if " PASSED" in line]
    assert all(any(file in line for line in passed) for file in files)
    assert "SKIPPED" not in done.stdout
