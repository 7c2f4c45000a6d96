# SPDX-License-Identifier: Apache-2.0
"""vLLM beside a command whose standard output is its answer."""

import os


def quiet() -> None:
    """Call before vLLM is imported, which reads these variables once: it logs errors only, to
    standard error, and looks no name up elsewhere."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ["HF_HUB_OFFLINE"] = "1"
