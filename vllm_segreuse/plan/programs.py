# SPDX-License-Identifier: Apache-2.0
"""Programs: which tokens of a plan are computed at which layers, and what the choice goes by.

A program is a value. The scheduler's side reads off it what a plan costs; the workers look up the
module that runs it (`prefill/programs/`). Plans with equal programs may share a pass, so the fields
that are compared are all that a pass depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import ClassVar, NamedTuple

from vllm_segreuse.plan.check import Check

LAST_PROBES = 4
"""Queries that count twice under `Gather.SUM_AND_LAST`."""


class Gather(Enum):
    """How the attention paid to a token becomes its score."""

    SUM = "the sum over queries, heads and layers"
    MAX = "the largest share that any query pays with any head at any layer"
    SUM_AND_LAST = "the geometric mean of the sum, and of that over `LAST_PROBES` queries only"


@dataclass(frozen=True)
class ModelLayers:
    """The decoder layers of a model, as programs see them.

    Attributes:
        count: how many a pass runs: those that write KV.
        scored: those whose attention may give scores, ascending: they attend to the whole prompt,
            and are not the last, whose queries a pass does not compute.
        sharing: how many share the KV of these, and run in vLLM's own forward only.
    """

    count: int
    scored: tuple[int, ...]
    sharing: int = 0

    @classmethod
    def of_full_attention(cls, count: int) -> ModelLayers:
        """Layers that all attend to the whole prompt."""
        return cls(count, tuple(range(count - 1)))

    @property
    def in_all(self) -> int:
        """Those that vLLM's own forward runs."""
        return self.count + self.sharing

    @classmethod
    def joined(cls, stages: Sequence[ModelLayers]) -> ModelLayers:
        """The layers of a model, of those that each pipeline stage has, in order."""
        first = accumulate((stage.count for stage in stages), initial=0)
        scored = [
            begin + layer
            for begin, stage in zip(first, stages, strict=False)
            for layer in stage.scored
        ]
        count = sum(stage.count for stage in stages)
        return cls(count, tuple(scored), sum(stage.sharing for stage in stages))

    def scored_from(self, first: int) -> tuple[int, ...]:
        """Those of `scored` from layer `first` on; the last of them where there is none."""
        return tuple(layer for layer in self.scored if layer >= first) or self.scored[-1:]


class Counts(NamedTuple):
    """Tokens of a plan, by what is done with them.

    Attributes:
        tokens: all of them.
        always: computed at every layer, whatever is chosen.
        chosen: by their score, outside of these.
        probes: whose queries give the scores.
        entering: computed from each of the program's cuts on.
        suffix: behind the plan (`ReusePlan.suffix`); they run up to the choice.
    """

    tokens: int
    always: int
    chosen: int
    probes: int
    entering: tuple[int, ...] = ()
    suffix: int = 0


@dataclass(frozen=True)
class Program:
    """Base of all programs, which are frozen dataclasses.

    Attributes:
        check: of the plan's similar segments, once the program has run; None: no segment can be
            rejected. Plans may share a pass whatever is checked of each.
        chooses: whether tokens are chosen by a score.
        probes_suffix: whether queries of tokens behind the plan take part in the choice.
        computes_before_choice: whether new tokens that do not probe are done before the choice.
    """

    check: Check | None = field(default=None, kw_only=True, compare=False, repr=False)
    chooses: ClassVar[bool] = True
    probes_suffix: ClassVar[bool] = False
    computes_before_choice: ClassVar[bool] = False

    @property
    def dense_layers(self) -> int:
        """Leading layers at which every token is computed; reused KV is copied to the layers
        behind them."""
        return 0

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers at which tokens enter from boundary states, ascending."""
        return ()

    @property
    def may_choose_fewer(self) -> bool:
        """Whether fewer tokens may be chosen than allowed; how many, only the workers know."""
        return False

    @property
    def measures_drift(self) -> bool:
        """Whether what is recomputed is compared with what was moved (`prefill/drift.py`)."""
        return False

    @property
    def reports(self) -> bool:
        """Whether only the workers know how a plan has ended (`PlanOutcome`)."""
        return self.may_choose_fewer or self.measures_drift or self.check is not None

    def layers_before_choice(self, layers: ModelLayers) -> int:
        """How many of the first layers have to run before nothing but states of known tokens has
        to pass all the others; 0: the tokens are known beforehand."""
        return self.dense_layers

    def most_active(self, counts: Counts) -> int:
        """Most tokens that any layer computes."""
        if self.dense_layers:
            return counts.tokens + counts.suffix
        return counts.always + max(counts.chosen, counts.suffix)

    def cost(self, counts: Counts, layers: ModelLayers) -> int:
        """Tokens computed, summed over the layers of the model."""
        sparse_layers = layers.count - self.dense_layers
        return self.dense_layers * counts.tokens + sparse_layers * (counts.always + counts.chosen)


@dataclass(frozen=True)
class Fixed(Program):
    """The tokens of every layer are known beforehand."""

    dense_layers: int = 0
    chooses = False


@dataclass(frozen=True)
class Staged(Program):
    """Tokens enter at cuts, from the boundary states of their donors (`prefill/states.py`). At the
    layers below, their KV is moved; from there on they are computed with those that are always
    computed.

    Attributes:
        cuts: see `Program`.
    """

    cuts: tuple[int, ...] = ()
    chooses = False

    def layers_before_choice(self, layers: ModelLayers) -> int:
        """It is not known before the last layer where tokens enter: states are kept by layer."""
        return layers.count

    def most_active(self, counts: Counts) -> int:
        """Behind the last cut all of them are computed."""
        return super().most_active(counts) + sum(counts.entering)

    def cost(self, counts: Counts, layers: ModelLayers) -> int:
        """A token that enters is computed at the layers from its cut on."""
        behind = [layers.count - cut for cut in self.cuts]
        entering = sum(n * left for n, left in zip(counts.entering, behind, strict=True))
        return super().cost(counts, layers) + entering


@dataclass(frozen=True)
class Stock(Program):
    """The model's own forward computes what is computed, as it does for vLLM."""

    chooses = False


@dataclass(frozen=True)
class Boundary(Program):
    """SparseX: by the attention that the probes pay at the boundary layer, which is the last dense
    one, or the first. Where that attends to a window only, the next one that does not."""

    dense_layers: int = 0
    probes_suffix = True

    def scored_layer(self, layers: ModelLayers) -> int:
        """The layer whose attention gives the scores."""
        return layers.scored_from(max(self.dense_layers - 1, 0))[0]

    def layers_before_choice(self, layers: ModelLayers) -> int:
        """The dense ones, and up to the scored one."""
        return max(self.scored_layer(layers) + 1, self.dense_layers)

    def cost(self, counts: Counts, layers: ModelLayers) -> int:
        """Behind the dense layers, what is always computed passes the layers up to the scored one
        twice; the suffix passes no others."""
        before = self.layers_before_choice(layers)
        again = (before - self.dense_layers) * counts.always
        return super().cost(counts, layers) + again + before * counts.suffix


@dataclass(frozen=True)
class Deviation(Program):
    """CacheBlend: by how far keys and values behind the dense layers are from the reused ones."""

    dense_layers: int = 1

    def layers_before_choice(self, layers: ModelLayers) -> int:
        """The dense ones, and the next, whose keys and values are compared."""
        return self.dense_layers + 1


@dataclass(frozen=True)
class Probed(Program):
    """By the attention that the probes pay at all layers that attend to the whole prompt, but the
    last. What is always computed is computed first: a probe attends to the new text before it, too,
    and until then that is whatever the blocks held last. Behind the choice only the probes run once
    more, those of the suffix in vLLM's forward; other new text has not seen what was chosen.

    Attributes:
        gather: how that attention becomes a score.
        first_layer: at layers before it the attention does not count.
        threshold: tokens with a lower score are not chosen; 0: as many as allowed.
        levelling: scores are divided by the mean score of their segment to this power: with 0
            they are compared between segments as they are, with 1 only within each.
        carries: whether reused tokens that are not chosen take part in what recomputation changes
            of those that are (`prefill/carried.py`).
    """

    gather: Gather
    threshold: float = 0.0
    first_layer: int = 0
    levelling: float = 0.0
    carries: bool = False
    probes_suffix = True
    computes_before_choice = True

    @property
    def may_choose_fewer(self) -> bool:
        """Whether there is a threshold."""
        return self.threshold > 0

    @property
    def measures_drift(self) -> bool:
        """Without a threshold: how many tokens are compared is known then without waiting."""
        return not self.threshold

    def scored_layers(self, layers: ModelLayers) -> tuple[int, ...]:
        """The layers whose attention gives the scores."""
        return layers.scored_from(self.first_layer)

    def layers_before_choice(self, layers: ModelLayers) -> int:
        """None: stages carry it out in two goes through all layers, whose tokens are known before
        each (`segreuse_extras/pipeline/goes.py`). All, where no layer from the first one on is
        scored: by which of the others it chooses, no stage knows."""
        return layers.count if layers.scored[-1] < self.first_layer else 0

    def cost(self, counts: Counts, layers: ModelLayers) -> int:
        """Probes also pass the layers up to the last scored one, before the choice."""
        before = self.scored_layers(layers)[-1] + 1
        return super().cost(counts, layers) + before * (counts.probes + counts.suffix)
