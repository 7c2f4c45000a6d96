# SPDX-License-Identifier: Apache-2.0
"""The GPU's code paths, run on the CPU in processes of their own (`pretending.py`).

TRITON_ATTN takes long in the interpreter, so it is not among them; by hand:

    TRITON_INTERPRET=1 SEGREUSE_PRETEND_BACKEND=TRITON_ATTN \\
        python -m pytest tests/gpu/test_backends.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import pretending

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1200)
@pytest.mark.skipif(pretending.BACKEND is not None, reason="this is such a process")
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER"])
def test_backend(backend: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "test_backends.py"],
        env={**os.environ, "TRITON_INTERPRET": "1", "SEGREUSE_PRETEND_BACKEND": backend},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
