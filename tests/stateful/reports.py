# SPDX-License-Identifier: Apache-2.0
"""What the report of a request that has ended must say, and what it must not."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from tests.stateful import isolated

if TYPE_CHECKING:
    from tests.stateful.world import World

_COMPLETED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)

Report = dict[str, Any]


def check(world: World, request: Request, report: Report) -> None:
    """AssertionError with what is wrong; counts what was seen."""
    counts = world.counts
    parts = [report[f"{kind}_tokens"] for kind in ("prefix", "reused", "new")]
    assert sum(parts) == request.num_prompt_tokens, f"a report that does not add up: {report}"
    assert 0 <= report["recomputed_tokens"] <= report["reused_tokens"], f"{report}"
    assert 0 <= report["similar_tokens"] <= report["reused_tokens"], f"{report}"
    assert world.setup.similarity or not report["similar_tokens"], f"{report}"
    counts["similar tokens"] += report["similar_tokens"]
    counts["frozen"] += report.get("frozen", False)
    counts[f"policy: {report['policy']}"] += report["reused_tokens"] > 0
    if "segreuse_score" in options_of(request):
        _check_chosen(world, request, report)
        return
    _check_ending(world, request, report)
    _check_observed(world, request, report)
    _check_explanation(world, request, report)
    if world.setup.isolated and request.status in _COMPLETED:
        isolated.check_report(request, report)


def options_of(request: Request) -> dict[str, Any]:
    """What a request asks of segment reuse."""
    params = request.sampling_params
    return (params.extra_args if params else None) or {}


def _check_chosen(world: World, request: Request, report: Report) -> None:
    """Of a request that scores: as many tokens as it was to choose, from where it was to."""
    first, stop, keep = options_of(request)["segreuse_score"]
    chosen = report.get("chosen")
    world.counts["scored"] += chosen is not None
    if chosen is not None:
        assert len({*chosen}) == keep, report
        assert all(first <= position < stop for position in chosen), report


def _check_observed(world: World, request: Request, report: Report) -> None:
    """A request that is observed reuses nothing, and says what it would."""
    observed = report["observed"]
    world.counts["observed"] += observed is not None
    asked = options_of(request).get("segreuse_observe")
    needs_plan = report["policy"] in ("link", "compress")  # it is defined by what it reuses
    reuses = report["reused_tokens"] and not needs_plan
    assert not (asked and reuses), f"it was only to be observed: {report}"
    assert (observed is not None) is (report["bypass_reason"] == "observed"), report
    if observed is not None:
        assert 0 < observed["reused_tokens"] <= report["new_tokens"]
        assert 0 <= observed["recomputed_tokens"] <= observed["reused_tokens"]


def _check_explanation(world: World, request: Request, report: Report) -> None:
    """The stretches are all of the prompt, and add up to what the report says."""
    asked = options_of(request).get("segreuse_explain")
    assert ("explain" in report) is bool(asked), report
    if not asked:
        return
    end, tokens = 0, Counter[str]()
    for stretch in report["explain"]:
        assert stretch["start"] == end, f"not one after the other: {report}"
        assert stretch["tokens"] > 0, report
        end += stretch["tokens"]
        tokens[stretch["source"]] += stretch["tokens"]
        world.counts[f"explained: {stretch.get('reason', stretch['source'])}"] += 1
    edit = report.get("edit")
    if edit is not None:
        world.counts["explained: edit"] += 1
        behind = edit["at"] + edit["new_tokens"]
        assert report["prefix_tokens"] <= edit["at"] <= behind, report
        assert behind + edit["found_tokens"] < end, report
        assert edit["gone_tokens"] >= 0, report
        assert edit["gone_tokens"] + edit["new_tokens"] > 0, report
        assert edit["found_tokens"] > 0, report
    outcome = report["observed"] or report
    found = outcome["reused_tokens"]
    # Tokens that were generated before a preemption are behind the prompt.
    assert end >= request.num_prompt_tokens, report
    assert tokens["prefix"] == report["prefix_tokens"], report
    if found:
        assert tokens["segment"] + tokens["similar"] == found, report
        assert tokens["similar"] == (report["observed"] or report)["similar_tokens"], report
        again = [s["recomputed"] for s in report["explain"] if "position" in s]
        world.counts[f"explained: recomputed {'unknown' if None in again else 'known'}"] += 1
        if None not in again:
            runs = [run for segment in again for run in segment]
            assert sum(length for _, length in runs) == outcome["recomputed_tokens"], report


def _check_ending(world: World, request: Request, report: Report) -> None:
    """What the workers did is what the report says, though only they knew."""
    taken = world.worker.taken.get(request.request_id, 0)
    ending = world.worker.endings.get(request.request_id)
    if (
        ending is None
        or report["reused_tokens"] == taken  # its first admission had no plan
        or request.status not in _COMPLETED  # it may have ended before they reported
        or request.request_id in world.worker.called_back
    ):
        return
    fields = ("recomputed_tokens", "drift", "in_full", "accepted_segments")
    reported = tuple(report[name] for name in (*fields, "rejected_segments", "rejected_tokens"))
    drift = None if ending.drift is None else round(ending.drift, 4)
    assert reported == ending._replace(drift=drift), (
        f"{request.request_id} reports {reported}, not {ending}"
    )
    max_drift = options_of(request).get("segreuse_max_drift")
    too_far = None not in (drift, max_drift) and ending.drift > max_drift
    assert report["in_full"] is too_far, f"{ending} where {max_drift} is allowed"
    tokens = report["reused_tokens"] + report["new_tokens"]
    work = report["computed_share"] * tokens
    # What is restored, or taken of others, is not computed whatever drifts.
    in_full = work > tokens - report["exact_tokens"] - taken
    assert in_full or not too_far, f"less than all was computed: {report}"
    world.counts["chosen by workers"] += report["policy"] == "peaks" and ending.recomputed > 0
    world.counts["drifts"] += ending.drift is not None
    world.counts["in full"] += ending.in_full
    world.counts["accepted segments"] += ending.accepted
    world.counts["rejected tokens"] += ending.added
