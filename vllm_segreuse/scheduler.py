# SPDX-License-Identifier: Apache-2.0
"""The connector's half in the scheduler process: vLLM's requests and blocks on one side, the
planner on the other."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from vllm_segreuse.cache.frozen import FrozenPool
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import warm_up
from vllm_segreuse.cache.namespace import NamespaceTable, namespace_key
from vllm_segreuse.cache.planner import Planner
from vllm_segreuse.cache.tracked import Report, TrackedRequest
from vllm_segreuse.compat import kv_cache_manager as compat_manager
from vllm_segreuse.compat import triton_dispatcher
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.config import STEP_TOKENS, RequestOptions, SegReuseConfig, parse_request
from vllm_segreuse.metrics import SegReuseStats
from vllm_segreuse.plan import BoolArray, FreezeOrder, IntArray, Recipe, ReusePlan
from vllm_segreuse.policies import POLICIES, Situation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = init_logger("vllm.segreuse")

_NEVER_DONATES = ("lora", "multimodal", "prompt_embeds", "streaming_input")


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
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: SegReuseConfig,
        kv_cache_manager: KVCacheManager,
        stats: SegReuseStats,
    ) -> None:
        triton_dispatcher.install()  # numba is loaded from here on
        compat_manager.install()
        self._config = config
        self._stats = stats
        self._manager = kv_cache_manager
        self._called_back: list[str] = []
        self._lora = vllm_config.lora_config is not None
        self._num_layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self._block_size = vllm_config.cache_config.block_size
        self._max_wave_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._spread_above = config.spread_work(self._max_wave_tokens, self._num_layers)
        pool = SegmentBlockPool.adopt(kv_cache_manager.block_pool)
        index = SegmentIndex(pool.num_gpu_blocks, self._block_size)
        self._namespaces = NamespaceTable(lambda namespace: index.population(namespace) > 0)
        warm_up()
        self._planner = Planner(
            index,
            pool,
            max_step_tokens=_step_tokens(vllm_config, config),
            is_spread=self._is_spread,
            max_depth=config.max_provenance_depth,
            clock=time.perf_counter,
            on_match=functools.partial(stats.observe, "match"),
        )
        self._planner.enabled = config.starts_enabled
        self._frozen = FrozenPool(
            pool,
            self._namespaces,
            pool.num_gpu_blocks - 1,  # without vLLM's null block
            _frozen_limit(vllm_config, config, pool.num_gpu_blocks - 1, kv_cache_manager),
            config.frozen_pressure,
            config.frozen_returns,
            clock=time.time,
        )
        pool.attach(index, self._planner, self._frozen)
        self._pool = pool

    def set_enabled(self, enabled: bool) -> bool:
        """Kill switch. Off: no request reuses anything; donors keep being indexed."""
        self._planner.enabled = enabled
        return enabled

    def status(self) -> dict[str, Any]:
        """What the status route shows."""
        return {"enabled": self._planner.enabled, "indexed_blocks": len(self._pool.index)}

    @_contained(otherwise=None)
    def add(self, request: Request) -> None:
        """A request arrived; without extra keys it is none of our business."""
        params = request.sampling_params
        extra_args = params.extra_args if params else None
        parsed = parse_request(extra_args, self._config, trusted=True)
        if parsed.extra_keys is None:
            return
        bypass, tokens = self._bypass(request), _all_tokens(request)
        freeze = None if parsed.freeze is None else FreezeOrder.parse(parsed.freeze)
        if freeze is not None:
            # What is shared between users must hold nothing of anybody's prompt.
            bypass = bypass or "knowledge_base"
        lora = request.lora_request
        key = namespace_key(
            parsed.extra_keys,
            request.cache_salt,
            (lora.lora_name, lora.lora_path) if lora else None,
            tuple(feature.identifier for feature in request.mm_features),
        )
        tracked = TrackedRequest(
            request_id=request.request_id,
            namespace=self._namespaces.intern(key),
            min_reused_tokens=parsed.options.min_reused_tokens,
            make_recipe=functools.partial(self._recipe, parsed.options),
            tokens=tokens,
            policy=parsed.options.policy,
            bypass=bypass,
            donates=bypass not in _NEVER_DONATES,
            freeze=freeze,
            resident_blocks=(
                functools.partial(self._pool.resident_blocks, request)
                if parsed.options.policy == "exact"
                else None
            ),
        )
        self._planner.add(tracked)
        if bypass is None:
            hashes = functools.partial(tracked.hashes, self._block_size)
            self._frozen.notice(tracked.namespace, hashes)

    @_contained(otherwise=(0, False))
    def match(self, request: Request, num_hit_tokens: int) -> tuple[int | None, bool]:
        """Tokens to supply behind vLLM's prefix hit, None to be asked again in a later step; and
        whether that takes several steps."""
        if self._planner.admission_closed:
            return 0, False
        tracked = self._planner.get(request.request_id)
        if tracked is None:
            return 0, False
        if request.num_tokens != len(tracked.tokens):
            tracked.retoken(_all_tokens(request))
        prefix = functools.partial(
            self._pool.prefix_state, request, num_hit_tokens, self._manager.watermark_blocks
        )
        supplied = self._planner.decide(tracked, num_hit_tokens, request.num_tokens, prefix)
        return supplied, tracked.plan is not None and tracked.plan.spread

    @_contained(otherwise=None)
    def allocated(self, request: Request, block_ids: list[int]) -> None:
        """vLLM allocated the request's blocks: it runs in this step, or is set aside for its plan.

        Told once more when its spread plan is done and it runs.
        """
        tracked = self._planner.get(request.request_id)
        if tracked is None or request.num_computed_tokens:
            return
        report = self._planner.allocated(tracked, block_ids)
        if tracked.plan is not None:
            share = self._computed_share(tracked.plan, request.num_tokens)
            report = report._replace(computed_share=share)
        hit_blocks = block_ids[: report.prefix_tokens // self._block_size]
        self._pool.index_prefix(tracked, request, hit_blocks)
        if request.num_preemptions:
            return  # counted when it was first admitted, like vLLM's own figures
        tracked.report = report
        if tracked.plan is not None and tracked.plan.counted:
            tracked.awaited = tracked.plan
        self._count(report, recomputed=tracked.awaited is None)
        if tracked.freeze is None:
            donors = [] if tracked.plan is None else tracked.plan.donor_blocks
            self._frozen.used([*hit_blocks, *donors])
        if tracked.plan is not None:
            _note_saved(request, report)

    def computed(self, tokens: Mapping[str, int], requests: Mapping[str, Request]) -> None:
        """The workers tell how many tokens of a plan they computed at all layers.

        Args:
            tokens: that number, by request.
            requests: of the scheduler, by id; who has ended is not among them.
        """
        for request_id, count in tokens.items():
            if request_id in requests:
                self._note_computed(requests[request_id], count)

    @_contained(otherwise=None)
    def _note_computed(self, request: Request, count: int) -> None:
        tracked = self._planner.get(request.request_id)
        if tracked is None or tracked.report is None or tracked.awaited is None:
            return  # readmitted meanwhile: the report is about the first admission
        plan, tracked.awaited = tracked.awaited, None
        chosen = plan.num_chosen(count)
        recomputed = plan.recomputed(chosen)
        tracked.report = tracked.report._replace(
            recomputed_tokens=recomputed,
            computed_share=self._computed_share(plan, plan.stop + 1, chosen),
        )
        _note_saved(request, tracked.report)
        self._stats.count_tokens("recomputed", recomputed)

    @_contained(otherwise=0)
    def saved_tokens(self, request: Request) -> int:
        """Tokens of the request's plan that are not computed."""
        tracked = self._planner.get(request.request_id)
        if tracked is None or tracked.plan is None:
            return 0
        return tracked.plan.num_reused - tracked.plan.num_recomputed

    def call_back(self, request: Request) -> None:
        """vLLM takes the blocks from a request whose spread plan is under way, or just done.

        It reuses nothing from here on: a word of this plan may still come, and must not be taken
        for that of another.
        """
        self._planner.call_back(request.request_id)
        self._called_back.append(request.request_id)

    def take_called_back(self) -> list[str]:
        """Requests that were called back since the last step."""
        taken, self._called_back = self._called_back, []
        return taken

    def take_plans(self) -> list[ReusePlan]:
        """The scheduling step is over."""
        plans = self._planner.take_plans()
        self._pool.begin_step()
        return plans

    @_contained(otherwise=None)
    def finished(self, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
        """The request ended, in whatever way; its report if it was ever admitted.

        Args:
            block_ids: its blocks, which it still holds.
        """
        tracked = self._planner.remove(request.request_id)
        if tracked is None:
            return None
        try:
            frozen = self._freeze(tracked, request, block_ids)
        finally:
            self._namespaces.release(tracked.namespace)
        if tracked.report is None:
            return None
        report = {
            "policy": tracked.policy,
            "prompt_tokens": request.num_prompt_tokens,
            **tracked.report._asdict(),
        }
        return report if tracked.freeze is None else report | {"frozen": frozen}

    def _freeze(self, tracked: TrackedRequest, request: Request, block_ids: list[int]) -> bool:
        """Carry out a request's order to freeze what it has computed; whether that was done."""
        order = tracked.freeze
        completed = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if order is None or request.status not in completed:
            return False
        try:
            part = self._pool.frozen_part(tracked, order.first_token, block_ids)
        except ValueError as reason:
            logger.warning("segment reuse: %s is not frozen: %s", order.entry, reason)
            return False
        return self._frozen.add(order, part)

    def frozen(self) -> dict[str, Any]:
        """What knowledge bases need to know of the frozen pool; uses are told once only."""
        pool = self._frozen
        return {
            "total": pool.num_blocks,
            "free": self._pool.num_free_blocks(),
            "frozen": pool.num_frozen,
            "limit": pool.limit,
            "block_size": self._block_size,
            "given_back": pool.given_back,
            "warm": {name: list(entry) for name, entry in pool.warm().items()},
            "uses": {name: list(use) for name, use in pool.take_uses().items()},
            "wanted": pool.wanted(),
        }

    def unfreeze(self, entries: list[str]) -> None:
        """Forget entries of the frozen pool."""
        self._frozen.release(entries)

    def _bypass(self, request: Request) -> str | None:
        """Why a request of this kind never reuses, or None."""
        params = request.sampling_params
        reasons = {
            "pooling": params is None,
            "prompt_logprobs": params is not None and params.prompt_logprobs is not None,
            "prefix_cache_skipped": request.skip_reading_prefix_cache,
            "lora": self._lora,
            "multimodal": bool(request.mm_features),
            "prompt_embeds": request.prompt_embeds is not None or request.prompt_token_ids is None,
            "streaming_input": request.resumable,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _recipe(self, options: RequestOptions, reused: BoolArray, segments: IntArray) -> Recipe:
        return POLICIES[options.policy](
            Situation(
                reused=reused,
                segments=segments,
                block_size=self._block_size,
                num_layers=self._num_layers,
                recompute_ratio=options.recompute_ratio,
                dense_layers=options.dense_layers,
                overflow_tokens=options.overflow_tokens,
            )
        )

    def _is_spread(self, plan: ReusePlan) -> bool:
        """Whether a plan is so large that others who run would wait for it too long, or that its
        states would not fit beside those of another that is under way (`memory.py`)."""
        if self._spread_above is None or not compat_manager.is_anybody_admitted(self._manager):
            return False
        is_long = plan.layer_tokens(self._num_layers) > self._spread_above
        return is_long or plan.active_tokens > self._max_wave_tokens

    def _computed_share(self, plan: ReusePlan, num_tokens: int, chosen: int | None = None) -> float:
        by_vllm = (num_tokens - plan.stop) * self._num_layers  # the last token, as a rule
        computed = plan.layer_tokens(self._num_layers, chosen) + by_vllm
        return round(computed / ((num_tokens - plan.start) * self._num_layers), 4)

    def _count(self, report: Report, recomputed: bool) -> None:
        self._stats.count_tokens("prefix", report.prefix_tokens)
        self._stats.count_tokens("reused", report.reused_tokens)
        self._stats.count_tokens("exact", report.exact_tokens)
        if recomputed:
            self._stats.count_tokens("recomputed", report.recomputed_tokens)
        self._stats.count_tokens("new", report.new_tokens)
        if report.bypass_reason is None:
            self._stats.count_request("reused")
        else:
            self._stats.count_request("bypassed", report.bypass_reason)


def _step_tokens(vllm_config: VllmConfig, config: SegReuseConfig) -> int:
    """Most tokens that the plans of one step compute."""
    device = "cpu" if current_platform.is_cpu() else "other"
    wanted = config.max_step_tokens or STEP_TOKENS[device]
    return min(wanted, vllm_config.scheduler_config.max_num_batched_tokens)


def _frozen_limit(
    vllm_config: VllmConfig, config: SegReuseConfig, num_blocks: int, manager: KVCacheManager
) -> int:
    """Most blocks that may be frozen: the configured share, and never so many that a request of
    maximum length would not fit beside them."""
    longest = -(-vllm_config.model_config.max_model_len // vllm_config.cache_config.block_size)
    others = longest + manager.watermark_blocks + 1  # one for the token to come
    return max(0, min(int(config.frozen_share * num_blocks), num_blocks - others))


def _note_saved(request: Request, report: Report) -> None:
    """vLLM has noted "everything but the last token": say what is really saved."""
    if request.prefill_stats is not None:
        request.prefill_stats.set(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=report.prefix_tokens,
            num_external_cached_tokens=report.reused_tokens - report.recomputed_tokens,
        )


def _all_tokens(request: Request) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(request.all_token_ids[:], dtype=np.int32)
