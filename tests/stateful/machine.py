# SPDX-License-Identifier: Apache-2.0
"""The stateful model: rules for everything that may happen to a `World`, in any order."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.sched.interface import PauseState

from tests.stateful import compressing, isolated
from tests.stateful.drafting import DraftingWorker
from tests.stateful.faults import OTHERS, SITES, Faults, InjectedError
from tests.stateful.world import (
    DENSE_LAYERS,
    DOCUMENTS,
    MAX_DRIFTS,
    MAX_TOKENS,
    RATIOS,
    SIZE,
    Ask,
    Setup,
    World,
)
from vllm_segreuse.options.server import Switch
from vllm_segreuse.plan import FreezeOrder
from vllm_segreuse.policies import POLICIES

totals: Counter[str] = Counter()
"""What all machines of this process did, for the summary of long runs."""

_SETUP: dict[str, st.SearchStrategy[Any]] = {
    "num_blocks": st.sampled_from([20, 28, 40, 80]),
    "in_flight": st.integers(1, 3),
    "priority": st.booleans(),
    "heal_tokens": st.sampled_from([0, 0, 8]),
    "max_step_tokens": st.sampled_from([10, 24, 48]),
    "max_running": st.sampled_from([2, 6]),
    "long_prompt_tokens": st.sampled_from([0, 9]),
    "whole_prompts": st.booleans(),
    "watermark": st.sampled_from([0.0, 0.1]),
    "max_depth": st.sampled_from([4, 1, 0]),
    "frozen_pressure": st.sampled_from([0.9, 0.9, 0.5]),
    "spread_tokens": st.sampled_from([0, 1, 1, 5]),
    "similarity": st.booleans(),
    "halo": st.booleans(),
    "tier_rows": st.sampled_from([0, 0, 24]),
    "drafts": st.sampled_from([0, 0, 3]),
    "audits": st.booleans(),
    "isolated": st.sampled_from([False, False, True]),
    "compressed": st.booleans(),
    "sessions": st.booleans(),
}


def _setups(**fixed: Any) -> st.SearchStrategy[Setup]:
    strategies = {
        name: value if isinstance(value, st.SearchStrategy) else st.just(value)
        for name, value in fixed.items()
    }
    return st.builds(Setup, **_SETUP | strategies)


WORLDS = {
    "any": _setups(),
    "plain": _setups(drafts=0, audits=False, isolated=False, compressed=False, sessions=False),
    "isolated": _setups(isolated=True),
    "compressed": _setups(compressed=True, isolated=False),
    "sessions": _setups(sessions=True, isolated=False),
    "audits": _setups(audits=True, isolated=False),
    "drafts": _setups(drafts=3),
    "stages": _setups(
        stages=2,
        asynchronous=st.booleans(),
        tier_rows=0,
        drafts=0,
        similarity=False,
        audits=False,
        isolated=False,
    ),
}
"""What the engines of a machine have in common, by name."""

OPTIONS = st.builds(
    lambda policy, ratio, dense, overflow, drift, least, observe, explain, once: {
        "segreuse_policy": policy,
        "segreuse_recompute_ratio": ratio,
        "segreuse_dense_layers": dense,
        "segreuse_overflow_tokens": overflow,
        "segreuse_max_drift": drift,
        "segreuse_min_reused_tokens": least,
        "segreuse_observe": observe,
        "segreuse_explain": explain,
        "segreuse_recompute_once": once,
    },
    policy=st.sampled_from([*POLICIES]),
    ratio=st.sampled_from(RATIOS),
    dense=st.sampled_from(DENSE_LAYERS),
    overflow=st.sampled_from([0, 1, None]),
    drift=st.sampled_from(MAX_DRIFTS),
    least=st.sampled_from([4, 8]),
    observe=st.sampled_from([False, False, False, True]),
    explain=st.booleans(),
    once=st.booleans(),
)
PARTS = st.lists(
    st.tuples(st.integers(0, len(DOCUMENTS) - 1), st.integers(0, 5), st.integers(0, 6)),
    min_size=1,
    max_size=4,
)
COMMON = st.builds(
    Ask, parts=PARTS, keys=st.just(("a",)), options=OPTIONS, max_tokens=st.integers(1, 12)
)
"""Requests of one namespace: most reuse is among these."""
OTHER = st.builds(
    Ask,
    parts=PARTS,
    keys=st.sampled_from([("a",), ("b",), ("a", "b"), None, *((str(n),) for n in range(8))]),
    salt=st.sampled_from([None, None, "salt"]),
    lora=st.sampled_from([False, False, True]),
    options=OPTIONS,
    max_tokens=st.integers(1, 12),
    priority=st.integers(0, 2),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
)
DISTURBANCES = [
    *("exhaust", "release", "exhaust", "release", "reset", "preempt all"),
    *("off", "observe", "on", "on", "on"),
    *("PAUSED_NEW", "PAUSED_ALL", "UNPAUSED", "UNPAUSED"),
]
PICKS = st.integers(0, 7)
KEYS = st.sampled_from([("a",), ("a",), ("b",), None])
ISOLATED = st.builds(
    lambda tokens, **others: Ask(tokens=tokens, **others),
    tokens=st.builds(
        isolated.prompt,
        st.sampled_from([0, 0, 1, 4, 5]),
        st.lists(st.integers(0, len(isolated.TEXTS) - 1), min_size=1, max_size=3),
        st.integers(1, 5),
    ),
    keys=KEYS,
    salt=st.sampled_from([None, None, "salt"]),
    lora=st.sampled_from([False, False, True]),
    options=st.fixed_dictionaries(
        {"segreuse_explain": st.booleans(), "segreuse_observe": st.booleans()}
    ),
    max_tokens=st.sampled_from([1, 3, 8]),
    priority=st.integers(0, 2),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
)


class Machine(RuleBasedStateMachine):
    """One engine, from its start to the last request's end."""

    setups = WORLDS["any"]
    world: World
    faults: Faults

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.world = World(data.draw(self.setups, "setup"))
        self.faults = Faults(self.world)

    @rule(asks=st.lists(COMMON, min_size=1, max_size=3), turns=st.integers(0, 3))
    def arrive(self, asks: list[Ask], turns: int) -> None:
        for ask in asks:
            self.world.add(ask)
        self.step(turns)

    @rule(ask=OTHER, n=st.sampled_from([1, 1, 1, 2, 3]))
    def another_arrives(self, ask: Ask, n: int) -> None:
        first = self.world.add(ask)
        ask.tokens = list(first.prompt_token_ids or [])
        for ask.seed in range(1, n):
            self.world.add(ask)

    @rule(
        document=st.integers(0, len(DOCUMENTS) - 1),
        keys=st.sampled_from([("a",), ("a",), ("b",)]),
        again=st.booleans(),
        turns=st.integers(0, 4),
    )
    def ingest(self, document: int, keys: tuple[str, ...], again: bool, turns: int) -> None:
        """A document is computed behind one token of context, to be frozen when it has ended."""
        tokens = [2, *DOCUMENTS[document]]
        tokens += tokens[-1:] * (-len(tokens) % SIZE)
        order = FreezeOrder(f"{keys[0]}{document}", 0, 1, 1)
        for _ in range(1 + again):
            self.world.add(Ask(tokens=list(tokens), keys=keys, max_tokens=1, freeze=order))
        self.step(turns)

    @rule(document=st.integers(0, len(DOCUMENTS) - 1), key=st.sampled_from("ab"))
    def delete(self, document: int, key: str) -> None:
        with suppress(InjectedError):
            self.world.unfreeze([f"{key}{document}"] * 2)

    @precondition(lambda self: self.world.setup.isolated)
    @rule(asks=st.lists(ISOLATED, min_size=1, max_size=3), turns=st.integers(0, 3))
    def arrive_with_documents(self, asks: list[Ask], turns: int) -> None:
        for ask in asks:
            self.world.add(ask)
        self.step(turns)

    @precondition(lambda self: self.world.setup.compressed and not self.world.setup.isolated)
    @rule(
        kind=st.sampled_from(compressing.KINDS),
        document=st.integers(0, len(DOCUMENTS) - 1),
        key=st.sampled_from("aab"),
        part=st.integers(0, 1),
        turns=st.integers(0, 4),
    )
    def compress(
        self, kind: compressing.Kind, document: int, key: str, part: int, turns: int
    ) -> None:
        """A knowledge base has a document compressed, in some order."""
        text = DOCUMENTS[document]
        tokens, keys, options = compressing.order(kind, key, document, text, part, SIZE)
        self.world.add(Ask(tokens=tokens, keys=keys, options=options, max_tokens=1))
        self.step(turns)

    @precondition(lambda self: self.world.setup.compressed and not self.world.setup.isolated)
    @rule(
        documents=st.lists(st.integers(0, len(DOCUMENTS) - 1), min_size=1, max_size=2, unique=True),
        key=st.sampled_from("aab"),
        ask=COMMON,
        turns=st.integers(0, 2),
    )
    def name(self, documents: list[int], key: str, ask: Ask, turns: int) -> None:
        """A request names compressed documents, which may not be there, or of others."""
        tokens: list[int] = []
        for document in documents:
            tokens += [
                *range(200, 200 + ask.max_tokens % 4),
                *compressing.kept(DOCUMENTS[document]),
            ]
        ask.tokens, ask.keys = [*tokens, 300, 301], (key,)
        named = [compressing.entry(key, document) for document in documents]
        ask.options["segreuse_documents"] = named
        self.world.add(ask)
        self.step(turns)

    @precondition(lambda self: self.world.setup.compressed)
    @rule(document=st.integers(0, len(DOCUMENTS) - 1), key=st.sampled_from("ab"))
    def delete_compressed(self, document: int, key: str) -> None:
        with suppress(InjectedError):
            self.world.unfreeze([compressing.entry(key, document)])
            self.world.unfreeze([compressing.anchored(key, document)])

    @precondition(lambda self: self.world.setup.sessions)
    @rule(
        pick=PICKS,
        keys=KEYS,
        tokens=st.lists(st.integers(10, 60), min_size=1, max_size=6),
        answer=st.integers(1, 4),
        turns=st.integers(0, 3),
    )
    def stream(
        self, pick: int, keys: tuple[str, ...] | None, tokens: list[int], answer: int, turns: int
    ) -> None:
        """A session begins, or goes on."""
        sessions = self.world.sessions
        if pick < len(sessions.open):
            sessions.go_on(sessions.open[pick], tokens, answer, MAX_TOKENS - 8)
        else:
            sessions.begin([*DOCUMENTS[pick % len(DOCUMENTS)], *tokens], keys, answer)
        self.step(turns)

    @precondition(lambda self: self.world.finished)
    @rule(pick=PICKS, ask=COMMON)
    def go_on(self, pick: int, ask: Ask) -> None:
        """A request continues one that has ended, with its answer: answers donate, too."""
        before = self.world.finished[pick % len(self.world.finished)]
        identity, _ = self.world.identities[before.request_id]
        ask.tokens = [*before.all_token_ids[:], 5, 6, 7]
        ask.keys, ask.salt, ask.lora = identity.keys, identity.salt, identity.lora is not None
        self.world.add(ask)

    @rule(turns=st.integers(1, 4))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.world.step()
            self.world.check()

    @precondition(lambda self: self.world.may_schedule)
    @rule()
    def schedule(self) -> None:
        self.world.schedule()

    @precondition(lambda self: self.world.under_way)
    @rule()
    def complete(self) -> None:
        self.world.complete()

    @precondition(lambda self: self.world.live)
    @rule(pick=PICKS, twice=st.booleans())
    def abort(self, pick: int, twice: bool) -> None:
        live = self.world.live
        request = live[pick % len(live)]
        self.world.abort(request)
        if twice:
            self.world.abort(request)
            self.world.scheduler.connector.request_finished(request, [])

    @rule(what=st.sampled_from(DISTURBANCES), blocks=st.integers(1, 40))
    def disturb(self, what: str, blocks: int) -> None:
        world = self.world
        match what:
            case "exhaust":
                world.hold(blocks)
            case "release":
                world.release()
            case "reset" | "preempt all":
                world.reset(preempt=what == "preempt all")
            case "off" | "on" | "observe":
                states: dict[str, Switch] = {"off": False, "on": True, "observe": "observe"}
                world.switch(states[what])
            case _:
                world.pause(PauseState[what])

    @rule(pick=PICKS, stride=st.integers(2, 9))
    def evict(self, pick: int, stride: int) -> None:
        self.world.evict(pick, stride)

    @rule(site=st.sampled_from([*SITES, *OTHERS, "planned"]))
    def fail(self, site: str) -> None:
        self.faults.arm(site)

    @invariant()
    def everything_holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        world: Any = getattr(self, "world", None)
        if world is None or sys.exc_info()[0] is not None:
            return  # what went wrong must not be hidden by what it leads to
        self.faults.disarm()
        note("drain")
        world.drain()
        totals.update(world.counts)
        totals.update({f"fault: {site}": n for site, n in self.faults.raised.items()})
        totals.update({"engines": 1, "copied tokens": world.worker.copied_tokens})
        if isinstance(world.worker, DraftingWorker):
            totals["accepted drafts"] += world.worker.accepted
            totals["rejected drafts"] += world.worker.rejected
        totals.update({f"audits: {k}": n for k, n in world.side.call("audits")["outcomes"].items()})
        totals["exact tokens"] += world.worker.exact_tokens
        totals["kept tokens"] += world.worker.kept_tokens
        totals["spread plans"] += world.worker.spread_plans


def of_world(name: str) -> type[Machine]:
    """The machine whose engines are all of one of `WORLDS`."""
    return type(f"Machine_{name}", (Machine,), {"setups": WORLDS[name]})
