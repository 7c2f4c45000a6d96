# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: what it orders, and what it lets a request reuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from segreuse_extras.states.again import ReadAgain
from segreuse_extras.states.messages import Captured, MapFacts, Placed
from segreuse_extras.states.scheduler import SegmentStates
from vllm_segreuse.config import RequestOptions, SegReuseConfig
from vllm_segreuse.plan import ModelLayers, Segments
from vllm_segreuse.scheduling.methods import Methods
from vllm_segreuse.scheduling.tracked import Bypass


class Counts(dict[str, int]):
    def inc(self, name: str, n: int = 1) -> None:
        self[name] = self.get(name, 0) + n


class Made:
    """The half on a core of which it needs little."""

    def __init__(self, **options: Any) -> None:
        self.stats = Counts()
        core: Any = SimpleNamespace(
            config=SegReuseConfig(**options),
            stats=self.stats,
            namespaces=SimpleNamespace(digest=lambda namespace: namespace),
            block_size=16,
            group=SimpleNamespace(states=(0, 2)),
        )
        self.feature = SegmentStates(core)

    def admitted(self, images: Any = None, **options: Any) -> Any:
        """What becomes of a request with these options."""
        from vllm_segreuse.scheduling.tracked import Method, TrackedRequest

        found: Any = SimpleNamespace()
        method: Any = Method("", found, lambda *_: None, work=lambda _: 9, later_turns=lambda: 1.0)
        prompt: Any = SimpleNamespace(namespace=7)
        tracked = TrackedRequest("request", prompt, method)
        given = RequestOptions(**({"policy": "shift"} | options))
        methods = Methods(16, ModelLayers.of_full_attention(8), found)
        arriving: Any = SimpleNamespace(
            tracked=tracked, images=images, options=given, methods=methods
        )
        arriving.bypass = lambda reason: setattr(tracked, "mode", Bypass(reason))
        self.feature.admit(arriving)
        return tracked


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"policy": "focus"}, None),
        ({"policy": "epic"}, "states_need_other_policy"),
        ({"policy": "prophet"}, "states_need_other_policy"),
        ({"policy": "peaks"}, "states_need_other_policy"),
        ({"context": "same"}, "states_of_other_context"),
        ({"images": "some"}, "multimodal"),
    ],
)
def test_what_a_map_cannot_serve_is_bypassed_by_name(given: Any, reason: str | None) -> None:
    tracked = Made().admitted(**given)
    assert tracked.bypass == reason
    assert tracked.method.later_turns is None
    assert tracked.method.left_behind == ()


def test_focus_reads_whole_segments_again() -> None:
    tracked = Made().admitted(policy="focus")
    finder = tracked.method.finder
    finder.start, finder.taken = (
        100,
        [Placed(number, 110 + 60 * number, 160 + 60 * number) for number in range(8)],
    )
    reused = np.zeros(600, np.bool_)
    for first, stop in finder.spans:
        reused[first:stop] = True
    segments = Segments.elsewhere(
        np.array([first for first, _ in finder.spans], np.int32), np.full(8, 900, np.int32)
    )
    recipe = tracked.method.make_recipe(reused, segments)
    assert recipe.program == ReadAgain(100)
    assert recipe.top_k == 100
    assert np.array_equal(recipe.candidates, reused)
    assert tracked.method.work is None, "nothing of what was found is left out"
    of_share = Made().admitted(policy="focus", recompute_ratio=0.5)
    of_share.method.finder.start, of_share.method.finder.taken = finder.start, finder.taken
    assert of_share.method.make_recipe(reused, segments).program == ReadAgain(200)
    shift = Made().admitted(policy="shift").method
    assert shift.make_recipe(reused, segments) is None
    assert shift.work is not None, "it is a policy as others"


def test_there_is_room_for_as_many_maps_as_the_budget_holds() -> None:
    made = Made(state_bytes=1000)
    made.feature.learned(MapFacts(300))
    assert made.feature.catalogue.capacity == 3


def test_reports_of_workers_are_noted() -> None:
    made = Made()
    made.feature.learned(MapFacts(1 << 20))
    catalogue = made.feature.catalogue

    texts = [np.arange(n, 60 + n, dtype=np.int32) for n in range(3)]
    numbers = [catalogue.order(7, text, "request", ())[0] for text in texts]
    a, b, c = (number for number in numbers if number is not None)
    catalogue.remove(c)
    made.feature.reported(Captured((a, c), (b,)))
    assert made.feature.status() == {"state_maps": 1}
    assert made.stats["state_maps_total"] == 1
    step = made.feature.end_step([], True)
    assert step is not None
    assert step.dropped == [c], "nobody wants it any more"
    assert made.feature.end_step([], True) is None


def test_a_request_that_ends_and_a_reset_drop_maps() -> None:

    made = Made()
    made.feature.learned(MapFacts(1 << 20))
    catalogue = made.feature.catalogue
    text = np.arange(60, dtype=np.int32)
    kept, _ = catalogue.order(7, text, "other", ())
    assert kept is not None
    catalogue.complete(kept)
    left, _ = catalogue.order(7, text + 1, "request", ())
    ending: Any = SimpleNamespace(request=SimpleNamespace(request_id="request"))
    made.feature.finished(ending)
    step = made.feature.end_step([], True)
    assert step is not None
    assert step.dropped == [left]
    made.feature.reset()
    step = made.feature.end_step([], True)
    assert step is not None
    assert step.dropped == [kept]


def test_a_plan_of_parts_costs_the_request_its_reuse() -> None:

    made = Made()
    tracked = made.admitted()
    tracked.plan = SimpleNamespace(start=0, reused=np.array([False, True, True, False]))
    request: Any = SimpleNamespace()
    with pytest.raises(RuntimeError, match="a plan must reuse whole segments"):
        made.feature.decided(request, tracked, 4)
    tracked.plan = None
    assert made.feature.decided(request, tracked, 0) == 0
