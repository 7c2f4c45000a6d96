# SPDX-License-Identifier: Apache-2.0
"""Accelerator kernels, imported as `vllm_segreuse.kernels`.

Empty for now: alignment and the sparse pass run on stock PyTorch and on vLLM's own attention
backends, on every device. Triton kernels will live here, one file per kernel with its launcher,
and beside them `reference.py`, the plain PyTorch form that each of them is tested against.
"""
