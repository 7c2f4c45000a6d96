# SPDX-License-Identifier: Apache-2.0
"""Makes docs/_static/kb.svg: `vllm-segreuse kb` on a running server, as a terminal shows it.

    VLLM_SEGREUSE_URL=... VLLM_SEGREUSE_ADMIN_TOKEN=... scripts/capture_kb.py docs/_static/kb.svg

The base `handbook` is made anew, and filled with this repository's own docs/.
"""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = (
    "kb create handbook",
    "kb add handbook docs",
    "kb ls",
    "kb ls handbook",
    "kb stats",
)
COLUMNS = 96
_PIECES = re.compile(r"\x1b\[\?25[hl]|\x1b\[2K|\x1b\[1A|\r|\n")


def screen(output: str) -> str:
    """What is left on the screen after `output`; progress bars erase and rewrite their lines."""
    lines, row, end = [""], 0, 0
    for piece in _PIECES.finditer(output):
        lines[row] += output[end : piece.start()]
        end = piece.end()
        if piece.group() == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif piece.group() == "\x1b[2K":
            lines[row] = ""
        elif piece.group() == "\x1b[1A":
            row -= 1
    lines[row] += output[end:]
    return "\n".join(lines).rstrip()


def run(command: str) -> str:
    """The terminal's content after one command."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    argv = [sys.executable, "-m", "segreuse_tools", *command.split()]
    process = subprocess.Popen(argv, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    output = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        output += part
    os.close(ours)
    if process.wait():
        sys.exit(f"{command} ended with {process.returncode}:\n{output.decode()}")
    return screen(output.decode())


def main(target: str) -> None:
    """Runs the commands and writes the picture."""
    argv = [sys.executable, "-m", "segreuse_tools", "kb", "rm", "handbook", "--yes"]
    subprocess.run(argv, capture_output=True)  # it need not be there
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command in COMMANDS:
        console.print(Text(f"$ vllm-segreuse {command}", style="bold"))
        console.print(Text.from_ansi(run(command)))
    svg = console.export_svg(title="vllm-segreuse kb")
    # The fonts of the picture are the reader's: nothing is loaded from elsewhere.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    Path(target).write_text(svg.replace("Fira Code, monospace", "monospace") + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
