# SPDX-License-Identifier: Apache-2.0
"""How many tokens are compared with what was moved."""

COMPARED_TOKENS = 256
"""Most tokens of a plan whose moved KV is compared with what was computed, beside one of each
similar segment."""
