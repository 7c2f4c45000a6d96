# SPDX-License-Identifier: Apache-2.0
"""What a plan would be under other options of its request."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from segreuse_extras.conversations.options import ConversationOptions
from segreuse_extras.similar.options import SimilarServer
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.options.server import ServerOptions
from vllm_segreuse.plan import for_similar
from vllm_segreuse.policies import WITHOUT_CHOICE
from vllm_segreuse.scheduling.plan_maker import least_work

if TYPE_CHECKING:
    from vllm_segreuse.plan import IntArray, ReusePlan
    from vllm_segreuse.scheduling.parts import Parts


def finds_alike(server: ServerOptions, one: PolicyOptions, other: PolicyOptions) -> bool:
    """Whether requests with these options find the same."""
    has_cuts = bool(SimilarServer.of(server).cuts)
    cuts = [has_cuts and it.policy in WITHOUT_CHOICE for it in (one, other)]
    return (
        cuts[0] is cuts[1]
        and (one.policy == "exact") is (other.policy == "exact")
        and all(
            getattr(one, name) == getattr(other, name) for name in ConversationOptions.model_fields
        )
    )


def computed_by(
    parts: Parts, plan: ReusePlan, options: PolicyOptions, token_ids: IntArray
) -> ReusePlan | None:
    """The plan of a request with other options, if these find the same; see `ReusePlan`.

    Args:
        parts: of the scheduler's half that made the plan.
        token_ids: int32, of the request, which has no images.

    Returns:
        None: they would reuse less of it, nothing, or more than was planned.
    """
    methods, turns = parts.methods, ConversationOptions.of(options)
    work, halo = methods.work_of(options), methods.finder(options).halo
    weighs_turns = turns.weigh_turns and not turns.recompute_once
    later = parts.features.named("conversations").later_turns() if weighs_turns else 0.0
    make_recipe = functools.partial(methods.recipe, options, work)
    start, stop = plan.start, plan.stop if options.policy == "exact" else len(token_ids) - 1
    pieces, recipe = least_work(make_recipe, work, plan.pieces, start, stop, later, halo)
    if recipe is None or len(pieces) < len(plan.pieces) or plan.left_out:
        return None
    recipe = for_similar(recipe, halo, plan.pieces, start, stop)
    return plan.computed_by(recipe, token_ids[start : stop + 1])
