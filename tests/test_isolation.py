# SPDX-License-Identifier: Apache-2.0
"""Whatever separates two requests, neither meets what the other left in the cache.

Every dimension (extra keys, salt, adapter, its version, image, epoch of the model) against every
way of finding KV, on vLLM's own KV cache manager without a model: who is like the one before finds
it, who differs in that one dimension does not.
"""

from dataclasses import dataclass, replace
from itertools import count, permutations
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams
from vllm.config import ObservabilityConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.in_scheduler import scheduler_side
from vllm_segreuse.config.metrics import SegReuseStats
from vllm_segreuse.engine.kv_group import segment_group
from vllm_segreuse.plan import FreezeOrder

SIZE = 4
DOCUMENT = [*range(100, 132)]
NEW_TEXT = [*range(200, 216)]
CHANGED = [token + 1000 * (token % SIZE == 3) for token in DOCUMENT]
"""Equal to the document but for one token of every block."""

SIMILARITY = {
    "window_tokens": 16,
    "stride_tokens": 4,
    "shingle_tokens": 2,
    "context_tokens": 8,
    "threshold": 0.2,
    "min_run_tokens": 2,
}


@dataclass(frozen=True)
class Who:
    """All that separates one request from another."""

    keys: tuple[str, ...] = ("keys",)
    salt: str | None = None
    lora: tuple[str, str] | None = None
    image: str | None = None
    epoch: int = 0


DIMENSIONS: dict[str, tuple[Who, ...]] = {
    "extra keys": (Who(), Who(keys=("other",)), Who(keys=("keys", "other"))),
    "salt": (Who(), Who(salt="salt"), Who(salt="keys")),
    "adapter": (Who(), Who(lora=("one", "/adapters/1")), Who(lora=("two", "/adapters/1"))),
    "adapter version": (Who(lora=("one", "/adapters/1")), Who(lora=("one", "/adapters/1-new"))),
    "image": (Who(), Who(image="a cat"), Who(image="a dog")),
}

SHARED = {("extra keys", "exact prefix"), ("extra keys", "behind a hole")}
"""vLLM's prefix cache is everybody's who sends no salt: extra keys name what may be moved."""

NEVER = {
    ("image", kind)
    for kind in (
        *("segment", "approximate prefix", "approximate prefix, several steps"),
        *("behind a hole", "frozen", "similar"),
    )
}
"""Prompts with images run without reuse, and knowledge bases hold text only."""


class Found(NamedTuple):
    """Tokens that a request did not compute: by vLLM's prefix cache, and by ours."""

    prefix: int
    reused: int


class Cache:
    """vLLM's KV cache manager with our scheduler's side; no model.

    Args:
        spread_tokens: see `SegReuseConfig`; where it is given, a request runs beside all others.

    Attributes:
        similarity: whether similar segments are reused.
    """

    similarity = True

    def __init__(self, spread_tokens: int | None = None) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        cache_config = KVCacheConfig(
            num_blocks=256,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self._manager = KVCacheManager(
            cache_config, max_model_len=256, scheduler_block_size=SIZE, hash_block_size=SIZE
        )
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                get_total_num_hidden_layers=lambda: 4,
                max_model_len=256,
                skip_tokenizer_init=True,
                hf_config=SimpleNamespace(),
            ),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            observability_config=ObservabilityConfig(),
            cache_config=SimpleNamespace(block_size=SIZE),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
            num_speculative_tokens=0,
            num_lookahead_tokens=0,
        )
        self._side = scheduler_side(
            config,
            SegReuseConfig.from_options(
                {
                    "spread_tokens": spread_tokens,
                    "similarity": SIMILARITY if self.similarity else None,
                }
            ),
            self._manager,
            SegReuseStats(),
            segment_group(cache_config),
        )
        self._ids = count()
        self._epoch = 0
        self.spread = 0
        self._running: Request | None = None
        if spread_tokens is not None:
            self._running = self._request(Who(), [*range(300, 305)], "shift", freeze=False)
            assert self._manager.allocate_slots(self._running, 5) is not None

    def make_hole(self) -> None:
        """Of the blocks that have names, the first is evicted: that of the first request."""
        pool = self._manager.block_pool
        pool.evict_blocks({next(b.block_id for b in pool.blocks if b.block_hash is not None)})

    def evict(self) -> None:
        """Somebody needs every block that is not frozen."""
        pool = self._manager.block_pool
        pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))

    def ask(
        self, who: Who, tokens: list[int], policy: str = "shift", freeze: bool = False
    ) -> Found:
        """One request from its arrival to its end; then its blocks are frozen, or not."""
        if who.epoch != self._epoch:
            if self._running is not None:
                self._manager.free(self._running)
            assert self._manager.reset_prefix_cache()  # as vLLM does when the weights change
            self._epoch = who.epoch
        request = self._request(who, tokens, policy, freeze)
        self._side.add(request)
        blocks, hit, *_ = self._manager.get_computed_blocks(request)
        supplied, spread = self._side.match(request, hit)
        assert supplied is not None
        new = 0 if spread else len(tokens) - hit - supplied
        allocated = self._manager.allocate_slots(
            *(request, new, hit, blocks),
            num_external_computed_tokens=supplied,
            delay_cache_blocks=spread,
        )
        assert allocated is not None
        table = self._manager.get_block_ids(request.request_id)[0]
        self._side.allocated(request, table)
        self._side.take_step(True)
        if spread:
            self._go_on(request, hit + supplied)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        report = self._side.finished(request, table)
        assert report is not None
        assert not freeze or report["frozen"]
        self._manager.free(request)
        assert hit == report["prefix_tokens"]
        return Found(hit, report["reused_tokens"])

    def _go_on(self, request: Request, supplied: int) -> None:
        """A plan is done after several steps: vLLM's `Scheduler._update_waiting_for_remote_kv`."""
        self.spread += 1
        request.num_computed_tokens = min(supplied, request.num_tokens - 1)
        self._manager.cache_blocks(request, request.num_computed_tokens)
        new = request.num_tokens - request.num_computed_tokens
        assert self._manager.allocate_slots(request, new) is not None
        self._side.allocated(request, self._manager.get_block_ids(request.request_id)[0])
        self._side.take_step(True)

    def _request(self, who: Who, tokens: list[int], policy: str, freeze: bool) -> Request:
        place = PlaceholderRange(offset=0, length=SIZE)
        options = {
            "extra_keys": list(who.keys),
            "segreuse_policy": policy,
            "segreuse_min_reused_tokens": SIZE,
        }
        if freeze:
            options["segreuse_freeze"] = FreezeOrder("document", 0, 1, 0).encode()
        return Request(
            request_id=f"request {next(self._ids)}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1, extra_args=options),
            pooling_params=None,
            cache_salt=who.salt,
            lora_request=LoRARequest(who.lora[0], 1, who.lora[1]) if who.lora else None,
            mm_features=[MultiModalFeatureSpec(None, "image", who.image, place)]
            if who.image
            else None,
            block_hasher=get_request_block_hasher(SIZE, sha256),
        )


def exact_prefix(before: Who, after: Who) -> int:
    """Tokens of the document that vLLM's own prefix cache gives to the second request."""
    cache = Cache()
    cache.ask(before, DOCUMENT)
    return cache.ask(after, [*DOCUMENT, 8]).prefix


def segment(before: Who, after: Who) -> int:
    """Tokens of the document that the second request reuses elsewhere."""
    cache = Cache()
    cache.ask(before, DOCUMENT)
    found = cache.ask(after, [7, *DOCUMENT, 8])
    assert found.prefix == 0
    return found.reused


def approximate_prefix(before: Who, after: Who) -> int:
    """Tokens of a prompt of reused and new text that the same prompt takes from it, in place."""
    cache = Cache()
    cache.ask(before, DOCUMENT)
    prompt = [7, *DOCUMENT, 8, 9, 10, *NEW_TEXT]
    cache.ask(before, prompt)
    found = cache.ask(after, [*prompt, 11])
    assert found.prefix == 0 or before.image  # approximate blocks have no exact name
    return found.reused


def over_several_steps(before: Who, after: Who) -> int:
    """As `approximate_prefix`, where plans with anything to compute take several steps, except
    those with an adapter."""
    is_spread = not before.image and not before.lora
    cache = Cache(spread_tokens=1)
    cache.ask(before, DOCUMENT)
    prompt = [6, 7, *DOCUMENT, 9, 10, *NEW_TEXT]
    cache.ask(before, prompt)
    assert cache.spread == is_spread
    found = cache.ask(after, [*prompt, 11])
    if before.epoch == after.epoch:  # a reset ends the request beside which plans are spread
        assert cache.spread == is_spread + (is_spread and found.reused > 0)
    return found.reused


def behind_a_hole(before: Who, after: Who) -> int:
    """Tokens of the document that the exact tier takes in place, behind its first block."""
    cache = Cache()
    cache.ask(before, DOCUMENT)
    cache.make_hole()
    found = cache.ask(after, [*DOCUMENT, 8], policy="exact")
    assert found.prefix == 0
    return found.reused


def frozen(before: Who, after: Who) -> int:
    """Tokens of a frozen document that the second request reuses elsewhere."""
    if before.image:
        return 0
    cache = Cache()
    cache.ask(before, DOCUMENT, freeze=True)
    cache.evict()
    return cache.ask(after, [7, *DOCUMENT, 8]).reused


def similar(before: Who, after: Who) -> int:
    """Equal tokens of the document, one of every four of which the second request has changed."""
    cache = Cache()
    cache.ask(before, DOCUMENT)
    found = cache.ask(after, [7, *CHANGED, 8])
    assert found.prefix == 0
    return found.reused


KINDS = {
    "exact prefix": exact_prefix,
    "segment": segment,
    "approximate prefix": approximate_prefix,
    "approximate prefix, several steps": over_several_steps,
    "behind a hole": behind_a_hole,
    "frozen": frozen,
    "similar": similar,
}
ALL = {
    "exact prefix": len(DOCUMENT),
    "segment": len(DOCUMENT),
    "approximate prefix": len(DOCUMENT) + len(NEW_TEXT),
    "approximate prefix, several steps": len(DOCUMENT) + len(NEW_TEXT),
    "behind a hole": len(DOCUMENT) - SIZE,
    "frozen": len(DOCUMENT),
    "similar": len(DOCUMENT) * (SIZE - 1) // SIZE,
}

by_kind = pytest.mark.parametrize("kind", KINDS)
by_dimension = pytest.mark.parametrize("dimension", DIMENSIONS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "similar"])
def test_09_without_similar_segments_it_is_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cache, "similarity", False)
    who, *others = DIMENSIONS["extra keys"]
    assert KINDS[kind](who, who) == ALL[kind]
    for other in others:
        shared = ("extra keys", kind) in SHARED
        assert KINDS[kind](who, other) == (ALL[kind] if shared else 0)


def test_similar_segments_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert similar(Who(), Who()) == ALL["similar"]
    monkeypatch.setattr(Cache, "similarity", False)
    assert similar(Who(), Who()) == 0


@by_kind
@by_dimension
def test_09_the_same_find_it(dimension: str, kind: str) -> None:
    for who in DIMENSIONS[dimension]:
        never = (dimension, kind) in NEVER and who.image
        assert KINDS[kind](who, who) == (0 if never else ALL[kind])


@by_kind
@by_dimension
def test_09_others_do_not(dimension: str, kind: str) -> None:
    for before, after in permutations(DIMENSIONS[dimension], 2):
        shared = (dimension, kind) in SHARED
        assert KINDS[kind](before, after) == (ALL[kind] if shared else 0), (before, after)


@by_kind
def test_26_after_a_change_of_the_model_nothing_is_found(kind: str) -> None:
    for who in {who for group in DIMENSIONS.values() for who in group}:
        assert KINDS[kind](who, replace(who, epoch=1)) == 0
