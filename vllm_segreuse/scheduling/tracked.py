# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side knows of a request, from arrival to end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from vllm_segreuse.cache.contexts import known_until
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import TO_THE_END, BoolArray, Pieces, Recipe, ReusePlan, Segments

_ALWAYS = (
    *("prefix_tokens", "reused_tokens", "recomputed_tokens", "new_tokens"),
    *("computed_share", "bypass_reason"),
)


class Report(NamedTuple):
    """Outcome of one request's admission; prefix + reused + new = prompt.

    Recomputed tokens, exact ones (see `cache/exact.py`), similar ones (`segreuse_extras/similar/`),
    tiered ones, which come from the second tier, and those of images are part of the reused, and
    entering ones, which are computed at some of the layers, of the similar. `computed_share` is the
    work: what is computed of (token, layer) pairs behind the prefix. Where the workers decide,
    both are the most there can be until they have reported. `drift` is then known, too
    (`prefill/drift.py`), and whether everything was computed because of it: the work is more than 1
    then, unless layers share KV, which passes leave out. `observed` is what would have been reused:
    the fields of these names. Similar segments are accepted or rejected where they are tested
    (`prefill/acceptance.py`); rejected tokens are what was computed because of it.
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

    def shown(self) -> dict[str, Any]:
        """What is sent: fields that every request has, and of features only what took part."""
        fields = self._asdict()
        always = {name: fields.pop(name) for name in _ALWAYS}
        return always | {name: it for name, it in fields.items() if it != USUAL[name]}


USUAL = {"matches": 0, **Report._field_defaults}
"""What fields are where nothing took part, by name."""


NOTHING_SAVED, IMAGES_IN_DENSE_LAYERS = "nothing_saved", "images_in_dense_layers"
BEHIND_FIRST_STAGE = "chooses_behind_first_stage"
"""Reasons for which what was found is not reused."""


MakeRecipe = Callable[[BoolArray, Segments], Recipe | None]
"""Takes which tokens are reused (bool `[n]`) and their segments. None: to compute what the policy
wants takes as long as to compute all."""


FindLeftBehind = Callable[[Prompt, int, int], "LeftBehind"]
"""Takes a prompt, where its prefix hit ends, and where the search does."""


@dataclass(frozen=True)
class Method:
    """How a request's segments are found, and what is computed of them.

    Attributes:
        policy: its name, for the report.
        finder: searches for segments.
        make_recipe: the policy, with its options bound.
        min_reused_tokens: below this many reusable tokens the request runs without reuse.
        work: layer-tokens that a recipe computes, where some of what was found may be left out;
            None: a share to recompute is given, or images or named documents are reused.
        later_turns: expected later turns that would find the prompt if it were computed in full.
        max_drift: see `ReusePlan`.
        left_behind: find what others have left, which is taken as it is; the first goes before.
    """

    policy: str
    finder: Finder
    make_recipe: MakeRecipe
    min_reused_tokens: int = 1
    work: Callable[[Recipe], int] | None = None
    later_turns: Callable[[], float] | None = None
    max_drift: float = math.inf
    left_behind: tuple[FindLeftBehind, ...] = ()


class LeftBehind(NamedTuple):
    """Blocks that an earlier turn, or an equal prompt, has left behind an exact prefix, with moved
    text.

    Attributes:
        start, stop: tokens of the prompt that they hold, in whole blocks.
        block_ids: in order.
        donor_depth: of what they were moved from (`ReusePlan.donor_depth`).
        behind: how what is behind them is found and computed; None: as in other requests.
    """

    start: int
    stop: int
    block_ids: list[int]
    donor_depth: int
    behind: Method | None = None

    @property
    def num_tokens(self) -> int:
        """That are not computed."""
        return self.stop - self.start


NOTHING_LEFT = LeftBehind(TO_THE_END, TO_THE_END, [], -1)


class Use(Enum):
    """What becomes of a request whose segments are searched for.

    REUSE: its plan is carried out. OBSERVE: it is planned, and runs without reuse. REQUIRE: the
    model's answers are defined by its plan, so it waits for one, whatever the options say.
    """

    REUSE = "reuse"
    OBSERVE = "observe"
    REQUIRE = "require"


class Bypass(NamedTuple):
    """A request that never reuses segments.

    Attributes:
        reason: why, for the report.
        restores: whether it may still get its own exact prefix from the second tier: that is what
            it would compute.
    """

    reason: str
    restores: bool = False


Mode = Use | Bypass


class Tags(NamedTuple):
    """What a request's plans carry to the workers; see `ReusePlan`."""

    lora_id: int = 0
    explains: bool = False
    trace_headers: Mapping[str, str] | None = None


_NO_TAGS = Tags()


@dataclass
class Decision:
    """What was last decided on a request.

    Attributes:
        start: tokens of the prefix hit, with what an earlier turn has left behind it.
        reason: why it was not planned.
        found: what the finder found; None: nothing was searched for.
        given_up: what of it there was no room for.
        num_segments: segments of what it would reuse.
        searched_s: when the last search began and ended, by the planner's clock; None: never.
        planned_s: the same of the last plan, with the room that was made for it.
    """

    start: int = 0
    reason: str | None = None
    found: Matches | None = None
    given_up: Pieces | None = None
    num_segments: int = 0
    searched_s: tuple[float, float] | None = None
    planned_s: tuple[float, float] | None = None


@dataclass
class TrackedRequest:
    """A request with extra keys, from arrival to end. Features keep what is theirs by its id.

    Attributes:
        prompt: what is searched for.
        method: how.
        mode: whether.
        restores: whether it gets its own exact prefix from the second tier, also if it bypasses.
        donates_from: its blocks from this position on enter the index; TO_THE_END: none.
        exact_stop: behind this position its tokens stand for other KV than that of its own text
            (`segreuse_extras/compressed/`): no block that ends there gets an exact name, is part
            of its prefix hit, or is restored.
        tags: of its plans.
        left_behind: what it takes of others, by the last lookup of its prefix hit.
        plan: the plan in force for its current blocks.
        observed: the plan that would have been carried out.
        report: outcome of its first admission.
        decision: the last one.
        allocation_failed: blocks for want of which its plan was not allocated, although nobody
            else held any.
    """

    request_id: str
    prompt: Prompt
    method: Method
    mode: Mode = Use.REUSE
    restores: bool = False
    donates_from: int = 0
    exact_stop: int = TO_THE_END
    tags: Tags = _NO_TAGS
    left_behind: LeftBehind = NOTHING_LEFT
    plan: ReusePlan | None = None
    observed: ReusePlan | None = None
    report: Report | None = None
    decision: Decision = field(default_factory=Decision)
    allocation_failed: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.prompt.tokens)

    @property
    def method_in_force(self) -> Method:
        """How what is behind its prefix hit, and what it takes of others, is found and computed."""
        return self.left_behind.behind or self.method

    @property
    def bypass(self) -> str | None:
        """Reason why this request never reuses segments, or None."""
        return self.mode.reason if isinstance(self.mode, Bypass) else None

    @property
    def is_required(self) -> bool:
        """Whether it must not run without its plan."""
        return self.mode is Use.REQUIRE

    @property
    def donates(self) -> bool:
        """Whether any of its blocks enters the index."""
        return self.donates_from < TO_THE_END

    @property
    def names_documents(self) -> bool:
        """Whether some of its tokens may stand for compressed documents."""
        return self.exact_stop < TO_THE_END

    def donates_nothing(self) -> None:
        """No further block of it enters the index."""
        self.donates_from = TO_THE_END

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
        stop = min(self.exact_stop, self.exact_until)
        return stop if self.plan is None else min(stop, self.plan.known_exact_until), stop

    @property
    def exact_until(self) -> int:
        """Up to here it reads nothing but its own exact prefix, if what is restored is in place."""
        left = self.left_behind.start
        return left if self.plan is None else min(left, self.plan.exact_until)

    @property
    def donor_depth(self) -> int:
        """Largest provenance depth of what it reads; -1: all of it is its own."""
        left = self.left_behind.donor_depth
        return left if self.plan is None else max(left, self.plan.donor_depth)
