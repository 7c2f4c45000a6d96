# SPDX-License-Identifier: Apache-2.0
"""What is reusable: the segment index, its matcher, namespaces and plans. No torch, no vLLM."""
