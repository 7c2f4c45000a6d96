# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, KV cache manager and block pool with our connector, and no model.

Everything on the scheduler's side is what a server runs (`ModellessEngine`). Behind it is a
`Worker` of tags. Completions come in the order of the steps, as in vLLM: nothing else is possible
for one engine.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import vllm_segreuse
from bench.integrity import check_integrity
from bench.shapes import SUPPORTED
from segreuse_extras.images import scheduler as images
from segreuse_extras.trained import scheduler as trained
from segreuse_tools.estimate.modelless_engine import ModellessEngine
from tests.parts import parts_of
from tests.reports import Whole
from tests.stateful import invariants, isolated, reports
from tests.stateful.drafting import DraftingWorker
from tests.stateful.events import Mirror
from tests.stateful.sessions import Sessions
from tests.stateful.worker import LARGEST_DRIFT, STOP, Identity, Worker
from tests.tier.fakes import Region
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.connector import SegReuseConnector
from vllm_segreuse.options.server import Switch
from vllm_segreuse.plan import FreezeOrder
from vllm_segreuse.scheduling.tracked import NOTHING_LEFT, LeftBehind

SIZE = 4
"""Tokens per block."""

MAX_TOKENS = 64
"""Longest sequence."""

OWN = "segreuse-"
"""Of the ids of requests that the server itself makes."""

LORA = LoRARequest("adapter", 1, "/adapters/1")

DOCUMENTS: list[list[int]] = [
    [*range(10, 26)],
    [*range(30, 43)],
    [*range(10, 18), *range(50, 59)],  # begins like the first
    [7] * 14,  # every window is the same
    [*range(60, 66)],
    [*range(10, 13), 90, *range(14, 17), 91, *range(18, 21), 92, 93],  # similar to the first
    [94, *range(31, 34), 95, *range(35, 38), 96, *range(39, 42), 97],  # and to the second
]

# What requests may ask for, of every policy; most ratios leave something to be chosen.
RATIOS = (None, 0.0, 0.1, 0.3, 0.5, 0.8, 1.0)
MAX_DRIFTS = (None, None, 0.0, 1.5, LARGEST_DRIFT)
DENSE_LAYERS = (0, 0, 1, 0.5, 9)

SIMILARITY = {
    "window_tokens": 8,
    "stride_tokens": 4,
    "shingle_tokens": 2,
    "context_tokens": 8,
    "permutations": 32,
    "threshold": 0.2,
    "min_run_tokens": 2,
    "max_windows": 64,
}
"""So that texts of a few tokens are similar, and windows are dropped for others."""

HALO = {"halo_tokens": 1, "max_boundary_drift": LARGEST_DRIFT / 2}
"""Of the segments that the worker draws drifts for, half are rejected."""


@dataclass(frozen=True)
class Setup:
    """One engine.

    Attributes:
        in_flight: steps under way at most. 1 is vLLM's plain scheduler; more is its asynchronous
            one, which runs 2 in a server.
        max_step_tokens: of vLLM's steps, and of our plans in one step.
        long_prompt_tokens: of one request in one step, if there are others; 0: any number.
        whole_prompts: admit a prompt only if there is room for all of it (vLLM's default).
        spread_tokens: see `SegReuseConfig`.
        similarity: whether similar segments are reused (`SIMILARITY`).
        halo: whether these are tested (`HALO`).
        tier_rows: of the second tier; 0: there is none.
        max_views: of the index; fewer than there are namespaces, so that these make room.
        drafts: of speculative decoding, in a step; 0: there is none.
        stages: of the pipeline; every plan takes several steps if there are others.
        asynchronous: whether more steps under way are of vLLM's asynchronous scheduler; its plain
            one has them where there are stages.
        audits: whether every request that reuses is audited.
        isolated: whether the model was trained on documents computed alone (`isolated.py`).
        heal_tokens: see `segreuse_extras/healing/options.py`.
        compressed, sessions: whether documents are compressed, and prompts come in parts
            (`compressing.py`, `sessions.py`); for whoever makes the requests.
    """

    num_blocks: int = 40
    in_flight: int = 1
    priority: bool = False
    max_step_tokens: int = 48
    max_running: int = 6
    long_prompt_tokens: int = 0
    whole_prompts: bool = True
    watermark: float = 0.0
    max_depth: int = 4
    spread_tokens: int = 0
    frozen_pressure: float = 0.9
    frozen_share: float = 0.5
    similarity: bool = False
    halo: bool = False
    tier_rows: int = 0
    max_views: int = 2
    drafts: int = 0
    stages: int = 1
    asynchronous: bool = True
    audits: bool = False
    heal_tokens: int = 0
    isolated: bool = False
    compressed: bool = False
    sessions: bool = False


@dataclass
class Ask:
    """A request to come.

    Attributes:
        parts: (document, first token, tokens of new text behind it), one after the other.
        tokens: the prompt itself, in place of `parts`.
        seed: of the sampled tokens; requests of one prompt and other seeds are its `n`.
        freeze: what its blocks are to be frozen as when it ends, from its second token on.
    """

    parts: list[tuple[int, int, int]] = field(default_factory=list)
    tokens: list[int] | None = None
    keys: tuple[str, ...] | None = None
    salt: str | None = None
    lora: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 4
    priority: int = 0
    prompt_logprobs: bool = False
    seed: int = 0
    freeze: FreezeOrder | None = None


class World:
    """One engine without a model, and everything that may happen to it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._engine = _engine(setup)
        self.scheduler = self._engine.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self._engine.pool
        self.side = self._engine.side
        self.index, self.frozen = (
            parts_of(self.side).index,
            parts_of(self.side).entries,
        )
        self.index.max_views = setup.max_views
        self.identities: dict[str, tuple[Identity, int]] = {}
        requests = self.scheduler.requests
        known = (self.identities, requests, setup.tier_rows, setup.isolated)
        make = DraftingWorker if setup.drafts else Worker
        self.worker = make(setup.num_blocks, SIZE, *known)
        self.worker.left_behind = self._left_behind
        self.events = Mirror(self.pool)
        self.sessions = Sessions(self)
        self.held: list[Any] = []
        """Blocks that somebody else took."""
        self.under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.finished: deque[Request] = deque(maxlen=16)
        self.named: dict[bytes, list[int]] = {}
        """Histories of the tokens of each block that vLLM ever hashed."""
        self.reports: dict[str, dict[str, Any]] | None = None
        """Of requests that have ended, if anybody keeps them."""
        self.lost_namespaces = 0
        self.counts: Counter[str] = Counter()
        """Events ("events"), and what came of them."""
        self._histories: dict[str, list[int]] = {}
        self._ids, self._new_tokens, self._clock = count(), count(1000), count()

    # What may happen.

    def add(self, ask: Ask) -> Request:
        """A request arrives."""
        self.counts.update(events=1, requests=1)
        tokens = ask.tokens if ask.tokens is not None else self.prompt(ask.parts)
        tokens = tokens[: MAX_TOKENS - ask.max_tokens]
        extra = dict(ask.options)
        if ask.keys is not None:
            extra["extra_keys"] = list(ask.keys)
        if ask.freeze is not None:
            extra["segreuse_freeze"] = ask.freeze.encode()
        params = SamplingParams(
            max_tokens=ask.max_tokens,
            stop_token_ids=[STOP],
            extra_args=extra or None,
            prompt_logprobs=1 if ask.prompt_logprobs else None,
        )
        request_id = f"request-{next(self._ids)}"
        ask.lora = ask.lora and self.setup.stages == 1
        identity = Identity(ask.keys, ask.salt, LORA.lora_name if ask.lora else None)
        self.identities[request_id] = identity, ask.seed
        return self.submit(
            request_id,
            tokens,
            params,
            lora_request=LORA if ask.lora else None,
            cache_salt=ask.salt,
            priority=ask.priority,
        )

    def submit(
        self, request_id: str, tokens: list[int], params: SamplingParams, **others: Any
    ) -> Request:
        """A request arrives as vLLM has it, or the next part of one."""
        self._histories[request_id] = []
        arrival_time = float(next(self._clock))
        request = self._engine.add(request_id, tokens, params, arrival_time=arrival_time, **others)
        documents = parts_of(self.side).isolated
        if documents is not None and documents.has_documents(request_id):
            identity, seed = self.identities[request_id]
            keys = documents.extra_keys(request_id) or identity.keys
            self.identities[request_id] = identity._replace(keys=keys), seed
        self._note_names()
        return request

    @property
    def may_schedule(self) -> bool:
        """Whether a further step may be under way."""
        return len(self.under_way) < self.setup.in_flight

    def schedule(self) -> SchedulerOutput:
        """A step leaves; the worker runs it at once, since nothing overtakes it on the device."""
        step = self.scheduler.schedule()
        plans, preempted = step.kv_connector_metadata.plans, step.preempted_req_ids or ()
        self.counts.update(events=1, steps=1, plans=len(plans), preemptions=len(preempted))
        self.under_way.append((step, self.worker.run(step)))
        return step

    def complete(self) -> None:
        """The oldest step under way comes back."""
        self.counts["events"] += 1
        step, result = self.under_way.popleft()
        live = dict(self.scheduler.requests)
        outputs = self.scheduler.update_from_output(step, result)
        for output in [o for of_client in outputs.values() for o in of_client.outputs]:
            request = live[output.request_id]
            if output.finish_reason is not None and request.is_finished():
                self._ended(request, output.kv_transfer_params)
        self._note_names()
        if self.setup.drafts and self.setup.in_flight == 1:
            drafts = self.worker.draft(self.scheduler.running, self.setup.drafts)
            self.scheduler.update_draft_token_ids(drafts)

    def step(self) -> None:
        """One turn of the engine: as many steps as may be under way leave, one comes back."""
        while self.may_schedule:
            self.schedule()
            self.check(thorough=False)
        self.complete()

    def abort(self, request: Request) -> None:
        """The client has gone."""
        self.counts.update(events=1, aborts=1)
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self._histories.pop(request.request_id, None)

    def reset(self, preempt: bool) -> bool:
        """Forget the cache, as a weight update, sleep or an administrator demands."""
        self.counts["events"] += 1
        if preempt:
            self.release()
        idle = RequestStatus.WAITING_FOR_STREAMING_REQ
        if preempt and any(r.status == idle for r in self.scheduler.kv_holding_waiting):
            return self._reset_in_vain()
        done = self.scheduler.reset_prefix_cache(reset_running_requests=preempt)
        assert not done or not len(self.index), "a reset left segments behind"
        assert not done or not self.frozen.num_frozen, "a reset left blocks frozen"
        assert done or not preempt, "a reset failed although nothing ran"
        return done

    def _reset_in_vain(self) -> bool:
        """vLLM cannot take the blocks of a session that waits for its next part."""
        self.counts["resets in vain"] += 1
        aside = [r for r in self.live if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:
            lost = [r.request_id for r in aside if not r.num_computed_tokens]
            assert not lost, f"called back for nothing: {lost}"
            return False
        raise AssertionError("a session keeps its blocks, and a reset did not fail")

    def unfreeze(self, entries: list[str]) -> None:
        """Documents are deleted."""
        self.counts["events"] += 1
        self.side.call("unfreeze", entries)
        assert not set(entries) & self.side.call("frozen")["warm"].keys()

    def switch(self, state: Switch) -> None:
        """The kill switch."""
        self.counts["events"] += 1
        self.side.set_enabled(state)

    def pause(self, state: PauseState) -> None:
        """vLLM's own pause."""
        self.counts["events"] += 1
        self.scheduler.set_pause_state(state)

    def hold(self, blocks: int) -> None:
        """Somebody else takes free blocks."""
        self.counts["events"] += 1
        self.held += self.pool.get_new_blocks(min(blocks, self.pool.get_num_free_blocks()))

    def release(self) -> None:
        """Whoever took blocks gives them back."""
        self.counts["events"] += 1
        self.pool.free_blocks(reversed(self.held))
        self.held = []

    def evict(self, pick: int, stride: int) -> int:
        """Cached blocks lose their names, here and there: holes in what vLLM finds by prefix."""
        self.counts["events"] += 1
        named = [b.block_id for b in self.pool.blocks if b.block_hash is not None]
        self.pool.evict_blocks(set(named[pick::stride]))
        return len(named[pick::stride])

    @property
    def live(self) -> list[Request]:
        """Requests that have not ended."""
        return list(self.scheduler.requests.values())

    def prompt(self, parts: list[tuple[int, int, int]]) -> list[int]:
        """Tokens of a prompt's parts; new text is new each time."""
        tokens: list[int] = []
        for document, first, new in parts:
            tokens += DOCUMENTS[document][first:]
            tokens += [next(self._new_tokens) for _ in range(new)]
        return tokens or [next(self._new_tokens)]

    # What must hold.

    def check(self, thorough: bool = True) -> None:
        """AssertionError with what is wrong; may be called between any two events.

        Args:
            thorough: also walk all links of the index.
        """
        invariants.check(self)
        self.events.check()
        if thorough:
            check_integrity(self.index)

    def drain(self) -> None:
        """Everything ends, in a bounded number of steps, and leaves nothing behind; first whatever
        does not wait for its client, while streaming sessions do."""
        self.release()
        self.pause(PauseState.UNPAUSED)
        self._run_out()
        self.sessions.close()
        self._run_out()
        self.check()
        invariants.check_idle(self)

    def _run_out(self) -> None:
        """Step until nothing is left but sessions that wait for their next part."""
        audits = self.setup.audits * 30
        parts = 600 if self.setup.heal_tokens else 0  # of 64 turns, as many as may wait
        for _ in range(50 + parts + 40 * (len(self._needy) + audits)):
            if self._needy:
                self.step()
            elif self.under_way:
                self.complete()
            elif self.side.has_pending_work or self._has_audits():
                self.step()
            else:
                break
            self.check()
        starving = [f"{r.request_id} ({r.status.name})" for r in self._needy]
        assert not starving, f"requests starve: {starving}"
        assert not self.side.has_pending_work, "an engine that nobody needs steps for ever"

    @property
    def _needy(self) -> list[Request]:
        """Requests that the engine has something to do for."""
        idle = RequestStatus.WAITING_FOR_STREAMING_REQ
        return [request for request in self.live if request.status != idle]

    def _left_behind(self, name: str) -> LeftBehind:
        tracked = parts_of(self.side).planner.get(name)
        return NOTHING_LEFT if tracked is None else tracked.left_behind

    def _has_audits(self) -> bool:
        """Whether audits wait that there is room for, or workers have not heard of all."""
        audits, watermark = parts_of(self.side).audits, self.manager.watermark_blocks
        needed = -(-MAX_TOKENS // self.worker.block_size) + watermark
        has_room = self.pool.num_free_blocks() >= needed
        return audits.has_orders or (audits.num_waiting > 0 and has_room)

    def _note_names(self) -> None:
        for request_id, request in self.scheduler.requests.items():
            if request_id not in self.identities:
                self._meet(request)
            if not request.is_finished():  # else its plan was under way
                self._note_names_of(request)

    def _meet(self, request: Request) -> None:
        """A request of the server's own: it computes a document, or audits another."""
        assert request.request_id.startswith(OWN), f"who is {request.request_id}?"
        lora = request.lora_request.lora_name if request.lora_request else None
        keys = reports.options_of(request).get("extra_keys")
        identity = Identity(tuple(keys) if keys else None, request.cache_salt, lora)
        self.identities[request.request_id] = identity, 0
        self._histories[request.request_id] = []
        self.counts[request.request_id.rpartition("-")[0]] += 1

    def _note_names_of(self, request: Request) -> None:
        known = self._histories[request.request_id]
        if request.resumable:
            known.clear()  # the last token of an answer is dropped when the next part comes
        if known and len(known) == request.num_tokens:
            return
        done = len(known) // SIZE
        identity = self.identities[request.request_id][0]
        self.worker.histories.of(identity, request.all_token_ids[:], known)
        for i in range(done, len(request.block_hashes)):
            self.named[request.block_hashes[i]] = known[i * SIZE : (i + 1) * SIZE]

    def _ended(self, request: Request, answer: dict[str, Any] | None) -> None:
        self._note_names_of(request)
        self._histories.pop(request.request_id)
        if request.status == RequestStatus.FINISHED_ERROR:
            assert self.setup.isolated, f"{request.request_id} ends with an error"
            self.counts["errors"] += 1
            return
        if request.resumable or request.request_id.startswith(OWN):
            return
        self.counts["finished"] += 1
        self.finished.append(request)
        if self.identities[request.request_id][0].keys is None:
            assert answer is None, f"a report for {request.request_id}, which has no keys"
        elif answer is not None:
            report = answer["segreuse"]
            reports.check(self, request, Whole(report))
            if self.reports is not None:
                self.reports[request.request_id] = report


@functools.cache
def _vllm_config() -> Any:
    """A configuration of vLLM's own making; no weights, no tokenizer."""
    return _made({})


@functools.cache
def _drafting_config(drafts: int) -> Any:
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
    # vLLM's asynchronous scheduler takes other drafters, all of which need a model.
    return _made({"speculative_config": speculative, "async_scheduling": False})


def _made(options: dict[str, Any]) -> Any:
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as directory:
        model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        shape = SUPPORTED["llama"].config | model | {"dtype": "bfloat16"}
        Path(directory, "config.json").write_text(json.dumps(shape))
        arguments = EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=8,
            kv_transfer_config=vllm_segreuse.kv_transfer_config(),
            **options,
        )
        vllm_config = arguments.create_engine_config()
    for name in set(os.environ) - set(environment):
        del os.environ[name]  # marks for processes to come, which are none of ours
    return vllm_config


def _engine(setup: Setup) -> ModellessEngine:
    vllm_config = _drafting_config(setup.drafts) if setup.drafts else _vllm_config()
    vllm_config.kv_transfer_config.kv_connector_extra_config = SegReuseConfig(
        max_provenance_depth=setup.max_depth,
        spread_tokens=setup.spread_tokens,
        frozen_pressure=setup.frozen_pressure,
        frozen_share=setup.frozen_share,
        similarity=SIMILARITY | (HALO if setup.halo else {}) if setup.similarity else None,
        tier={"host_gib": 1, "min_run_tokens": 2} if setup.tier_rows else None,
        audit={"share": 1.0, "per_minute": 6000} if setup.audits else {},
        heal_tokens=setup.heal_tokens,
        heal_after_s=0.0,
    ).model_dump()
    vllm_config.parallel_config.pipeline_parallel_size = setup.stages
    scheduling = vllm_config.scheduler_config
    scheduling.policy = "priority" if setup.priority else "fcfs"
    scheduling.max_num_batched_tokens = setup.max_step_tokens
    scheduling.max_num_seqs = setup.max_running
    scheduling.scheduler_reserve_full_isl = setup.whole_prompts
    scheduling.watermark = setup.watermark
    scheduling.long_prefill_token_threshold = setup.long_prompt_tokens
    scheduling.async_scheduling = setup.in_flight > 1 and setup.asynchronous
    region = Region(setup.tier_rows) if setup.tier_rows else None
    with ExitStack() as patched:
        of_connector = patch.object(SegReuseConnector, "_open_region", lambda connector: region)
        patched.enter_context(of_connector)
        if setup.isolated:
            layout = patch.object(trained, "layout_of", lambda *of: isolated.LAYOUT)
            alone = patch.object(images, "sees_documents_alone", lambda *of: True)
            patched.enter_context(layout)
            patched.enter_context(alone)
        return ModellessEngine(vllm_config, setup.num_blocks, SIZE)
