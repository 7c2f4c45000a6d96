# SPDX-License-Identifier: Apache-2.0
"""How many tokens are compared with what was moved, and changed at once: memory is reserved for
it (`config/memory.py`)."""

COMPARED_TOKENS = 256
"""Most tokens of a plan whose moved KV is compared with what was computed, beside one of each
similar segment."""
CARRIED_TOKENS = 8192
"""Most tokens that take part in changes of others at once (`carried.py`)."""
