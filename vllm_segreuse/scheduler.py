# SPDX-License-Identifier: Apache-2.0
"""The connector's half in the scheduler process: vLLM's requests and blocks on one side, the
planner on the other."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from vllm_segreuse import isolated
from vllm_segreuse.accounts import Accounts
from vllm_segreuse.arrival import (
    NEVER_DONATES,
    Adapters,
    all_tokens,
    bypass_reason,
    images_of,
    lora_id_of,
    namespace_of,
)
from vllm_segreuse.audit.audits import Audit
from vllm_segreuse.audit.start import start_audits
from vllm_segreuse.cache.budget import StepBudget
from vllm_segreuse.cache.contexts import ContextArray, contexts_of
from vllm_segreuse.cache.conversations import ContinuingFinder, Conversations
from vllm_segreuse.cache.donors import Donors
from vllm_segreuse.cache.explain import Reasons, Unused, explain, unexplored, with_recomputed
from vllm_segreuse.cache.finder import ContentFinder, Finder
from vllm_segreuse.cache.forgotten import Forgotten
from vllm_segreuse.cache.freezing import Freezing
from vllm_segreuse.cache.frozen import FrozenPool
from vllm_segreuse.cache.health import Health
from vllm_segreuse.cache.images import ImageIds
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.listener import BlockListener
from vllm_segreuse.cache.matcher import warm_up
from vllm_segreuse.cache.namespace import NamespaceTable, owner_of
from vllm_segreuse.cache.planner import Planner
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.cache.tracked import IMAGES_IN_DENSE_LAYERS, NOTHING_SAVED, TrackedRequest
from vllm_segreuse.compat import kv_cache_manager as compat_manager
from vllm_segreuse.compat import triton_dispatcher
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.compression import Compression
from vllm_segreuse.config import (
    OBSERVE,
    STEP_TOKENS,
    SegReuseConfig,
    Switch,
    parse_request,
)
from vllm_segreuse.documents.layout import Layout
from vllm_segreuse.isolated import IsolatedRequests
from vllm_segreuse.isolated_options import POLICY as LINK
from vllm_segreuse.kv_group import KvGroup
from vllm_segreuse.kv_slots import KvSlots
from vllm_segreuse.methods import Methods
from vllm_segreuse.metrics import SegReuseStats
from vllm_segreuse.plan import (
    AuditOrders,
    AuditResult,
    FreezeOrder,
    IntArray,
    ModelLayers,
    PlanOutcome,
    ReusePlan,
    TierDone,
    TierOrders,
)
from vllm_segreuse.similarity import similar_segments
from vllm_segreuse.tier.fingerprint import model_fingerprint
from vllm_segreuse.tier.own_prefix import OwnPrefix
from vllm_segreuse.tier.seats import Owner
from vllm_segreuse.tier.start import most_records, start_tier
from vllm_segreuse.tier_options import TierOptions
from vllm_segreuse.tracing import headers_of, is_traced, match_span

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.request import Request

logger = init_logger("vllm.segreuse")

FORGOTTEN_PER_BLOCK = 4
"""Blocks that no longer donate are remembered, for each that there is: 36 bytes."""

SEARCHED = (
    *(None, "observed", "too_few_reused_tokens", "no_free_blocks"),
    *(NOTHING_SAVED, IMAGES_IN_DENSE_LAYERS),
)
"""Reasons for which a request runs as it does after its prompt was searched for."""

EXACT_ONLY = ("knowledge_base", "fallback", "no_documents")
"""Reasons for which a request reuses no segments, and may still have its own prefix restored."""

ResidentBlocks = Callable[[int, int], IntArray]
"""See `Prompt.resident_blocks`."""

_COMPLETED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def _contained(otherwise: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An error of ours costs the request its reuse, never vLLM its engine.

    Args:
        otherwise: what the hook returns after an error.
    """

    def contain(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def contained(self: SchedulerSide, request: Request, *args: Any) -> Any:
            try:
                return hook(self, request, *args)
            except Exception:
                logger.exception(
                    "segment reuse failed in %s; request %s runs without it",
                    hook.__name__,
                    request.request_id,
                )
                self._planner.give_up(request.request_id)
                return otherwise

        return contained

    return contain


class SchedulerSide:
    """One per engine.

    Args:
        vllm_config: the engine's.
        config: the server's options.
        kv_cache_manager: vLLM's; its block pool becomes a `SegmentBlockPool`.
        stats: counts what happens.
        group: whose blocks are reused.
        region: host memory of the second tier, if there is one.
        layout: of prompts, where the model was trained on documents computed alone.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: SegReuseConfig,
        kv_cache_manager: KVCacheManager,
        stats: SegReuseStats,
        group: KvGroup,
        region: SharedOffloadRegion | None = None,
        layout: Layout | None = None,
    ) -> None:
        triton_dispatcher.install()  # numba is loaded from here on
        compat_manager.install()
        self._config = config
        self._traces = is_traced(vllm_config)
        self._manager = kv_cache_manager
        self._called_back: list[str] = []
        self._layers = ModelLayers.of_full_attention(
            vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        )
        self._block_size = group.block_size
        self._slots = KvSlots.of(vllm_config)
        self._max_wave_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._spread_above = config.spread_work(self._max_wave_tokens, self._layers.count)
        warm_up()
        pool = SegmentBlockPool.adopt(kv_cache_manager.block_pool, group)
        options = config.tier or TierOptions()
        records = 0 if region is None else most_records(region, options)
        index = SegmentIndex(
            pool.num_gpu_blocks + records,
            group.block_size,
            owner_of=lambda namespace: owner_of(self._namespaces.key(namespace)),
        )
        health = Health()
        self._namespaces = NamespaceTable(lambda namespace: index.population(namespace) > 0)
        by_content: Finder = ContentFinder(index, config.max_provenance_depth)
        by_similarity = similar_segments(
            *(vllm_config.model_config, config, index, self._namespaces, by_content, stats)
        )
        self.methods = Methods(config, group.block_size, self._layers, by_content, by_similarity)
        requests: dict[str, TrackedRequest] = {}
        self._merge_size: int | None = None
        self._image_ids = ImageIds(functools.partial(_image_ids_in_use, index, requests))
        budget = StepBudget(_step_tokens(vllm_config, config))
        self._accounts = Accounts(stats, self._layers)
        self._audits = start_audits(vllm_config, config.audit, stats)
        self._pool = pool
        self._index = index
        self._health = health
        num_blocks = pool.num_gpu_blocks - 1  # without vLLM's null block
        self._adapters = Adapters()
        self._forgotten = Forgotten(index, self._namespaces, FORGOTTEN_PER_BLOCK * num_blocks)
        depth = config.max_provenance_depth
        followers = [] if by_similarity is None else [by_similarity.store]
        self._tier = None
        if region is not None:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            known = (pool, index, self._namespaces, health, stats)
            has_files = options.path is not None
            of_model = (vllm_config, group, options.codec)
            fingerprint = model_fingerprint(*of_model) if has_files else None
            owner = Owner(config.knowledge_path, vllm_config.parallel_config.data_parallel_index)
            self._tier = start_tier(region, options, ranks, *known, fingerprint, owner)
        self._conversations = Conversations(requests, self._namespaces, health, group.block_size)
        self._donors = Donors(index, requests, depth, health, self._forgotten, followers)
        entries = FrozenPool(
            pool,
            self._namespaces,
            num_blocks,
            self._frozen_limit(num_blocks),
            config.frozen_pressure,
            config.frozen_returns,
            clock=time.time,
        )
        documents = None if self._tier is None else self._tier.documents
        self._freezing = Freezing(entries, index, pool.is_exact, health, documents)
        self._compression = Compression(pool, entries, group.block_size)
        self._planner = Planner(
            requests,
            pool,
            self._freezing.make_room,
            budget,
            health,
            group.block_size,
            is_spread=self._is_spread,
            clock=time.perf_counter,
            on_match=functools.partial(stats.observe, "match_seconds"),
            tier=self._tier,
        )
        self.set_enabled(config.starts_enabled)
        self._isolated = None
        if layout is not None:
            capacity = num_blocks - kv_cache_manager.watermark_blocks
            self._isolated = IsolatedRequests(layout, pool, index, entries, self._slots, capacity)
        listeners: list[BlockListener] = [self._donors, self._conversations, self._freezing]
        if self._tier is not None:
            listeners.append(self._tier)
        if self._isolated is not None:
            listeners.insert(0, self._isolated.cold)  # releases frozen blocks, too
        pool.attach(
            *(requests, budget, self._freezing.make_room, listeners),
            keeps_evicted=self._tier is not None,
        )

    def set_enabled(self, enabled: Switch) -> Switch:
        """Kill switch. Off: no request reuses anything; donors keep being indexed. `OBSERVE`: what
        requests would reuse is planned and reported."""
        self._planner.enabled, self._planner.observes = bool(enabled), enabled == OBSERVE
        return enabled

    def status(self) -> dict[str, Any]:
        """What the status route shows."""
        enabled = OBSERVE if self._planner.observes else self._planner.enabled
        shown = {"enabled": enabled, "indexed_blocks": len(self._index)}
        return shown if self._tier is None else shown | {"tier": self._tier.counts()._asdict()}

    @_contained(otherwise=None)
    def add(self, request: Request) -> None:
        """A request arrived; one without extra keys is ignored."""
        params = request.sampling_params
        parsed = parse_request(params.extra_args if params else None, self._config, trusted=True)
        has_documents = (
            self._isolated is not None
            and parsed.freeze is None  # a document of a knowledge base, laid out by itself
            and self._isolated.arrived(request)
        )
        extra_keys = parsed.extra_keys or (isolated.private_keys() if has_documents else None)
        if extra_keys is None:
            return
        options, images = parsed.options, None
        if self._isolated is None and not (parsed.documents or parsed.compresses):
            images = images_of(request, self._merge_size, self._image_ids)
        bypass = bypass_reason(request, images)
        if has_documents:
            # vLLM runs a request that is to read no cache, whatever `match` says, and names its
            # blocks: others would find documents there that were computed in their place.
            request.skip_reading_prefix_cache = False
        if self._isolated is not None and not has_documents:
            bypass = bypass or "no_documents"
        freeze = None if parsed.freeze is None else FreezeOrder.parse(parsed.freeze)
        if freeze is not None:
            # What is shared between users must hold nothing of anybody's prompt.
            bypass = bypass or "knowledge_base"
        tokens, key = all_tokens(request), namespace_of(request, extra_keys, images)
        resident: ResidentBlocks = functools.partial(self._pool.resident_blocks, request)
        namespace = self._namespaces.intern(key)
        if self._tier is not None:
            self._tier.recall(namespace, key)
            resident = OwnPrefix(request, self._pool, self._tier.exact_entry)
        contexts = functools.partial(_contexts, request)
        if images is not None:
            tokens = images.keyed(tokens)
        names = functools.partial(_names, request)
        prompt = Prompt(namespace, tokens, resident, names, contexts, images)
        falls_back = self._audits.falls_back(self._namespaces.digest(namespace))
        if falls_back:
            careful = self._config.fallback_options(options)
            bypass = bypass or ("fallback" if careful is None else None)
            options = careful or options
        # Images, and documents by their names, are wholly reused: the pass cannot compute them.
        by_name = has_documents or parsed.documents or parsed.compresses
        is_text = images is None and not by_name
        recompute_once = (
            options.recompute_once and is_text and options.policy != "exact" and not falls_back
        )
        # What later turns take as it is costs them nothing.
        weighs_turns = options.weigh_turns and not recompute_once
        work = self.methods.work_of(options)
        finder = self.methods.finder(options, images)
        if recompute_once:
            finder = ContinuingFinder(finder, self._conversations)
        tracked = TrackedRequest(
            request_id=request.request_id,
            prompt=prompt,
            finder=finder,
            min_reused_tokens=options.min_reused_tokens,
            # A named document is more than less work: its tokens as a text have other KV.
            make_recipe=functools.partial(
                self.methods.recipe, options, None if parsed.documents else work
            ),
            work=work if is_text else None,
            later_turns=self.methods.later_turns if weighs_turns else None,
            max_drift=math.inf if options.max_drift is None else options.max_drift,
            policy=options.policy,
            observes=options.observe,
            explains=options.explain,
            bypass=bypass,
            # A plan with images begins where the prefix hit ends.
            restores=images is None and self._restores(bypass),
            donates=bypass not in NEVER_DONATES,
            recompute_once=recompute_once,
            lora_id=lora_id_of(request),
            freeze=freeze,
            trace_headers=headers_of(request) if self._traces else None,
            falls_back=falls_back,
            namespace_class=self._config.audit.class_of(extra_keys),
        )
        if self._isolated is not None:
            tracked.min_reused_tokens = 1  # all that it reuses is exact
        if self._isolated is not None and has_documents:
            if self._isolated.compressed:
                self._isolated.name(tracked, request, parsed.documents)
            else:
                tracked.finder = self._isolated.finder(request, extra_keys, namespace, key)
            tracked.make_recipe, tracked.policy = isolated.recipe, LINK
            tracked.max_drift = math.inf
            tracked.required, tracked.restores = True, False
        if self._isolated is not None and isolated.is_private(extra_keys):
            tracked.donates = tracked.restores = False
        if parsed.compresses:
            self._compression.order(tracked, request, parsed)
        elif parsed.documents:
            if not has_documents:
                self._compression.name(tracked, parsed.documents)
            self._freezing.asked_for(prompt, parsed.documents)
        self._adapters.note(request)
        if options.explain:
            tracked.other_adapters = self._adapters.others(request, extra_keys, images)
        self._planner.add(tracked)
        if bypass is None:
            self._freezing.notice(tracked.prompt)

    def _restores(self, bypass: str | None) -> bool:
        """Whether a request may get its own exact prefix from the second tier.

        Documents of knowledge bases may, too, and those that are computed alone, and who falls
        back: it is what they would compute.
        """
        return self._tier is not None and (bypass is None or bypass in EXACT_ONLY)

    def match(self, request: Request, num_hit_tokens: int) -> tuple[int | None, bool]:
        """Tokens to supply behind vLLM's prefix hit, None to decide in a later step; and whether
        that takes several steps."""
        documents = self._isolated
        if (
            documents is None
            or self._planner.admission_closed
            or not documents.needs_plan(request, num_hit_tokens)
        ):
            return self._match(request, num_hit_tokens)
        tracked = self._planner.get(request.request_id)
        if documents.waits(request, num_hit_tokens, "error" if tracked is None else tracked.bypass):
            return None, False
        found = self._match(request, num_hit_tokens)
        assert tracked is not None
        if found[0] is None or tracked.plan is not None or self._planner.admission_closed:
            return found
        anybody = compat_manager.is_anybody_admitted(
            self._manager
        ) or documents.cold.holds_for_others(request.request_id)
        if tracked.reason != "no_free_blocks" or not anybody:
            documents.fail(request, f"it cannot be planned ({tracked.reason})")
        return None, False

    @_contained(otherwise=(0, False))
    def _match(self, request: Request, num_hit_tokens: int) -> tuple[int | None, bool]:
        if self._planner.admission_closed:
            return 0, False
        tracked = self._planner.get(request.request_id)
        if tracked is None:
            return 0, False
        if request.num_tokens != tracked.num_tokens:  # it was preempted
            tracked.prompt = tracked.prompt.with_tokens(all_tokens(request))
        prefix = functools.partial(
            self._pool.prefix_state,
            request,
            num_hit_tokens,
            self._slots.needed(request.num_tokens),
            self._manager.watermark_blocks,
        )
        supplied = self._planner.decide(tracked, num_hit_tokens, request.num_tokens, prefix)
        if tracked.explains and tracked.report is None:
            # Now: once it is allocated, its own blocks are in the index.
            tracked.explanation = self._explained(tracked)
        return supplied, tracked.plan is not None and tracked.plan.spread

    @_contained(otherwise=None)
    def allocated(self, request: Request, block_ids: list[int]) -> None:
        """vLLM allocated the request's blocks: it runs in this step, or is set aside for its plan.

        Called once more when its spread plan is done and it runs.
        """
        tracked = self._planner.get(request.request_id)
        if tracked is None or request.num_computed_tokens:
            return
        report = self._planner.allocated(tracked, block_ids)
        if self._isolated is not None:
            self._isolated.cold.left(request.request_id)
        hit_blocks = block_ids[: report.prefix_tokens // self._block_size]
        if tracked.later_turns is not None and not request.num_preemptions:
            _, exact_end = tracked.exact_ends
            names, size = tracked.prompt.names(0, len(block_ids)), self._block_size
            self.methods.turns.began(names, len(hit_blocks), min(exact_end // size, len(names)))
        self._donors.index_prefix(tracked, request.all_token_ids, hit_blocks)
        if request.num_preemptions:
            self._audits.forget(request.request_id)
            return  # counted when it was first admitted, like vLLM's own figures
        searched = report.bypass_reason in SEARCHED and tracked.explanation is not None
        if tracked.explains and not searched:
            reason = report.bypass_reason or "no_match"
            tracked.explanation = unexplored(report.prefix_tokens, tracked.num_tokens, reason)
        self._accounts.admitted(tracked, request, report)
        self._freezing.used(tracked, hit_blocks)
        match_span(tracked)
        if tracked.plan is not None and tracked.plan.num_reused:
            self._audit(tracked, tracked.plan, request)

    def _audit(self, tracked: TrackedRequest, plan: ReusePlan, request: Request) -> None:
        """Perhaps. What a grammar rules out is no part of the comparison, so there is none; and a
        reference has no images. Nor is there one of what compresses documents, or names compressed
        ones: their kept tokens, computed as a text, are no truth."""
        if request.use_structured_output or request.mm_features:
            return
        if tracked.required or tracked.names_documents:
            return
        policy, report = tracked.policy, tracked.report
        assert report is not None
        if not self._audits.draws(request.num_prompt_tokens, policy, tracked.namespace_class):
            return
        self._audits.admitted(
            Audit(
                request_id=request.request_id,
                policy=policy,
                namespace=self._namespaces.digest(tracked.prompt.namespace),
                namespace_class=tracked.namespace_class,
                fell_back=tracked.falls_back,
                prompt=list(request.prompt_token_ids or ()),
                lora_request=request.lora_request,
                found={
                    "prompt_tokens": request.num_prompt_tokens,
                    "prefix_tokens": report.prefix_tokens,
                    "segment_tokens": plan.num_reused,
                    "segments": report.matches,
                    "depth": plan.donor_depth,
                },
                planned={
                    "reused_tokens": plan.num_reused,
                    "recomputed_tokens": plan.num_recomputed,
                    "computed_share": report.computed_share,
                },
            )
        )

    def note_outcomes(
        self, outcomes: Mapping[str, PlanOutcome], requests: Mapping[str, Request]
    ) -> None:
        """The workers report how plans have ended.

        Args:
            outcomes: by request.
            requests: of the scheduler, by id; who has ended is not among them.
        """
        for request_id, outcome in outcomes.items():
            if outcome.restoration:
                self._note_restored(request_id, outcome)
            if request_id in requests:
                self._note_outcome(requests[request_id], outcome)

    def _note_restored(self, request_id: str, outcome: PlanOutcome) -> None:
        """The workers report a restoration; the request may have another plan by now, or none."""
        with self._health.contained("a restoration"):
            tracked, number = self._planner.get(request_id), outcome.restoration
            plan = None if tracked is None else tracked.plan
            still_planned = plan is not None and plan.restores(number)
            if plan is not None and still_planned:
                plan.is_restored = outcome.is_restored
            self._pool.restored(number, outcome.is_restored, still_planned)

    @_contained(otherwise=None)
    def _note_outcome(self, request: Request, outcome: PlanOutcome) -> None:
        tracked = self._planner.get(request.request_id)
        if self._compression.carried_out(request.request_id, outcome):
            return  # it says nothing about anybody's requests
        if tracked is None:
            return
        documents = self._isolated
        asks = documents is not None and documents.has_documents(request.request_id)
        plan = tracked.unchecked.popleft() if tracked.unchecked else None
        if documents is not None and asks and _is_wrong(plan, outcome):
            documents.fail(request, "its plan failed, and was computed in full")
            return
        self._accounts.carried_out(tracked, request, outcome)

    @_contained(otherwise=0)
    def saved_tokens(self, request: Request) -> int:
        """Tokens of the request's plan that are not computed."""
        tracked = self._planner.get(request.request_id)
        if tracked is None or tracked.plan is None:
            return 0
        plan = tracked.plan
        return plan.num_restored + plan.num_reused - plan.num_recomputed

    def call_back(self, request: Request) -> None:
        """vLLM takes the blocks from a request whose spread plan is under way, or just done.

        It reuses nothing from here on: a report on this plan may still come, and must not be taken
        for that of another.
        """
        self._planner.call_back(request.request_id)
        self._audits.forget(request.request_id)
        self._called_back.append(request.request_id)

    def take_called_back(self) -> list[str]:
        """Requests that were called back since the last step."""
        taken, self._called_back = self._called_back, []
        return taken

    def take_plans(self) -> list[ReusePlan]:
        """The scheduling step is over."""
        plans = self._planner.take_plans()
        if self._tier is not None:
            self._tier.note_plans(plans)
        self._donors.begin_step()
        self._conversations.begin_step()
        self._pool.begin_step()
        self._freezing.begin_step()
        self._accounts.frozen(self._freezing.entries)
        return plans

    def close(self) -> None:
        """The engine ends."""
        if self._tier is not None:
            self._tier.close()

    def take_tier_orders(self, runs_model: bool) -> TierOrders | None:
        """What the workers do for the second tier in the step whose plans were taken.

        Args:
            runs_model: whether the step has a forward.
        """
        return None if self._tier is None else self._tier.take_orders(runs_model)

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine has to step although no request needs it."""
        return self._tier is not None and self._tier.has_pending_work

    def note_tier(self, done: TierDone) -> None:
        """The workers report orders of the second tier."""
        if self._tier is not None:
            self._tier.note(done)

    def take_audit_orders(self) -> AuditOrders | None:
        """What the workers are to record from this step on; None for nothing new."""
        return self._audits.take_orders()

    def note_audits(self, results: Mapping[str, AuditResult]) -> None:
        """The workers report what came of references."""
        self._audits.compared(results)

    def next_reference(self, running: int, waiting: int) -> Request | None:
        """A step is over: a request that is to be added to the engine, to audit another."""
        reference: Request | None = self._audits.next_reference(running, waiting, self._has_room)
        return reference

    def take_documents(self) -> list[Request]:
        """A step is over: requests that compute documents for others, to be added to the engine."""
        return [] if self._isolated is None else self._isolated.cold.take()

    def take_failed(self) -> list[str]:
        """A step is over: requests that are to be ended with an error."""
        return [] if self._isolated is None else self._isolated.take_failed()

    def _has_room(self, num_tokens: int) -> bool:
        needed = -(-num_tokens // self._block_size) + self._manager.watermark_blocks
        return self._pool.num_free_blocks() >= needed

    def reset_audits(self) -> str | None:
        """The cache is about to be reset; a reference that runs has to be aborted."""
        return self._audits.reset()

    def audits(self) -> dict[str, Any]:
        """What the route of audits shows."""
        return self._audits.status()

    @_contained(otherwise=None)
    def finished(self, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
        """The request ended, in whatever way; its report if it was ever admitted.

        Args:
            block_ids: its blocks, which it still holds.
        """
        report, is_complete = None, request.status in _COMPLETED
        try:
            report = self._finished(request, block_ids)
        finally:  # whatever happened: what is held for a request ends with it
            self._audits.ended(request.request_id, request.output_token_ids, report or {})
            if self._isolated is not None:
                self._isolated.ended(request, block_ids if is_complete else [])
        return report

    def _finished(self, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
        tracked = self._planner.remove(request.request_id)
        chosen = self._compression.ended(request.request_id)
        if tracked is None:
            return None
        with self._health.contained("the similarity index"):
            self.methods.catch_up()
        try:
            frozen = self._freeze(tracked, request, block_ids)
        finally:
            self._namespaces.release(tracked.prompt.namespace)
        if tracked.report is None:
            return None
        report = {
            "policy": tracked.policy,
            "prompt_tokens": request.num_prompt_tokens,
            **tracked.report._asdict(),
        }
        if tracked.falls_back:
            report["fallback"] = True
        if tracked.explanation is not None:
            report["explain"] = tracked.explanation
        if chosen is not None:
            report["chosen"] = chosen
        if tracked.freeze is not None:
            report["frozen"] = frozen
            if not frozen:
                report["not_frozen"] = self._freezing.why_refused(tracked.freeze.entry)
        return report

    def _freeze(self, tracked: TrackedRequest, request: Request, block_ids: list[int]) -> bool:
        """Carry out the order of a request that ended, if it has one."""
        if request.status in _COMPLETED:
            return self._freezing.finish(tracked, block_ids)
        if tracked.freeze is not None:
            status = request.status.name.lower().replace("_", " ")
            self._freezing.refuse(tracked.freeze.entry, f"its request is {status}: warm it again")
        return False

    def take_layers(self, layers: ModelLayers) -> None:
        """What the workers have found the model's layers to be, before the first request."""
        self._layers = self._accounts.layers = self.methods.layers = layers

    def take_merge_size(self, merge_size: int | None) -> None:
        """What the workers have proven of images: patches per token in a row, and in a column;
        None: they are not reused."""
        self._merge_size = merge_size

    def frozen(self) -> dict[str, Any]:
        """What knowledge bases need to know of the frozen blocks; uses are reported once only."""
        return self._freezing.state()

    def unfreeze(self, entries: list[str]) -> None:
        """Release entries that were deleted."""
        self._freezing.forget(entries)

    def _explained(self, tracked: TrackedRequest) -> list[dict[str, Any]] | None:
        """Where each stretch of a prompt comes from that was just decided on; None if nothing was
        searched for."""
        plan = tracked.plan or tracked.observed
        if plan is not None:
            pieces = plan.copied
        elif tracked.reason in SEARCHED and tracked.found is not None:
            pieces = tracked.found.pieces
        else:
            return None
        reason = self._why_not_reused(tracked)
        if tracked.given_up is not None:
            reason = Unused(tracked.given_up, "no_free_blocks", reason)
        images, start, new_image = tracked.prompt.images, tracked.start, None
        if images is not None:
            new_image = images.first_new(pieces.reused(start, tracked.num_tokens - 1), start)
            pieces = pieces if new_image is None else pieces.up_to(new_image)
        found = explain(pieces, start, tracked.num_tokens, reason, new_image)
        return with_recomputed(found, plan.recomputed_positions if plan else None)

    def _why_not_reused(self, tracked: TrackedRequest) -> Callable[[int, int], str]:
        """The reason for each text of a prompt that is in no plan of it."""
        bypass = tracked.bypass
        if bypass is not None:  # it is restored only
            return lambda start, stop: bypass
        if tracked.finder.is_exact:
            return lambda start, stop: "not_cached"
        others = [self._namespaces.find(key) for key in tracked.other_adapters]
        known = [namespace for namespace in others if namespace is not None]
        by_content = Reasons(tracked.prompt, self._index, self._forgotten, known)
        found = tracked.found
        return by_content if found is None else Unused(found.pieces, "not_worth_it", by_content)

    def _frozen_limit(self, num_blocks: int) -> int:
        """Most blocks that may be frozen: the configured share, and never so many that a request of
        maximum length would not fit beside them."""
        longest = -(-self._slots.max_tokens // self._block_size)
        others = longest + self._manager.watermark_blocks + 1  # one for the token to come
        return max(0, min(int(self._config.frozen_share * num_blocks), num_blocks - others))

    def _is_spread(self, plan: ReusePlan) -> bool:
        """Whether a plan is so large that others who run would wait for it too long, or that its
        states would not fit beside those of another that is under way (`memory.py`).

        vLLM keeps an adapter loaded in the steps of its requests only, so a plan with an adapter
        is carried out in one step. So is one of a prompt with images, behind which vLLM may have to
        go on with a new one.
        """
        if plan.lora_id or plan.numbers is not None or self._spread_above is None:
            return False
        if not compat_manager.is_anybody_admitted(self._manager):
            return False
        is_long = plan.layer_tokens(self._layers) > self._spread_above
        return is_long or plan.active_tokens > self._max_wave_tokens


def _is_wrong(plan: ReusePlan | None, outcome: PlanOutcome) -> bool:
    """Whether documents that are to be computed alone were computed behind each other."""
    return plan is not None and plan.num_chosen(outcome.computed) > 0


def _names(request: Request, first: int, last: int) -> Sequence[bytes]:
    return request.block_hashes[first:last]


def _contexts(request: Request, blocks: IntArray) -> ContextArray:
    return contexts_of(request.block_hashes, blocks)


def _image_ids_in_use(index: SegmentIndex, requests: Mapping[str, TrackedRequest]) -> IntArray:
    """Ids of the tokens of images that somebody has, int32 `[n]`."""
    prompts = (request.prompt for request in requests.values())
    live = [prompt.tokens[prompt.tokens < 0] for prompt in prompts if prompt.images is not None]
    return np.concatenate([index.image_tokens(), *live])


def _step_tokens(vllm_config: VllmConfig, config: SegReuseConfig) -> int:
    """Most tokens that the plans of one step compute."""
    device = "cpu" if current_platform.is_cpu() else "other"
    wanted = config.max_step_tokens or STEP_TOKENS[device]
    return min(wanted, vllm_config.scheduler_config.max_num_batched_tokens)
