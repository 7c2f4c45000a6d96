# SPDX-License-Identifier: Apache-2.0
"""Ways to serve the same requests: what is cached, and what of it is reused.

An arm is a line of `ARMS`. One that needs other options of the server gets a server of its own; the
others share one and take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

NONE, PREFIX, CONTENT, SIMILAR = "none", "prefix", "content", "similar"
CLOSE, TESTED, STATES = "similar-close", "similar-tested", "similar-states"
ONCE, UNWEIGHED = "similar-once", "similar-unweighed"
SERVER: Mapping[str, Any] = MappingProxyType(
    # Those that `configs/agents.yaml` had when these arms were first compared.
    {"min_reused_tokens": 64, "max_provenance_depth": 8, "weigh_turns": True, "similarity": {}}
)
"""Options of the server that all arms have which say nothing else."""


@dataclass(frozen=True)
class Arm:
    """One way to serve requests.

    Attributes:
        name: as tables have it.
        prefix: whether vLLM's prefix cache may find what the same arm computed.
        options: of the request, without `segreuse_`; None: it has no extra keys.
        server: options laid over `SERVER`.
    """

    name: str
    prefix: bool = True
    options: Mapping[str, Any] | None = None
    server: Mapping[str, Any] = field(default_factory=dict)

    @property
    def server_options(self) -> dict[str, Any]:
        """All options of the server that it needs."""
        return {**SERVER, **self.server}

    def extra_args(self, space: str) -> dict[str, Any]:
        """What a request of the arm has beside its prompt, offline.

        Args:
            space: name of the namespace that it shares.
        """
        if self.options is None:
            return {}
        named = {f"segreuse_{name}": value for name, value in self.options.items()}
        return {"extra_keys": [space], **named}

    def body(self, space: str, request: object) -> dict[str, Any]:
        """The same over HTTP; requests without extra keys have a salt.

        Args:
            space: name of the namespace that it shares.
            request: what no other request of the space has.
        """
        if self.options is None:
            return {"cache_salt": space if self.prefix else f"{space} {request}"}
        options = self.extra_args(space)
        return {"extra_keys": options.pop("extra_keys"), "vllm_xargs": options}


def _named(*arms: Arm) -> Mapping[str, Arm]:
    return MappingProxyType({arm.name: arm for arm in arms})


def _searched(name: str, policy: str | None = None, **similarity: Any) -> Arm:
    """An arm whose server has other options of `similarity`. What is found is reused whatever later
    turns lose: it is to be compared."""
    options: dict[str, Any] = {"similarity": 1, "weigh_turns": 0}
    if policy is not None:
        options["policy"] = policy
    return Arm(name, options=options, server={"similarity": similarity})


def _layered(name: str, table: Mapping[int | str, int | str], **similarity: Any) -> Arm:
    """An arm of a policy whose tokens may enter between layers (`w_exact`)."""
    w_exact = {str(layer): tokens for layer, tokens in table.items()}
    return _searched(name, "shift", w_exact=w_exact, **similarity)


_STATES = _layered(STATES, {8: 16, 16: 64, "all": "full_prefix"})
ARMS = _named(
    Arm(NONE, prefix=False),
    Arm(PREFIX),
    Arm(CONTENT, options={"similarity": 0}),
    Arm(SIMILAR, options={"similarity": 1}),
    Arm(ONCE, options={"similarity": 1, "recompute_once": 1}),
    _STATES,
    replace(_STATES, name="prefix-states", options=None),
)
"""What is timed and compared over HTTP. The last two share a server of their own, which keeps
boundary states, and are timed later: the prefix cache there says what keeping them costs."""


ABLATIONS = _named(
    # How much of what is reused is computed again, and how often.
    Arm(UNWEIGHED, options={"similarity": 1, "weigh_turns": 0}),
    Arm("content-unweighed", options={"similarity": 0, "weigh_turns": 0}),
    Arm("content-once", options={"similarity": 0, "recompute_once": 1}),
    Arm("similar-shift", options={"similarity": 1, "policy": "shift"}),
    Arm("similar-focus-30", options={"similarity": 1, "recompute_ratio": 0.3}),
    Arm("similar-all", options={"similarity": 1, "policy": "sparsex", "dense_layers": 0,
                                "recompute_ratio": 1.0}),
    Arm(CLOSE, options={"similarity": 1, "weigh_turns": 0, "max_drift": 1.0}),
    # What is found. The first is what drafts of this method propose.
    _searched("similar-tau-80", threshold=0.8),
    _searched("similar-run-16", min_run_tokens=16),
    _searched("similar-run-32", min_run_tokens=32),
    _searched("similar-context-8", min_context_tokens=8),
    # Halos, and what they are for.
    _searched("similar-halo-4", halo_tokens=4),
    _searched("similar-halo-8", halo_tokens=8),
    _searched("similar-halo-16", halo_tokens=16),
    _searched(TESTED, halo_tokens=8, max_boundary_drift=0.3),
    # The lower layers only are moved, whatever is in front; then by what is in front.
    _layered("similar-layers-8", {8: 0}),
    _layered("similar-layers-16", {16: 0}),
    _layered("similar-layers-16-halo-8", {16: 0}, halo_tokens=8),
    _layered("similar-states-short", {8: 8, 16: 16, "all": 32}),
)  # fmt: skip
"""Compared by their distance from full prefill and by their work only."""


def find(names: Sequence[str]) -> list[Arm]:
    """Arms by name.

    Raises:
        ValueError: there is none; the text says which there are.
    """
    known = {**ARMS, **ABLATIONS}
    for name in names:
        if name not in known:
            raise ValueError(f"no arm {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names]


def by_server(arms: Sequence[Arm]) -> list[tuple[dict[str, Any], list[Arm]]]:
    """Options of each server that is needed, with the arms that share it."""

    def key(arm: Arm) -> str:
        return repr(sorted(arm.server_options.items()))

    first = {key(arm): number for number, arm in reversed(list(enumerate(arms)))}
    ordered = sorted(arms, key=lambda arm: first[key(arm)])
    groups = [list(group) for _, group in groupby(ordered, key)]
    return [(group[0].server_options, group) for group in groups]
