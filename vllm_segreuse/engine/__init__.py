# SPDX-License-Identifier: Apache-2.0
"""What is known of the vLLM that runs this: versions, KV cache groups, slots, statistics."""
