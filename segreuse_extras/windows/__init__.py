# SPDX-License-Identifier: Apache-2.0
"""Layers that attend to a window keep their window only: vLLM's hybrid KV cache manager, on."""
