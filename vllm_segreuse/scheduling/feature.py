# SPDX-License-Identifier: Apache-2.0
"""What a feature does in the scheduler's process.

    a request   identify ─► finder ─► admit ─► searched ─► waits ─► (planner) ─► decided
                ─► allocated ─► outcome ─► carried_out ─► finished
    a step      end_step: message to the workers      processed, reported: message from them
    an engine   naming, pins ─► learned ─► status, has_pending_work ─► close

A feature overrides what it needs. `SchedulerSide` calls a hook of those features only that have it,
in the order of their list; `decided` in the reverse order, so that the first feature has the last
word. An error in a hook that is about one request costs that request the reuse; one at the end of
a step, or over a message, ends reuse until the prefix cache is reset. Neither ends the engine. A
request then runs without reuse; a feature whose request must not ends it in `decided`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.compat.block_events import BlockListener, Naming
from vllm_segreuse.options.parsing import ParsedRequest
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.plan import PlanOutcome, ReusePlan
from vllm_segreuse.scheduling.donors import Follower
from vllm_segreuse.scheduling.methods import Methods
from vllm_segreuse.scheduling.planner import BlockPins
from vllm_segreuse.scheduling.tracked import Bypass, Report, TrackedRequest, Use

if TYPE_CHECKING:
    from vllm.v1.request import Request


def use_of(options: PolicyOptions) -> Use:
    """What options say of a request that is not bypassed."""
    return Use.OBSERVE if options.observe else Use.REUSE


@dataclass
class Arriving:
    """A request that arrives.

    Attributes:
        request: vLLM's.
        parsed: what it says to segment reuse.
        extra_keys: of its namespace; None: it has nothing to do with reuse.
        options: of its policy.
        methods: what serves options.
        images: of its prompt; None: it has none that are told apart.
        is_text: whether all that it reuses is text that the pass can compute.
        has_documents: whether the model sees documents in it that are computed alone.
        may_restore: whether its own prefix may come from the second tier.
        takes_turns: whether what earlier turns have moved may stay as it is.
        lacks: why it is bypassed unless vLLM's request itself says why.
        key, tracked: its namespace, and the request as it will be kept; from `admit` on.
    """

    request: Request
    parsed: ParsedRequest
    extra_keys: tuple[str, ...] | None
    options: PolicyOptions
    methods: Methods
    images: PromptImages | None = None
    is_text: bool = True
    has_documents: bool = False
    may_restore: bool = True
    takes_turns: bool = True
    lacks: Bypass | None = None
    key: bytes = b""
    tracked: TrackedRequest = field(init=False)

    def use(self, options: PolicyOptions) -> None:
        """The request has these options from here on."""
        self.options, tracked = options, self.tracked
        tracked.method = self.methods.method(options, self.images, self.is_text)
        if not isinstance(tracked.mode, Bypass):
            tracked.mode = use_of(options)

    def bypass(self, reason: str, restores: bool = False) -> None:
        """The request reuses nothing; a reason that was given before stays. One that is observed
        runs as it would without us."""
        if not isinstance(self.tracked.mode, Bypass):
            self.tracked.mode = Bypass(reason, restores and not self.options.observe)


@dataclass(frozen=True)
class Admitted:
    """A request that vLLM has allocated blocks for.

    Attributes:
        request: vLLM's.
        tracked: as it is kept, with its report.
        report: of this admission; `tracked.report` is about the first one.
        block_ids: all its blocks.
        hit_blocks: those of its prefix hit.
        is_first: whether it was never preempted.
    """

    request: Request
    tracked: TrackedRequest
    report: Report
    block_ids: Sequence[int]
    hit_blocks: list[int]
    is_first: bool


@dataclass
class Ending:
    """A request that ends, in whatever way.

    Attributes:
        request: vLLM's.
        tracked: as it was kept; None: it has no extra keys.
        block_ids: its blocks, which it still holds.
        is_complete: whether it was answered to its end.
        report: fields that are sent with the answer; None: there is no report.
    """

    request: Request
    tracked: TrackedRequest | None
    block_ids: list[int]
    is_complete: bool
    report: dict[str, Any] | None = None

    def add(self, **fields: Any) -> None:
        """Add fields to the report, if there is one."""
        if self.report is not None:
            self.report |= fields


class Feature:
    """Nothing of what may be overridden.

    Attributes:
        name: of its messages.
        listeners: of it, that are told what becomes of blocks.
        listens_first: whether they are told before donors are, as those are that release blocks
            before a reset.
        followers: of it, that keep something of each block that donates.
        calls: what API servers may call, by name.
    """

    name = ""
    listeners: Sequence[BlockListener] = ()
    listens_first = False
    followers: Sequence[Follower] = ()
    calls: Mapping[str, Callable[..., Any]] = {}

    def identify(self, arriving: Arriving) -> None:
        """A request arrives: what its namespace and its tokens are."""

    def finder(self, options: PolicyOptions, images: PromptImages | None, inner: Finder) -> Finder:
        """Who searches the prompt of a request with these options: `inner`, or another.

        Args:
            images: of the prompt; None: it has none that are told apart.
        """
        return inner

    def admit(self, arriving: Arriving) -> None:
        """It has a namespace: narrow its mode, wrap its finder, replace its method."""

    def searched(self, arriving: Arriving) -> None:
        """All features have admitted it, and its prompt is about to be searched."""

    def waits(self, request: Request, tracked: TrackedRequest | None, num_hit_tokens: int) -> bool:
        """Whether the request cannot be decided on in this step.

        Args:
            num_hit_tokens: of vLLM's prefix hit.
        """
        return False

    def decided(
        self, request: Request, tracked: TrackedRequest, supplied: int | None
    ) -> int | None:
        """It was decided on; see `Planner.decide`. Returns what vLLM is told."""
        return supplied

    def allocated(self, admitted: Admitted) -> None:
        """vLLM has allocated its blocks."""

    def outcome(
        self, request: Request, tracked: TrackedRequest | None, outcome: PlanOutcome
    ) -> bool:
        """The workers report how its plan has ended. Returns whether others need not know."""
        return False

    def carried_out(self, request_id: str, plan: ReusePlan, outcome: PlanOutcome) -> None:
        """The workers have carried out the plan that its report is about."""

    def finished(self, ending: Ending) -> None:
        """It ends."""

    def holds(self, request_id: str) -> bool:
        """Whether others read or write its blocks: they cannot be taken from it."""
        return False

    def called_back(self, request_id: str) -> None:
        """Its plan is not carried out, and it starts anew without reuse."""

    def naming(self, inner: Naming) -> Naming:
        """Who tells the block pool which blocks are exact: `inner`, or another."""
        return inner

    def pins(self, inner: BlockPins) -> BlockPins:
        """Who holds the donors of plans: `inner`, or another."""
        return inner

    def end_step(self, plans: Sequence[ReusePlan], runs_model: bool) -> Any:
        """A scheduling step is over: the message to the workers; None: there is none.

        Args:
            plans: that leave with it.
            runs_model: whether it has a forward.
        """
        return None

    def processed(self) -> None:
        """The oldest step that is under way is over; what it has computed is there."""

    def reported(self, message: Any) -> None:
        """The workers' message."""

    def learned(self, fact: Any) -> None:
        """What its half in the workers has found out of the model, before the first request."""

    def status(self) -> Mapping[str, Any]:
        """What the status route shows of it."""
        return {}

    def has_pending_work(self) -> bool:
        """Whether the engine has to step although no request needs it."""
        return False

    def close(self) -> None:
        """The engine ends."""


class OwnRequests:
    """A feature that has requests of its own computed, or ends those of others.

    Attributes:
        wake: has an idle engine step; from any thread. None: it steps when it is told to.
        is_paused: whether none of the engine's requests runs now.
    """

    wake: Callable[[], None] | None = None
    is_paused: Callable[[], bool] = staticmethod(lambda: False)

    def to_add(self, running: int, waiting: int, is_paused: bool) -> Iterable[Request]:
        """A step is over: requests to add.

        Args:
            running, waiting: requests that need the engine.
            is_paused: whether none of them runs.
        """
        return ()

    def to_fail(self) -> Iterable[str]:
        """A step is over: requests to end with an error."""
        return ()

    def to_abort(self) -> Iterable[str]:
        """The prefix cache is about to be reset, or the engine to end: own requests that would hold
        blocks, and that nobody waits for."""
        return ()


class Features(tuple[Feature, ...]):
    """Of an engine, in the order in which a request passes them."""

    def named(self, name: str) -> Any:
        """The one of this name.

        Raises:
            LookupError: the engine does without it.
        """
        for feature in self:
            if feature.name == name:
                return feature
        raise LookupError(f"this engine does without {name!r}; it has {[it.name for it in self]}")

    def having(self, hook: str) -> tuple[Feature, ...]:
        """Those that have a hook of this name."""
        default = getattr(Feature, hook)
        return tuple(it for it in self if getattr(type(it), hook) is not default)

    def listeners(self, donors: BlockListener) -> list[BlockListener]:
        """Who is told what becomes of blocks, in this order."""
        first, others = (
            [it for it in self if it.listens_first is is_first] for is_first in (True, False)
        )
        return [*_listeners(first), donors, *_listeners(others)]


def _listeners(features: Iterable[Feature]) -> list[BlockListener]:
    return [listener for feature in features for listener in feature.listeners]
