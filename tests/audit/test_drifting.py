# SPDX-License-Identifier: Apache-2.0
"""When a namespace has drifted, and when it recovers."""

from typing import Any

import pytest

from segreuse_extras.audit import drifting as module
from segreuse_extras.audit.drifting import Drifted, Drifting
from segreuse_extras.audit.options import AuditOptions
from tests.audit.test_draw import Clock


def made(clock: Clock, **options: Any) -> Drifting:
    given = {"share": 1.0, "max_kl": 0.5, "window": 20, "min_audits": 5, "recover_s": 60}
    return Drifting(AuditOptions(**given | options), clock)


def noted(subject: Drifting, kls: list[float], namespace: int = 7) -> list[Drifted | None]:
    return [subject.note(namespace, "docs", kl) for kl in kls]


def test_more_than_a_tenth_above_the_bound_is_drift() -> None:
    subject = made(Clock())
    assert noted(subject, [0.9] + 9 * [0.1]) == 4 * [None] + [Drifted(7, "docs", 5, 1, 1060.0)] + (
        5 * [None]
    ), "one of five"
    assert noted(made(Clock()), 9 * [0.1] + [0.9] + [0.1]) == 11 * [None], "one of ten is a tenth"
    found = noted(made(Clock()), 9 * [0.1] + 2 * [0.9])
    assert found[:10] == 10 * [None]
    assert found[10] == Drifted(7, "docs", 11, 2, 1060.0)


def test_what_is_at_the_bound_is_not_above_it() -> None:
    assert noted(made(Clock()), 20 * [0.5]) == 20 * [None]


def test_fewer_audits_than_wanted_are_no_drift() -> None:
    assert noted(made(Clock()), 4 * [9.0]) == 4 * [None]


def test_audits_behind_the_window_do_not_count() -> None:
    subject = made(Clock(), window=5, min_audits=5)
    assert noted(subject, 4 * [0.1]) == 4 * [None]
    subject = made(Clock(), window=20, min_audits=20)
    assert noted(subject, 3 * [9.0] + 16 * [0.1]) == 19 * [None]
    assert noted(made(Clock(), window=20, min_audits=20), 3 * [9.0] + 17 * [0.1])[-1] is not None
    late = made(Clock(), window=11, min_audits=11)
    assert noted(late, [9.0] + 10 * [0.1] + [9.0]) == 12 * [None], "the first has left the window"


def test_without_a_bound_nothing_drifts() -> None:
    assert noted(made(Clock(), max_kl=None), 50 * [9.0]) == 50 * [None]


def test_namespaces_are_apart() -> None:
    subject = made(Clock())
    noted(subject, 5 * [9.0], namespace=1)
    noted(subject, 50 * [0.1], namespace=2)
    assert subject.has_drifted(1)
    assert not subject.has_drifted(2)
    assert not subject.has_drifted(3)
    assert [each.namespace for each in subject.all_drifted()] == [1]


def test_it_recovers_after_its_time_and_is_looked_at_anew() -> None:
    clock = Clock()
    subject = made(clock)
    noted(subject, 5 * [9.0])
    clock.now += 59.9
    assert subject.has_drifted(7)
    assert noted(subject, 5 * [9.0]) == 5 * [None], "of requests that came before"
    assert subject.recovered() == []
    clock.now += 0.1
    assert not subject.has_drifted(7)
    assert subject.all_drifted() == []
    assert [each.namespace for each in subject.recovered()] == [7]
    assert subject.recovered() == []
    assert noted(subject, 4 * [9.0]) == 4 * [None]
    assert noted(subject, [9.0]) != [None]
    assert subject.has_drifted(7)


@pytest.mark.parametrize("kl", [0.1, 9.0])
def test_what_is_kept_is_bounded(kl: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NAMESPACES", 3)
    subject = made(Clock(), min_audits=1)
    for namespace in (1, 2, 3, 1, 4, 5):
        noted(subject, [kl], namespace)
    audited, drifted = set(subject.audited()), {each.namespace for each in subject.all_drifted()}
    assert (audited, drifted) == (({1, 4, 5}, set()) if kl < 0.5 else (set(), {3, 4, 5}))
