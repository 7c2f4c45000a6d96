# SPDX-License-Identifier: Apache-2.0
"""Requests are drawn by chance, and within the limits."""

import random

from segreuse_extras.audit.draw import Draw
from segreuse_extras.audit.options import AuditOptions


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_share_of_the_requests_is_drawn() -> None:
    options = AuditOptions(share=0.25, per_minute=6000)
    draw = Draw(options, random.Random(1).random, Clock())
    drawn = [draw.draw(10, 0) for _ in range(4000)]
    assert set(drawn) == {None, "audited"}
    assert 900 < drawn.count("audited") < 1100


def test_none_and_all() -> None:
    for share, expected in ((0.0, None), (1.0, "audited")):
        draw = Draw(AuditOptions(share=share, per_minute=6000), random.Random(2).random, Clock())
        assert {draw.draw(10, 0) for _ in range(500)} == {expected}


def test_without_a_share_even_the_smallest_chance_draws_nothing() -> None:
    assert Draw(AuditOptions(), lambda: 0.0, Clock()).draw(10, 0) is None


def test_no_more_than_so_many_within_any_minute() -> None:
    clock = Clock()
    draw = Draw(AuditOptions(share=1.0, per_minute=2), lambda: 0.0, clock)
    found = []
    for pause_s in (0, 30, 1, 28.9, 0.2, 29, 1.1):
        clock.now += pause_s
        found.append(draw.draw(10, 0))
    # At 0 and 30 s; at 31 and 59.9 s both count; at 60.1 the first does not, at 90.2 the second.
    assert found == ["audited", "audited", "limit", "limit", "audited", "limit", "audited"]


def test_no_more_than_so_many_at_once() -> None:
    draw = Draw(AuditOptions(share=1.0, per_minute=6000), lambda: 0.0, Clock())
    assert draw.draw(10, 15) == "audited"
    assert draw.draw(10, 16) == "limit"


def test_long_prompts_are_too_long_and_cost_no_others_place() -> None:
    draw = Draw(AuditOptions(share=1.0, per_minute=1, max_prompt_tokens=10), lambda: 0.0, Clock())
    assert [draw.draw(n, 0) for n in (11, 10, 10)] == ["too_long", "audited", "limit"]
