# SPDX-License-Identifier: Apache-2.0
"""A worker without a model: it writes what it would compute as tags, and checks whatever it reads.

Every KV slot carries a tag: the token and position it stands for, the *history* (all tokens up to
and including it, behind salt and adapter) if it holds exactly what the plain model computes for
that history, the same whatever it holds (its *text*), how deep its provenance is, and whether it
was copied rather than computed. A step is run when it is scheduled, since a device runs steps in
that order; its output is delivered as late as the test likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from segreuse_extras.audit.messages import AuditDone, AuditResult
from segreuse_extras.audit.recorder import Recorder
from segreuse_tools.estimate.modelless_engine import step_output
from tests.stateful import compressing, isolated
from tests.stateful.rows import Rows
from vllm_segreuse.compat.sampler import Sampled
from vllm_segreuse.connector import SegReuseWorkerMetadata
from vllm_segreuse.plan import (
    AcceptanceOutcome,
    Message,
    PlanOutcome,
    Restoration,
    ReusePlan,
    Stock,
    Tier,
    TierDone,
)
from vllm_segreuse.scheduling.tracked import NOTHING_LEFT, LeftBehind

STOP = 1
"""The token that ends a request."""

APPROXIMATE = 0
"""History of a slot that holds anything else than the plain model's KV."""

LARGEST_DRIFT = 4.0
"""Drifts are drawn from 0 to this."""

_VOCABULARY = 8  # of what is sampled


class Identity(NamedTuple):
    """What may never be mixed up between requests.

    Attributes:
        keys: the extra keys, None for a plain request.
    """

    keys: tuple[str, ...] | None
    salt: str | None
    lora: str | None


class Histories:
    """Token sequences as numbers: equal numbers, equal sequences behind equal salt and adapter."""

    def __init__(self) -> None:
        self._ids: dict[tuple[Any, ...], int] = {}
        self._keys: dict[int, tuple[Any, ...]] = {}

    def of(self, identity: Identity, tokens: list[int], known: list[int]) -> list[int]:
        """Extend `known`, the histories of the first tokens, to one per token."""
        last = known[-1] if known else self._id(("root", identity.salt, identity.lora))
        for token in tokens[len(known) :]:
            last = self._id((last, token))
            known.append(last)
        return known

    def tokens_of(self, number: int) -> list[int]:
        """The tokens of a sequence."""
        tokens = []
        while (key := self._keys[number])[0] != "root":
            number, token = key
            tokens.append(token)
        return tokens[::-1]

    def _id(self, key: tuple[Any, ...]) -> int:
        number = self._ids.setdefault(key, len(self._ids) + 1)  # 0 is APPROXIMATE
        self._keys[number] = key
        return number


@dataclass
class Running:
    """A request as the worker knows it."""

    identity: Identity
    seed: int
    tokens: list[int]
    blocks: list[int]
    history: list[int] = field(default_factory=list)
    exact_until: int | None = None  # start of its plan
    is_new: bool = True  # in this step, after its admission
    num_prompt_tokens: int = 0  # that it was announced with
    left: LeftBehind = NOTHING_LEFT  # what it takes of an earlier turn

    def exact_within(self, stop: int) -> int:
        """Up to here what is in front of `stop` is exact."""
        return min(stop, self.left.start)


class Ending(NamedTuple):
    """What a report must say of a plan that was carried out.

    Attributes:
        recomputed: reused tokens that were computed again.
        drift: that the workers reported; None: none.
        in_full: whether everything was computed because of it.
        accepted, rejected: similar segments that were tested.
        added: tokens that were computed because of that.
    """

    recomputed: int
    drift: float | None = None
    in_full: bool = False
    accepted: int = 0
    rejected: int = 0
    added: int = 0


@dataclass
class Spread:
    """A plan that is carried out over several steps, and what its first step has copied."""

    plan: ReusePlan
    request: Running
    token: np.ndarray
    position: np.ndarray
    steps: int  # that it takes


def _in_full(plan: ReusePlan) -> ReusePlan:
    """As a plan in full, which remains one of the exact tier."""
    full = plan.without_copies()
    return replace(full, recipe=replace(full.recipe, program=Stock())) if _is_exact(plan) else full


def _is_exact(plan: ReusePlan) -> bool:
    return plan.recipe.program == Stock()


def _reporting(
    output: ModelRunnerOutput,
    outcomes: dict[str, PlanOutcome],
    audits: dict[str, AuditResult],
    done: TierDone,
) -> ModelRunnerOutput:
    """The same with reports of audits and of the second tier."""
    if not (done or audits):
        return output
    found = output.kv_connector_output or KVConnectorOutput()
    messages: dict[str, Message] = {"tier": done} if done else {}
    if audits:
        messages["audit"] = AuditDone(audits)
    found.kv_connector_worker_meta = SegReuseWorkerMetadata(dict(outcomes), messages)
    output.kv_connector_output = found
    return output


class Worker:
    """The KV cache of one engine, as tags.

    Args:
        identities: identity and sampling seed of each request, by id.
        live: vLLM's requests, by id; read where a real worker need not know a request's tokens.
        num_rows: of the second tier.
        isolates: whether documents are computed alone (`segreuse_extras/trained/requests.py`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        identities: dict[str, tuple[Identity, int]],
        live: Mapping[str, Request],
        num_rows: int = 0,
        isolates: bool = False,
    ) -> None:
        slots = num_blocks * block_size
        self.block_size = block_size
        self.token = np.full(slots, -1, np.int32)
        self.position = np.full(slots, -1, np.int32)
        self.history = np.zeros(slots, np.int64)
        self.text = np.zeros(slots, np.int64)
        self.depth = np.zeros(slots, np.int16)
        self.copied = np.zeros(slots, np.bool_)
        self.epoch = np.zeros(num_blocks, np.int64)
        """How often each block was begun anew."""
        self.known_to: list[set[Identity]] = [set() for _ in range(num_blocks)]
        """Who had the block in a block table since it was begun."""
        self.had: dict[int, set[Identity]] = {}
        """Who ever had a block of exact KV in a block table, by the history of its last token. A
        record with the same exact name as theirs is theirs, too, whose block ever it is made of."""
        self.histories = Histories()
        self.rows = Rows(num_rows, self)
        self.recorder = Recorder()
        """Of audits, the server's own."""
        self.fail_next_pass = False
        self._isolates = isolates
        self.copied_tokens = self.exact_tokens = self.kept_tokens = self.in_context_tokens = 0
        self.left_behind: Callable[[str], LeftBehind] = lambda name: NOTHING_LEFT
        self.taken: dict[str, int] = {}  # tokens of what was left behind, at first, by request
        """What the request with a name takes of an earlier turn."""
        self._identities = identities
        self._live = live
        self._requests: dict[str, Running] = {}
        self._spread: dict[str, Spread] = {}
        self._loaded: dict[str, tuple[int, int]] = {}  # span of a spread plan that is done
        self._outcomes: dict[str, PlanOutcome] = {}  # of this step, where only workers know them
        self.endings: dict[str, Ending] = {}
        """Of each request's first plan."""
        self.called_back: set[str] = set()
        self.num_steps = self.spread_plans = 0

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """One step: plans, then the forward.

        Raises:
            AssertionError: something reads what it must not read.
        """
        self.num_steps += 1
        self._outcomes = {}
        messages = step.kv_connector_metadata.messages
        done = self.rows.carry_out(messages.get("tier"))
        if "audit" in messages:
            self.recorder.take(messages["audit"])
        self.called_back |= set(step.kv_connector_metadata.called_back)
        for name in step.kv_connector_metadata.called_back:
            self._spread.pop(name, None)
            self._loaded.pop(name, None)
        starts = self.update_requests(step)
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens
        self._run_plans(step.kv_connector_metadata.plans, step.num_scheduled_tokens, starts)
        sampled = {
            name: self.forward(name, starts[name], tokens)
            for name, tokens in step.num_scheduled_tokens.items()
        }
        output = step_output(sampled, self._go_on(step.finished_req_ids), self._outcomes)
        return _reporting(output, self._outcomes, self.recorder.take_results(), done)

    def slots(self, blocks: list[int], start: int, stop: int) -> np.ndarray:
        """Slots of positions `[start, stop)` of a block table."""
        positions = np.arange(start, stop)
        table = np.asarray(blocks, np.int64)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def update_requests(self, step: SchedulerOutput) -> dict[str, int]:
        """What vLLM's runner does with a step's new, resumed and running requests.

        Returns:
            Tokens computed before this step, by request.
        """
        starts: dict[str, int] = {}
        for request_id in step.finished_req_ids:
            self._requests.pop(request_id, None)
            self._loaded.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            identity, seed = self._identities[new.req_id]
            tokens = list(new.prompt_token_ids or [])
            running = Running(identity, seed, tokens, list(new.block_ids[0]))
            running.num_prompt_tokens = len(tokens)
            running.left = self.left_behind(new.req_id)
            self.taken.setdefault(new.req_id, running.left.num_tokens)
            self._requests[new.req_id] = running
            starts[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self._requests[request_id]
            new_blocks = cached.new_block_ids[index]
            starts[request_id] = cached.num_computed_tokens[index]
            if request_id in cached.resumed_req_ids:
                assert new_blocks is not None, f"{request_id} is resumed without blocks"
                prompt = self._live[request_id].num_prompt_tokens
                assert prompt == request.num_prompt_tokens, f"{request_id} has another prompt"
                request.tokens = list(cached.all_token_ids[request_id])
                request.history, request.exact_until, request.is_new = [], None, True
                request.left = self.left_behind(request_id)
                request.blocks = list(new_blocks[0])
            elif new_blocks is not None:
                request.blocks += new_blocks[0]
        for request in self._requests.values():
            self.histories.of(request.identity, request.tokens, request.history)
        for request_id, start in starts.items():
            request = self._requests[request_id]
            self._meet(request, start)
            if request.is_new and request_id in self._loaded:
                begin, stop = self._loaded.pop(request_id)
                request.exact_until = request.exact_within(begin)
                assert start == stop, f"{request_id} goes on at {start}, its plan ended at {stop}"
        return starts

    def _meet(self, request: Running, computed: int) -> None:
        """A prefix hit: its blocks are known to this request's namespace from now on.

        Called twice: before the step's plans, which may read them, and when it is the request's
        turn, since a block of the hit may have been written by another request of the same step.
        """
        found = request.blocks[: computed // self.block_size if request.is_new else 0]
        if found and request.left.num_tokens:
            self._check_left(request, request.left)
        for block in found:
            self.known_to[block].add(request.identity)
        self._note_had(request, 0, len(found) * self.block_size)

    def _check_left(self, request: Running, left: LeftBehind) -> None:
        """What a request takes of an earlier turn is its own text, behind its own text."""
        first, last = left.start // self.block_size, left.stop // self.block_size
        assert left.block_ids == request.blocks[first:last], f"{left}: others are in its table"
        strangers = [i for i in left.block_ids if request.identity not in self.known_to[i]]
        assert not strangers, f"{request.identity} never saw block {strangers}"
        slots = self.slots(request.blocks, left.start, left.stop)
        text = request.history[left.start : left.stop]
        assert self.text[slots].tolist() == text, f"{left}: another context"
        assert self.depth[slots].max() <= left.donor_depth + 1, f"{left}: too deep"
        self.kept_tokens += int(self.copied[slots].sum())

    def _note_had(self, request: Running, start: int, stop: int) -> None:
        """Blocks that end in `[start, stop)` hold what they hold from now on."""
        size = self.block_size
        for end in range((start // size + 1) * size, stop + 1, size):
            history = request.history[end - size : end]
            if self.history[self.slots(request.blocks, end - size, end)].tolist() == history:
                self.had.setdefault(history[-1], set()).add(request.identity)

    def _write(self, request: Running, start: int, stop: int) -> np.ndarray:
        """Tags of `[start, stop)` are about to be written; returns the slots."""
        slots = self.slots(request.blocks, start, stop)
        begun = slots[slots % self.block_size == 0] // self.block_size
        self.epoch[begun] += 1
        for block in begun.tolist():
            self.known_to[block] = set()
        for block in np.unique(slots // self.block_size).tolist():
            self.known_to[block].add(request.identity)
        self.position[slots] = np.arange(start, stop)
        self.text[slots] = request.history[start:stop]
        return slots

    # Plans.

    def _run_plans(
        self, plans: list[ReusePlan], scheduled: dict[str, int], starts: dict[str, int]
    ) -> None:
        if self.fail_next_pass and plans:
            self.fail_next_pass = False
            # As the connector does after an error; what a plan may copy remains what it was.
            for plan in plans:
                recomputed = plan.num_restored + plan.num_reused
                self.endings.setdefault(plan.request_id, Ending(recomputed))
            plans = [_in_full(plan) for plan in plans]
        requests = [self._request_of(plan) for plan in plans]
        written = self._written(plans, requests, scheduled, starts)
        reads = []
        for plan, request in zip(plans, requests, strict=True):
            if plan.restoration is not None:
                self._restore(plan.request_id, request, plan.restoration, written)
        for plan, request in zip(plans, requests, strict=True):
            self.check_plan(plan, request, scheduled, starts)
            reads.append(self._read_donors(plan, request, written))
        for plan, request, read in zip(plans, requests, reads, strict=True):
            if plan.spread:
                steps = 1 + (self.num_steps + plan.num_tokens) % 4
                self._spread[plan.request_id] = Spread(plan, request, *read, steps)
                self._write_unfinished(plan, request)
                self.spread_plans += 1
            else:
                self._write_plan(plan, request, *read)

    def _restore(
        self, name: str, request: Running, restoration: Restoration, written: set[int]
    ) -> None:
        """Copy whole blocks of the request's own prefix, which must be exactly that."""
        pieces, size = restoration.pieces, self.block_size
        for (at, length, block, offset, position), tier in zip(
            pieces.rows(), pieces.source.tolist(), strict=True
        ):
            where = f"{name}: block {at // size} restored from {Tier(tier).name} {block}"
            assert (length, offset, position) == (size, 0, at), f"{where}: it is moved"
            slots = range(block * size, (block + 1) * size)
            here = tier == Tier.HOST or written.isdisjoint(slots)
            assert here, f"{where}: written in this step"
            history = self.rows.source(tier, block)[0]["history"].tolist()
            assert history == request.history[at : at + size], f"{where}: another prefix's KV"
        if len(pieces):
            begin = int(pieces.destination[0])
            ids = request.tokens[begin : pieces.stop]
            assert restoration.token_ids.tolist() == ids, f"{name}: other tokens"
            self._write(request, begin, pieces.stop)
            self.rows.restore(pieces, request.blocks)
            self._note_had(request, begin, pieces.stop)

    def _request_of(self, plan: ReusePlan) -> Running:
        name = plan.request_id
        if not plan.spread:
            return self._requests[name]
        assert name not in self._spread, f"{name}: two plans under way"
        identity, seed = self._identities[name]
        tokens = list(self._live[name].all_token_ids[:])
        request = Running(identity, seed, tokens, plan.block_ids.tolist())
        self.histories.of(identity, tokens, request.history)
        request.left = self.left_behind(name)
        self.taken.setdefault(name, request.left.num_tokens)
        self._meet(request, plan.begin)
        return request

    def _go_on(self, ended: set[str]) -> set[str]:
        """What is spread: who has ended is dropped, others come nearer to their end."""
        over = {name for name in ended if self._spread.pop(name, None) is not None}
        for name, spread in list(self._spread.items()):
            spread.steps -= 1
            if spread.steps:
                self._write_unfinished(spread.plan, spread.request)
                continue
            plan = self._spread.pop(name).plan
            self._write_plan(plan, spread.request, spread.token, spread.position)
            self._loaded[name] = plan.start, plan.stop
            over.add(name)
        return over

    def _write_unfinished(self, plan: ReusePlan, request: Running) -> None:
        """Slots that hold nothing that anybody may read, also those of the suffix."""
        self._spoil(request, plan.start, plan.written_until)

    def _spoil(self, request: Running, start: int, stop: int) -> None:
        slots = self._write(request, start, stop)
        self.position[slots] = -1
        self.history[slots] = APPROXIMATE

    def _written(
        self,
        plans: list[ReusePlan],
        requests: list[Running],
        scheduled: dict[str, int],
        starts: dict[str, int],
    ) -> set[int]:
        """Slots that this step writes."""
        spans = [(self._requests[i], starts[i], starts[i] + n) for i, n in scheduled.items()]
        under_way = [(spread.plan, spread.request) for spread in self._spread.values()]
        for plan, request in [*zip(plans, requests, strict=True), *under_way]:
            spans.append((request, plan.begin, plan.written_until))
        slots: set[int] = set()
        for request, start, stop in spans:
            slots.update(self.slots(request.blocks, start, stop).tolist())
        return slots

    def check_plan(
        self,
        plan: ReusePlan,
        request: Running,
        scheduled: dict[str, int],
        starts: dict[str, int],
    ) -> None:
        name = plan.request_id
        assert request.identity.keys is not None, f"{name}: a plan for a request without keys"
        assert plan.stop < len(request.tokens), f"{name}: where the plan ends"
        if plan.spread:
            assert name not in scheduled, f"{name} runs, though its plan takes several steps"
        else:
            assert starts[name] == plan.stop, f"{name}: where the plan ends"
        # What could not be restored is computed, though nothing is reused behind it.
        if plan.reused.any() and not _is_exact(plan):
            last = len(request.tokens) - 1
            ends = {last, plan.pieces.stop, last + 1 - len(plan.suffix)}
            assert plan.stop in ends, f"{name}: where the plan ends"
            most = len(request.tokens) - plan.stop
            few = plan.spread or 0 < scheduled[name] <= most
            assert few, f"{name}: vLLM computes more than what is behind the plan"
        behind, chooses = request.tokens[plan.stop :], plan.recipe.program.probes_suffix
        assert plan.suffix.tolist() in ([behind] if chooses else [[], behind]), (
            f"{name}: the suffix"
        )
        assert plan.block_ids.tolist() == request.blocks, f"{name}: a plan of other blocks"
        tokens = request.tokens[plan.start : plan.stop]
        assert plan.token_ids.tolist() == tokens, f"{name}: a plan of other tokens"
        assert plan.start % self.block_size == 0, f"{name}: prefix hits are full blocks"
        self._check_context(name, request, plan.start, request.exact_within(plan.start))
        reused, always = plan.reused, plan.recipe.always
        assert (reused | always).all(), f"{name}: tokens nobody supplies"
        assert plan.recipe.top_k <= (reused & plan.recipe.candidates).sum(), (
            f"{name}: top_k of too few tokens"
        )

    def _read_donors(
        self, plan: ReusePlan, request: Running, written: set[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(token, position) of what is copied, -1 where nothing is."""
        name, size = plan.request_id, self.block_size
        params = self._live[name].sampling_params
        options = (params.extra_args if params else None) or {}
        makes = not options.keys().isdisjoint(compressing.ORDERS)
        compressed = makes or "segreuse_documents" in options
        token = np.full(plan.num_tokens, -1, np.int32)
        position = np.full(plan.num_tokens, -1, np.int32)
        kinds = zip(plan.pieces.source.tolist(), plan.pieces.in_context.tolist(), strict=True)
        for row, (tier, in_context) in zip(plan.pieces.rows(), kinds, strict=True):
            destination, length, block, offset, donor_position = row
            where = f"{name}: {length} tokens at {destination} from block {block}+{offset}"
            if tier == Tier.GPU:
                assert block in plan.donor_blocks, f"{where}: the block is not among the pinned"
                slots = range(block * size + offset, block * size + offset + length)
                assert written.isdisjoint(slots), f"{where}: the block is written in the same step"
            assert 0 <= offset < offset + length <= size, f"{where}: outside of the block"
            assert plan.start <= destination <= plan.stop - length, f"{where}: outside of the plan"
            held, known = self.rows.source(tier, block)
            tags = {kind: values[offset : offset + length] for kind, values in held.items()}
            span = slice(destination - plan.start, destination - plan.start + length)
            assert (token[span] == -1).all(), f"{where}: overlaps another piece"
            token[span] = tags["token"]
            position[span] = tags["position"] + destination - donor_position
            wanted = request.tokens[destination : destination + length]
            epoch = f"{where} ({Tier(tier).name})"
            assert token[span].tolist() == wanted, f"{epoch} holds {token[span]}, not {wanted}"
            moved = np.arange(destination, destination + length)
            assert (position[span] == moved).all(), f"{epoch}: other positions than planned"
            # Of an equal prompt it is taken as it is, and not turned once more.
            is_turned = not in_context or destination != donor_position
            copies = int(tags["copied"].sum()) * is_turned
            assert not copies or compressed, f"{epoch}: a copy of a copy"
            is_deep = tags["depth"].max() > plan.donor_depth + in_context
            assert not is_deep or compressed, f"{epoch}: too deep"
            if self._isolates:
                isolated.check_copied(self, request, row, tags["history"])
            text = request.history[destination : destination + length]
            assert not in_context or tags["text"].tolist() == text, f"{epoch}: another context"
            # What is taken of an equal prompt has passed this there.
            if options.get("segreuse_context") == "same" and request.left.behind is None:
                self._check_carried(request, destination, tags["history"].tolist(), epoch)
            if _is_exact(plan):
                # In no namespace, as vLLM's own prefix cache: nothing but the whole prefix counts.
                histories = tags["history"].tolist()
                wanted = request.history[destination : destination + length]
                assert histories == wanted, f"{epoch} holds another prefix's KV"
                assert destination == donor_position, f"{epoch}: moved, yet planned as exact"
            elif not makes or "segreuse_anchors" in options:  # others are of the server's own text
                who = request.identity
                if tier == Tier.HOST and (held["history"] != APPROXIMATE).all():
                    known = known | self.had[int(held["history"][-1])]
                assert who in known, f"{epoch} is known to {known}, not {who}"
            self.exact_tokens += length if _is_exact(plan) else 0
            self.copied_tokens += length
        return token, position

    def _check_carried(
        self, request: Running, destination: int, histories: list[int], where: str
    ) -> None:
        """All text that reused KV was computed behind is in front of it, in the same order."""
        assert APPROXIMATE not in histories, f"{where}: nobody knows what it carries"
        carried = self.histories.tokens_of(histories[0])[:-1]
        in_front = iter(request.tokens[:destination])
        assert all(token in in_front for token in carried), f"{where} carries {carried}"
        self.in_context_tokens += len(histories)

    def _write_plan(
        self, plan: ReusePlan, request: Running, token: np.ndarray, position: np.ndarray
    ) -> None:
        computed = self._carry_out(plan)
        self._spoil(request, plan.stop, plan.written_until)
        slots = self._write(request, plan.start, plan.stop) if plan.num_tokens else []
        self.token[slots] = np.where(computed, plan.token_ids, token)
        self.position[slots] = np.where(computed, np.arange(plan.start, plan.stop), position)
        self.history[slots] = APPROXIMATE
        self.depth[slots] = max(plan.donor_depth, request.left.donor_depth) + 1
        self.copied[slots] = ~computed
        request.exact_until = request.exact_within(plan.start)

    def _carry_out(self, plan: ReusePlan) -> np.ndarray:
        """Which tokens of a plan are computed, bool; notes how it ends."""
        recipe, program = plan.recipe, plan.recipe.program
        rng = np.random.default_rng(self.num_steps)
        count = recipe.top_k
        if program.may_choose_fewer:
            count = int(rng.integers(count + 1))
        computed = recipe.always.copy()
        computed[rng.permutation(np.flatnonzero(recipe.candidates))[:count]] = True
        drift = float(rng.uniform(0, LARGEST_DRIFT)) if program.measures_drift else None
        in_full = drift is not None and drift > plan.max_drift
        active = int(computed.sum())
        if in_full:
            computed[:] = True
        before, tested = computed.copy(), None
        if plan.check is not None and not in_full:
            drifts = rng.uniform(0, LARGEST_DRIFT, plan.num_tested)
            rejected = plan.check.is_rejected(drifts)
            for which in np.flatnonzero(rejected):
                computed[plan.check.first[which] : plan.check.stop[which]] = True
            added = int((computed & ~before).sum())
            # Behind the first of them everything is computed twice; here, that is all of it.
            again = int(computed.sum()) if added else 0
            tested = AcceptanceOutcome(tuple(drifts.tolist()), added, again)
        if plan.reports:
            positions = tuple((np.flatnonzero(computed) + plan.start).tolist())
            positions = positions if plan.explains else None
            number = 0 if plan.restoration is None else plan.restoration.number
            is_restored = plan.num_restored > 0
            outcome = PlanOutcome(active, drift, in_full, positions, tested, number, is_restored)
            self._outcomes[plan.request_id] = outcome
        ending = Ending(int((computed & plan.reused).sum()), drift, in_full)
        if tested is not None:
            count = int(rejected.sum())
            ending = ending._replace(
                accepted=plan.num_tested - count, rejected=count, added=tested.added
            )
        self.endings.setdefault(plan.request_id, ending)
        return computed

    # The forward.

    def forward(self, name: str, start: int, count: int) -> list[int]:
        request = self._requests[name]
        self._meet(request, start)
        request.is_new = False
        stop = start + count
        assert len(request.tokens) >= stop, f"{name}: tokens up to {stop} are not known yet"
        if self._isolates:
            isolated.check_computed(name, request, start, stop)
        until = request.exact_within(start) if request.exact_until is None else request.exact_until
        context = self._check_context(name, request, start, min(until, start))
        exact = bool((self.history[context] != APPROXIMATE).all())
        slots = self._write(request, start, stop)
        self.token[slots] = request.tokens[start:stop]
        self.history[slots] = request.history[start:stop] if exact else APPROXIMATE
        self.depth[slots] = self.depth[context].max(initial=0)
        self.copied[slots] = False
        self._note_had(request, start, stop)
        if stop < len(request.tokens):
            return []  # a chunk of a prompt
        request.tokens.append(self._recorded(name, self._sample(request), stop))
        return [request.tokens[-1]]

    def _recorded(self, name: str, token: int, computed: int) -> int:
        """The token that is sampled when audits have seen the logits, and may have changed them."""
        if self.recorder.is_idle:
            return token
        logits = torch.zeros(1, _VOCABULARY)
        logits[0, token] = 1.0
        self.recorder.see([Sampled(name, 0, computed)], logits)
        return int(logits.argmax())

    def _check_context(
        self, name: str, request: Running, stop: int, exact_until: int
    ) -> np.ndarray:
        """The slots before `stop` are this request's, those before `exact_until` exactly so."""
        slots = self.slots(request.blocks, 0, stop)
        token, position = self.token[slots], self.position[slots]
        assert (position == np.arange(stop)).all(), f"{name} reads positions {position}"
        wanted = request.tokens[:stop]
        assert token.tolist() == wanted, f"{name} reads {token.tolist()} instead of {wanted}"
        exact = self.history[slots[:exact_until]].tolist() == request.history[:exact_until]
        assert exact, f"{name} reads approximate or foreign KV before {exact_until}"
        return slots

    def _sample(self, request: Running) -> int:
        """A token that depends on the history and the seed: the same each time it is sampled."""
        mixed = (request.history[-1] * 2654435761 + request.seed * 40503) >> 7
        return STOP if mixed % 9 == 0 else 2 + mixed % 5
