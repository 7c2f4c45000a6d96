# SPDX-License-Identifier: Apache-2.0
"""Anything may happen to an engine in any order: see `world` for what, `invariants` for what holds.

`make stress` runs the same machine for longer.
"""

from hypothesis import HealthCheck, settings

from tests.stateful.machine import Machine

TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=settings().max_examples,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
