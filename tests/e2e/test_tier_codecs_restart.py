# SPDX-License-Identifier: Apache-2.0
"""Files of a codec outlive a restart, and are read by it alone."""

import time
from pathlib import Path

import pytest

from tests.e2e.engine import Prompts, engine
from tests.e2e.test_tier import ARGUMENTS, SHIFT, ask, counts, evict
from vllm_segreuse.kernels.codecs import Codec

BFLOAT16 = ARGUMENTS | {"dtype": "bfloat16"}

pytestmark = pytest.mark.slow(
    "an engine is started again", instead="e2e/test_tier_codecs tier/test_restart"
)


def test_documents_outlive_a_restart_and_another_codec_sees_nothing(tmp_path: Path) -> None:
    """bf16, as most caches are: the records are half as large."""
    common = {"host_gib": 0.008, "min_run_tokens": 32, "wait_ms": 60_000, "disk_gib": 0.1}

    def options(codec: Codec) -> dict[str, object]:
        return {"tier": common | {"path": str(tmp_path), "codec": str(codec)}}

    with engine("llama", segreuse=options(Codec.INT8), **BFLOAT16) as running:
        text = Prompts(running.vocab_size, seed=5)
        document = text.tokens(230)
        donor, question = text.around(document), text.around(document, gaps=(11, 7))
        ask(running, donor, SHIFT)
        evict(running, text)
        from_host = ask(running, question, SHIFT)
        assert from_host.report["tiered_tokens"] > 150
        for _ in range(200):
            running.ask(text.tokens(40), max_tokens=1)
            if counts(running)["disk"] >= counts(running)["host"] > 0:
                break
            time.sleep(0.05)
    with engine("llama", segreuse=options(Codec.INT8), **BFLOAT16) as running:
        from_disk = ask(running, question, SHIFT)
        assert from_disk.report["tiered_tokens"] == from_host.report["tiered_tokens"]
        assert from_disk.logprobs == from_host.logprobs, "bit for bit what was read before"
    with engine("llama", segreuse=options(Codec.FP8), **BFLOAT16) as running:
        assert ask(running, question, SHIFT).report["reused_tokens"] == 0
