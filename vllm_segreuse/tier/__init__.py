# SPDX-License-Identifier: Apache-2.0
"""The second tier: KV of evicted blocks in host memory and in files."""
