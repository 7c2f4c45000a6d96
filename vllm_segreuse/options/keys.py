# SPDX-License-Identifier: Apache-2.0
"""What clients may write into a key: the extra keys of a request, the names of documents."""

import unicodedata

MAX_EXTRA_KEYS = 16
MAX_EXTRA_KEY_BYTES = 256


def key_fault(key: object, max_bytes: int = MAX_EXTRA_KEY_BYTES) -> str | None:
    """What is wrong with one key, or None."""
    if not isinstance(key, str):
        return "must be a string"
    # A character takes at least one byte: long strings are refused before anything walks them.
    if not 1 <= len(key) <= max_bytes:
        return f"must be 1 to {max_bytes} bytes of UTF-8"
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in key):
        return "must hold no control characters and no lone surrogates"
    if len(key.encode()) > max_bytes:
        return f"must be 1 to {max_bytes} bytes of UTF-8"
    return None
