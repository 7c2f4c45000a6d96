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


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests run on the GPU")
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    files = [str(HERE / f"test_triton_{kernel}.py") for kernel in ("align", "attention", "scores")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
