# SPDX-License-Identifier: Apache-2.0
"""Output to a pipe that its reader has closed."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("call", ["print_all('x' * 10**6)", "write_all(b'x' * 10**6)"])
def test_a_closed_pipe_ends_a_command_without_a_traceback(call: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = f"from segreuse_tools.terminal import *; {call}"
    ended = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")
