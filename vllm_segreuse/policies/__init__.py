# SPDX-License-Identifier: Apache-2.0
"""Policies: which reused tokens are computed again. Each module here is one, of the module's name.

A policy runs in the scheduler process and is free of torch: it turns what is known about a request
(which tokens are reused, the options) into a `Recipe`, which the workers carry out. Its module
defines `recipe(situation)`, and `CHOOSES = False` if its recipes choose no token by its score and
have no dense layers.
"""

from __future__ import annotations

from vllm_segreuse.plan.discovery import modules_of
from vllm_segreuse.policies.base import Policy, Situation


def find_policies() -> dict[str, Policy]:
    """Every policy of this folder, by name, in alphabetical order."""
    return {name: module.recipe for name, module in modules_of(__name__).items()}


POLICIES = find_policies()
"""Those that a server or a request may choose."""

WITHOUT_CHOICE = frozenset(
    name for name, module in modules_of(__name__).items() if not getattr(module, "CHOOSES", True)
)
"""Those whose recipes name every token that is computed: others may enter between layers."""

__all__ = ["POLICIES", "WITHOUT_CHOICE", "Policy", "Situation", "find_policies"]
