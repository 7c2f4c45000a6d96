# SPDX-License-Identifier: Apache-2.0
"""What the workers record for audits, and what they report of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Recording(NamedTuple):
    """A request that reuses, and whose logits are kept.

    Attributes:
        num_prompt_tokens: of it.
        tokens: of its answer at which the most likely token is kept.
    """

    num_prompt_tokens: int
    tokens: int


class Reference(NamedTuple):
    """A request that computes the same prompt in full.

    Attributes:
        audited: id of the request that it is compared with.
        num_prompt_tokens: of both.
        answer: the tokens that the other one has answered. The reference is made to say them, too,
            so that both have the same context wherever they are compared.
    """

    audited: str
    num_prompt_tokens: int
    answer: tuple[int, ...]


class AuditResult(NamedTuple):
    """What came of a comparison.

    Attributes:
        kl: divergence of the first token's distribution from that of full prefill, in nats, over
            the whole vocabulary.
        agreed: tokens at which both have the same most likely token.
        compared: tokens that were compared.
    """

    kl: float
    agreed: int
    compared: int


@dataclass(frozen=True)
class AuditDone:
    """What came of references, by id. All ranks report the same."""

    results: dict[str, AuditResult]

    def merged(self, other: AuditDone) -> AuditDone:
        """With that of another rank, or of an earlier step."""
        return AuditDone(other.results | self.results)


@dataclass
class AuditOrders:
    """What is new in a step.

    Attributes:
        record: requests whose logits are to be kept, by id.
        compare: references, by id.
        forget: audited requests that will not be compared, and references that have ended.
    """

    record: dict[str, Recording] = field(default_factory=dict)
    compare: dict[str, Reference] = field(default_factory=dict)
    forget: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.record or self.compare or self.forget)
