# SPDX-License-Identifier: Apache-2.0
"""What stands for a document where routers compare: its text, or its id, is not told.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_DIGITS = 16


def document_digest(document: str, extra_keys: Sequence[str]) -> str:
    """16 hexadecimal digits of SHA-256 of the extra keys and the document, a NUL between each.

    Args:
        document: its text or id.
        extra_keys: of its namespace.
    """
    return hashlib.sha256("\0".join([*extra_keys, document]).encode()).hexdigest()[:_DIGITS]
