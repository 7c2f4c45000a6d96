# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side knows of a request, from arrival to end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm_segreuse.cache.contexts import known_until
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import (
    TO_THE_END,
    BoolArray,
    FreezeOrder,
    Pieces,
    Recipe,
    ReusePlan,
    Segments,
)


class Kept(NamedTuple):
    """Of a request that makes a part of a compressed document.

    Attributes:
        num_tokens: of the part, from the first token of its order to freeze on.
        num_copied: tokens of its prompt that were to be copied, and not computed.
    """

    num_tokens: int
    num_copied: int


class Report(NamedTuple):
    """Outcome of one request's admission; prefix + reused + new = prompt.

    Recomputed tokens, exact ones (see `exact.py`), similar ones (see `similar/`), tiered ones,
    which come from the second tier, and those of images are part of the reused, and entering ones,
    which are computed at some of the layers, of the similar. `computed_share` is the
    work: what is computed of (token, layer) pairs behind the prefix. Where the workers decide,
    both are the most there can be until they have reported. `drift` is then known, too
    (`prefill/drift.py`), and whether everything was computed because of it: the work is more than 1
    then. `observed` is what would have been reused: the fields of these names. Similar
    segments are accepted or rejected where they are tested (`prefill/acceptance.py`); rejected
    tokens are what was computed because of it.
    """

    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    new_tokens: int
    matches: int
    bypass_reason: str | None
    exact_tokens: int = 0
    computed_share: float = 1.0
    drift: float | None = None
    in_full: bool = False
    observed: Mapping[str, int | float] | None = None
    similar_tokens: int = 0
    entering_tokens: int = 0
    accepted_segments: int = 0
    rejected_segments: int = 0
    rejected_tokens: int = 0
    tiered_tokens: int = 0
    image_tokens: int = 0


NOTHING_SAVED, IMAGES_IN_DENSE_LAYERS = "nothing_saved", "images_in_dense_layers"
"""Reasons for which what was found is not reused."""


@dataclass
class TrackedRequest:
    """A request with extra keys, from arrival to end.

    Attributes:
        prompt: what is searched for.
        finder: how.
        min_reused_tokens: below this many reusable tokens the request runs without reuse.
        make_recipe: the request's policy with its options bound; takes the mask of reused tokens
            and their segments. None: to compute what it wants takes as long as to compute all.
        work: layer-tokens that a recipe computes, where some of what was found may be left out;
            None: a share to recompute is given, or images or named documents are reused.
        later_turns: expected later turns that would find the prompt if it were computed in full.
        max_drift: see `ReusePlan`.
        policy: name of the policy, for the report.
        observes: it is planned, and runs without reuse.
        explains: its report says where each stretch of the prompt comes from.
        bypass: reason why this request never reuses segments, or None.
        restores: whether it gets its own exact prefix from the second tier, also if it bypasses.
        required: the model's answers are defined by its plan: it waits for one, whatever the
            options say.
        donates: whether its blocks enter the index.
        recompute_once: whether what an earlier turn has moved stays as it is (`conversations.py`).
        lora_id: see `ReusePlan`.
        falls_back: its namespace had drifted when it arrived (`audit/drifting.py`), and its options
            are those of the fallback.
        namespace_class: of its namespace, in metrics of audits.
        freeze: what is to become of its blocks when it ends; None: nothing.
        kept: of a request that makes a part of a compressed document; None: any other request.
        exact_stop: behind this position its tokens stand for other KV than that of its own text
            (`compressed.py`): no block that ends there gets an exact name, is part of its prefix
            hit, or is restored.
        trace_headers: see `ReusePlan`.
        plan: the plan in force for its current blocks; what is exact of them is `plan.exact_until`.
        observed: the plan that would have been carried out.
        report: outcome of its first admission.
        explanation: of its first admission (`explain.py`), where it is wanted.
        other_adapters: keys of the namespaces that differ from its own by the LoRA adapter only, of
            a request that explains.
        awaited: the plan that the report is about, unless the workers have reported what they
            computed of it.
        unchecked: of a request that waits for its plan, the plans that have left, and that the
            workers have not reported on yet; the oldest first.
        misses_room: blocks for want of which its plan was not allocated, although nobody else held
            any.
        start: tokens of vLLM's own prefix hit at the last decision.
        reason: why it was not planned then.
        found: what the finder found then; None: nothing was searched for.
        given_up: what of it there was no room for.
        num_segments: segments of what it would reuse then.
        searched_s: when the last search began and ended, by the planner's clock; None: never.
    """

    request_id: str
    prompt: Prompt
    finder: Finder
    min_reused_tokens: int
    make_recipe: Callable[[BoolArray, Segments], Recipe | None]
    work: Callable[[Recipe], int] | None = None
    later_turns: Callable[[], float] | None = None
    max_drift: float = math.inf
    policy: str = ""
    observes: bool = False
    explains: bool = False
    bypass: str | None = None
    restores: bool = False
    required: bool = False
    donates: bool = True
    recompute_once: bool = False
    lora_id: int = 0
    freeze: FreezeOrder | None = None
    kept: Kept | None = None
    exact_stop: int = TO_THE_END
    trace_headers: Mapping[str, str] | None = None
    falls_back: bool = False
    namespace_class: str = ""
    plan: ReusePlan | None = None
    observed: ReusePlan | None = None
    report: Report | None = None
    explanation: list[dict[str, Any]] | None = None
    other_adapters: Sequence[bytes] = ()
    awaited: ReusePlan | None = None
    unchecked: deque[ReusePlan] = field(default_factory=deque)
    misses_room: int = 0
    start: int = 0
    reason: str | None = None
    found: Matches | None = None
    given_up: Pieces | None = None
    num_segments: int = 0
    searched_s: tuple[float, float] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.prompt.tokens)

    @property
    def names_documents(self) -> bool:
        """Whether some of its tokens may stand for compressed documents."""
        return self.exact_stop < TO_THE_END

    def stands_for_others(self, stop: int, block_size: int) -> None:
        """Its tokens from `stop` on stand for other KV than that of its own text; see `exact_stop`.

        Blocks behind it hold the KV of a text that nobody has written, so no context is known.
        """
        self.exact_stop = stop
        contexts = known_until(self.prompt.contexts, stop, block_size)
        self.prompt = replace(self.prompt, contexts=contexts)

    @property
    def exact_ends(self) -> tuple[int, int]:
        """Up to here full blocks are exact: by what the workers have reported so far, and if what
        is restored is in place."""
        stop, plan = self.exact_stop, self.plan
        if plan is None:
            return stop, stop
        return min(plan.known_exact_until, stop), min(plan.exact_until, stop)
