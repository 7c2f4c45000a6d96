# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse estimate`: what a request log would have reused, without a GPU and weights.

Prompts are made from the logged bodies by vLLM's own renderer (`prompt_rendering.py`) and
replayed through its own scheduler, KV cache manager and block pool with our connector
(`modelless_engine.py`, `replay.py`).
Only the workers are missing: nothing is computed, so what depends on the values of KV (drift, and
with `peaks` how many tokens are chosen) is the plan's.
"""
