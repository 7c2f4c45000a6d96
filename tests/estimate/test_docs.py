# SPDX-License-Identifier: Apache-2.0
"""The example that is printed in the documentation is what the commands print."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
PAGE = REPOSITORY / "docs" / "is-it-for-me.md"


@pytest.mark.slow
def test_the_example_is_what_is_printed(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    example = text.partition("$ python examples/request_log.py")[2].partition("```")[0]
    made, command, printed = example.split("\n", 2)
    assert made == " > requests.jsonl"
    log = tmp_path / "requests.jsonl"
    with log.open("w") as file:
        script = REPOSITORY / "examples" / "request_log.py"
        subprocess.run([sys.executable, script], stdout=file, check=True)
    arguments = command.removeprefix("$ vllm-segreuse ").replace("requests.jsonl", str(log)).split()
    ended = subprocess.run(
        [sys.executable, "-m", "segreuse_tools", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert printed == ended.stdout, f"the page is older than the code: paste\n{ended.stdout}"
