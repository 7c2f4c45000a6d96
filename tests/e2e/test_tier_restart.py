# SPDX-License-Identifier: Apache-2.0
"""Segments that were written to files outlive the engine, bit for bit; another key sees nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.engine import Engine, Prompts, engine
from tests.e2e.test_tier import ARGUMENTS, SHIFT, ask, counts, evict

pytestmark = pytest.mark.slow(
    "an engine is started again", instead="e2e/test_tier tier/test_restart"
)


@contextmanager
def started(path: Path, **more: object) -> Iterator[Engine]:
    files = {"path": str(path), "disk_gib": 0.1, "wait_ms": 60_000, "min_run_tokens": 32} | more
    with engine("llama", segreuse={"tier": {"host_gib": 0.008, **files}}, **ARGUMENTS) as running:
        yield running


def wait_for_files(running: Engine, text: Prompts) -> None:
    """Until all that is in host memory is on disk, too."""
    for _ in range(200):
        running.ask(text.tokens(40), max_tokens=1)
        if counts(running)["disk"] >= counts(running)["host"] > 0:
            return
        time.sleep(0.05)
    raise AssertionError(counts(running))


def test_a_segment_outlives_the_engine_and_its_key_is_needed(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("5b" * 32)
    with started(tmp_path / "tier", key_file=str(key)) as running:
        text = Prompts(running.vocab_size, seed=5)
        document = text.tokens(230)
        donor, question = text.around(document), text.around(document, gaps=(11, 7))
        ask(running, donor, SHIFT)
        from_gpu = ask(running, question, SHIFT)
        running.reset()
    with started(tmp_path / "tier", key_file=str(key)) as running:
        ask(running, donor, SHIFT)
        evict(running, text)
        wait_for_files(running, text)
    with started(tmp_path / "tier", key_file=str(key)) as running:
        from_disk = ask(running, question, SHIFT)
        assert from_disk.report["tiered_tokens"] == from_disk.report["reused_tokens"] > 150
        assert from_disk.logprobs == from_gpu.logprobs
        other = ask(running, question, SHIFT | {"extra_keys": "others"})
        assert other.report["reused_tokens"] == 0, "another namespace"
    key.write_text("c4" * 32)
    with started(tmp_path / "tier", key_file=str(key)) as running:
        assert ask(running, question, SHIFT).report["reused_tokens"] == 0
    files = [file for file in (tmp_path / "tier").rglob("*") if file.is_file()]
    written = b"".join(file.read_bytes() for file in files)
    assert len(written) > 1 << 18
    assert np.asarray(document[:8], np.int32).tobytes() not in written, "tokens are encrypted"
