# SPDX-License-Identifier: Apache-2.0
"""vLLM for a GPU machine that reaches no network: `pack` here, `unpack` there."""
