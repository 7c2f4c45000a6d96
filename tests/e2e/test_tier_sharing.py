# SPDX-License-Identifier: Apache-2.0
"""Two engines share files: what one computes the other, which runs meanwhile, reads bit for bit.

The second engine lives in a process of its own, and is killed once it has written. As a script,
this file is that engine:
    python -m tests.e2e.test_tier_sharing FOLDER
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.engine import Engine, Prompts
from tests.e2e.test_tier import SHIFT, ask, counts, evict
from tests.e2e.test_tier_restart import started, wait_for_files
from tests.parts import parts_of

MODULE = "tests.e2e.test_tier_sharing"
OTHERS = SHIFT | {"extra_keys": ["others"]}

pytestmark = pytest.mark.slow("two engines", instead="e2e/test_tier store/test_sharing")


def prompts(running: Engine) -> tuple[Prompts, list[int], list[int]]:
    """More text, a prompt with a document, and another with the same one elsewhere."""
    text = Prompts(running.vocab_size, seed=8)
    document = text.tokens(230)
    return text, text.around(document), text.around(document, gaps=(11, 7))


def compute_and_die(path: Path) -> None:
    """The other engine."""
    with started(path) as running:
        text, donor, _ = prompts(running)
        ask(running, donor, SHIFT)
        evict(running, text)
        wait_for_files(running, text)
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_engine_reuses_what_another_computes_while_it_runs(tmp_path: Path) -> None:
    with started(tmp_path / "tier") as running:
        _, donor, question = prompts(running)
        assert ask(running, question, OTHERS).report["reused_tokens"] == 0
        running.reset()
        ask(running, donor[:40], {})  # a step, in which files are found to be of these weights
        command = [sys.executable, "-m", MODULE, str(tmp_path / "tier")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stdout + ended.stderr

        assert ask(running, question, OTHERS).report["tiered_tokens"] == 0, "another namespace"
        running.reset()
        ask(running, donor[:40], {})
        from_files = ask(running, question, SHIFT)
        reused = from_files.report["reused_tokens"]
        assert from_files.report["tiered_tokens"] == reused > 150
        assert counts(running)["disk"] >= reused // 32
        files = parts_of(running.scheduler.connector.scheduler_side).tier.files.counts
        assert files["shared"] >= reused // 32

        ask(running, donor, OTHERS)
        from_gpu = ask(running, question, OTHERS)
        assert from_gpu.report["tiered_tokens"] == 0
        assert from_gpu.report["reused_tokens"] == reused
        assert from_gpu.logprobs == from_files.logprobs


if __name__ == "__main__":
    compute_and_die(Path(sys.argv[1]))
