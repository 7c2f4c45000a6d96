# SPDX-License-Identifier: Apache-2.0
"""Models that were trained on documents computed alone (KVLink, Block-Attention)."""
