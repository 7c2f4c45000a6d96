# SPDX-License-Identifier: Apache-2.0
"""Options of knowledge bases, and of what they freeze."""

from typing import Annotated

from pydantic import BeforeValidator

from vllm_segreuse.options.parts import ServerPart
from vllm_segreuse.options.values import MAX_TOKENS, count, inner_share, number, path, switch


class KnowledgeOptions(ServerPart):
    """How much is frozen, and what is remembered of it."""

    frozen_share: Annotated[float, number(1)] = 0.5
    """Most of the KV blocks that knowledge bases may keep, 0..1; 0: none. One request of maximum
    length always fits beside them."""

    frozen_pressure: Annotated[float, BeforeValidator(inner_share)] = 0.9
    """Share of the KV blocks in use (frozen or held by requests) above which documents are evicted:
    those that running requests do not hold first, and of these the longest unused."""

    frozen_returns: Annotated[bool, BeforeValidator(switch)] = True
    """Whether an evicted document is computed again, in its own context, once a prompt contains its
    text and there is room."""

    knowledge_path: Annotated[str | None, BeforeValidator(path)] = None
    """SQLite file that remembers knowledge bases over restarts; None: they are forgotten."""

    knowledge_chunk_tokens: Annotated[int, count(1, MAX_TOKENS)] = 2048
    """Longer documents are computed in chunks of so many tokens at most, each by itself."""

    knowledge_body_bytes: Annotated[int, count(1024, MAX_TOKENS)] = 16 * 2**20
    """Largest body that the routes of knowledge bases take."""
