# SPDX-License-Identifier: Apache-2.0
"""What the halves of features are made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Feature

F = TypeVar("F", bound=Feature)


@dataclass
class Making:
    """Of one engine, in the scheduler's process.

    Attributes:
        core: what features share.
        by_content: finds equal segments.
        store: the second tier (`TierStore`); None: there is none.
        made: features that come before, in order.
    """

    core: Core
    by_content: Finder
    store: Any
    made: list[Feature] = field(default_factory=list)

    def earlier(self, kind: type[F]) -> F:
        """The feature of this class, which is made already.

        Raises:
            LookupError: it comes later in the list, or this engine does without it.
        """
        for feature in self.made:
            if isinstance(feature, kind):
                return feature
        raise LookupError(f"{kind.__name__} is not made: it has to come earlier in FEATURES")
