# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a prompt came from, and how much of the model ran for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Tokens:
    """Tokens of a prompt, or of several.

    Attributes:
        prompt: all of them.
        prefix: found by vLLM's prefix cache.
        equal: found as segments.
        similar: equal tokens of similar text.
        computed: in units of a token at all layers: what was new, and what was computed again.
    """

    prompt: int = 0
    prefix: int = 0
    equal: int = 0
    similar: int = 0
    computed: float = 0.0

    @classmethod
    def of(cls, prompt: int, cached: int, report: Mapping[str, Any] | None) -> Self:
        """Of one request.

        Args:
            prompt: its tokens.
            cached: what vLLM says was cached; read where there is no report only.
            report: of the request.
        """
        if report is None:
            return cls(prompt, cached, 0, 0, prompt - cached)
        reused, similar = report["reused_tokens"], report.get("similar_tokens", 0)
        prefix = report["prefix_tokens"]
        computed = report["computed_share"] * (prompt - prefix)
        return cls(prompt, prefix, reused - similar, similar, computed)

    def __add__(self, other: Tokens) -> Tokens:
        mine, theirs = vars(self), vars(other)
        return Tokens(**{name: mine[name] + theirs[name] for name in mine})

    def shares(self) -> dict[str, float]:
        """Everything as a share of the prompts, by its name; and what was found nowhere, `new`."""
        found = (self.prefix, self.equal, self.similar)
        named = zip(("prefix", "equal", "similar"), found, strict=True)
        return {
            **{name: tokens / self.prompt for name, tokens in named},
            "new": 1 - sum(found) / self.prompt,
            "work": self.computed / self.prompt,
        }
