# SPDX-License-Identifier: Apache-2.0
"""Lines to the terminal, and to whoever reads the output through a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def complain(command: str, message: object) -> None:
    """One line on the standard error that names the command."""
    print(f"vllm-segreuse {command}: {message}", file=sys.stderr)


def printable(name: object) -> str:
    """A name of a file, which need be no UTF-8, as text that can be printed and written."""
    return str(name).encode(errors="backslashreplace").decode()


def print_all(text: str) -> None:
    """Print a text at once; ends the process with status 1 where its reader wants no more."""
    with _while_read():
        print(text, flush=True)


def write_all(content: bytes) -> None:
    """The same of bytes, whatever the terminal's encoding is, and without a line's end."""
    with _while_read():
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


@contextmanager
def _while_read() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # What is still buffered would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
