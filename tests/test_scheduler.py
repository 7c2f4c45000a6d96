# SPDX-License-Identifier: Apache-2.0
"""The scheduler half on vLLM's own requests and blocks, without a model or an engine."""

import json
import math
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.config import ObservabilityConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from bench.integrity import check_integrity
from segreuse_extras.audit.messages import AuditOrders, AuditResult, Recording
from segreuse_extras.compressed.orders import CopyOrder
from segreuse_extras.trained.layout import Layout
from segreuse_tools.estimate.other_options import finds_alike
from tests.parts import parts_of
from tests.reports import Whole
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.config import RequestOptions, SegReuseConfig
from vllm_segreuse.config.in_scheduler import scheduler_side
from vllm_segreuse.config.metrics import SegReuseStats
from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.plan import (
    ALL_LAYERS,
    NO_HALO,
    AcceptanceOutcome,
    FreezeOrder,
    ModelLayers,
    PlanOutcome,
    ReusePlan,
    Segments,
    Staged,
)
from vllm_segreuse.scheduling.arrival import NEVER_DONATES, namespace_of

SIZE = 4
OPTIONS = {"extra_keys": "tests", "segreuse_policy": "shift", "segreuse_min_reused_tokens": 4}
SEEN = {"segreuse_observe": True}
LORA = LoRARequest("adapter", 1, "/adapters/1")
_ids = count()


class World:
    """A scheduler half on a pool of its own."""

    def __init__(
        self,
        watermark_blocks: int = 0,
        max_model_len: int = 64,
        traces: str | None = None,
        region: Any = None,
        layout: Layout | None = None,
        stages: int = 1,
        **options: Any,
    ) -> None:
        init_none_hash(sha256)
        self.pool: Any = BlockPool(64, enable_caching=True, hash_block_size=SIZE)
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                get_total_num_hidden_layers=lambda: 4,
                max_model_len=max_model_len,
                hf_config=SimpleNamespace(segreuse=layout and {}),
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1, pipeline_parallel_size=stages, data_parallel_index=0
            ),
            observability_config=ObservabilityConfig(otlp_traces_endpoint=traces),
            cache_config=SimpleNamespace(block_size=SIZE),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=100),
            speculative_config=None,
            num_speculative_tokens=0,
            num_lookahead_tokens=0,
        )
        self.tables: dict[str, Any] = {}  # of requests that are admitted, for vLLM's manager
        tables = SimpleNamespace(req_to_blocks=self.tables)
        manager: Any = SimpleNamespace(
            block_pool=self.pool,
            watermark_blocks=watermark_blocks,
            coordinator=SimpleNamespace(single_type_managers=[tables]),
            get_block_ids=lambda request_id: (self.held[request_id],),
        )
        self.held: dict[str, list[int]] = {}  # blocks of requests that go on
        group = KvGroup(0, {"layer": None}, SIZE)
        given, self.stats = SegReuseConfig(**options), SegReuseStats()
        with patch("segreuse_extras.trained.scheduler.layout_of", return_value=layout):
            self.side = scheduler_side(config, given, manager, self.stats, group, region)
        self.index, self.frozen = (
            parts_of(self.side).index,
            parts_of(self.side).entries,
        )
        self.ends_with: RequestStatus | None = None
        self.answer: dict[str, Any] | None = None
        self.plans: list[ReusePlan] = []  # of the last step that was run
        self.taken = 0  # tokens of an earlier turn's blocks, by the last request that was run
        self.audit_orders: AuditOrders | None = None  # likewise

    def add(self, tokens: list[int], options: Any = OPTIONS, **fields: Any) -> Request:
        """A request arrives."""
        sampling = fields.pop("sampling", {})
        if fields.pop("embedded", False):
            fields["prompt_embeds"] = torch.zeros(len(tokens), 8)
        params = SamplingParams(max_tokens=4, extra_args=options, **sampling)
        request = Request(
            request_id=f"request {next(_ids)}",
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            block_hasher=get_request_block_hasher(SIZE, sha256),
            **fields,
        )
        self.side.add(request)
        return request

    def match(self, request: Request, num_hit_tokens: int) -> int | None:
        """What is supplied at once."""
        supplied, over_several_steps = self.side.match(request, num_hit_tokens)
        assert not over_several_steps
        return supplied

    def run(self, request: Request) -> int | None:
        """What vLLM does with a request: ask, allocate, name the full blocks, end the step."""
        taken = self.pool.left_behind(request.request_id, 0, request.num_tokens - 1)
        self.taken = len(taken) * SIZE
        supplied = self.match(request, self.taken)
        full = request.num_tokens // SIZE
        self.pool.touch(taken)
        blocks = [*taken, *self.pool.get_new_blocks(full + 1 - len(taken))]
        self.pool.cache_full_blocks(request, blocks, len(taken), full, SIZE, 0)
        self.side.allocated(request, [b.block_id for b in blocks])
        step = self.side.take_step(True)
        self.plans, self.audit_orders = step.plans, step.messages.get("audit")
        if self.ends_with is not None:
            request.status = self.ends_with
            self.answer = self.side.finished(request, [b.block_id for b in blocks])
        self.pool.free_blocks(reversed(blocks))
        return supplied

    def report(self, request: Request) -> dict[str, Any]:
        """The request ends."""
        report = self.side.finished(request, [])
        assert report is not None
        return Whole(report)


DOCUMENT = [*range(100, 132)]
PROMPT = [7, *DOCUMENT, 8]


def test_thousands_of_names_reuse_a_prompt_that_they_all_begin_with() -> None:
    """One name per session, as a gateway may set it; vLLM gives all of them the same blocks."""
    world, sessions = World(), 2_000
    first = world.add(DOCUMENT, {**OPTIONS, "extra_keys": "first"})
    blocks = world.pool.get_new_blocks(8)
    world.pool.cache_full_blocks(first, blocks, 0, 8, SIZE, 0)
    shared = [block.block_id for block in blocks]
    world.side.allocated(first, shared)
    world.side.take_step(True)

    def ask(tokens: list[int], key: str, hit: int = 0) -> dict[str, Any]:
        request = world.add(tokens, {**OPTIONS, "extra_keys": key, "segreuse_explain": not hit})
        world.match(request, hit * SIZE)
        world.side.allocated(request, shared[:hit])
        world.side.take_step(True)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        report = world.side.finished(request, [])
        assert report is not None
        return Whole(report)

    for session in range(sessions):
        ask([*DOCUMENT, 5], f"session {session}", 8)
    for session in (0, 77, sessions - 1):
        assert ask(PROMPT, f"session {session}")["reused_tokens"] == len(DOCUMENT)
    stranger = ask(PROMPT, "stranger")
    assert stranger["reused_tokens"] == 0
    assert {s.get("reason") for s in stranger["explain"]} == {"unknown", "last_token"}
    assert world.index.known.num_cells == 8
    assert world.index.known.num_bytes < 60 * sessions
    world.pool.free_blocks(reversed(blocks))
    world.pool.evict_blocks({*shared})
    evicted = ask(PROMPT, "session 77")
    assert {s.get("reason") for s in evicted["explain"]} == {"evicted", "last_token"}
    check_integrity(world.index)


@pytest.mark.parametrize(
    ("most", "admitted"), [(512, [33, 33, 33]), (3, [33, 0, 0]), (4, [33, 33, 0])]
)
def test_a_step_computes_no_more_than_it_may(most: int, admitted: list[int]) -> None:
    world = World(max_step_tokens=most)
    world.run(world.add(DOCUMENT))
    # Each computes its first two tokens; vLLM itself computes the last.
    waiting = [world.add([first, 6, *DOCUMENT[1:], 8]) for first in (1, 2, 3)]
    assert [world.match(request, 0) for request in waiting] == admitted
    assert (0 in admitted) == parts_of(world.side).planner.admission_closed


def test_a_step_of_ours_computes_no_more_than_one_of_vllms() -> None:
    world = World(max_step_tokens=512)  # vLLM: 100
    world.run(world.add(DOCUMENT))
    prompts = ([*range(1000 * i, 1000 * i + 51), *DOCUMENT, 8] for i in (1, 2))
    assert [world.match(world.add(prompt), 0) for prompt in prompts] == [83, 0]


def next_reference(world: World) -> Request | None:
    """What an idle engine is to compute."""
    return next(iter(world.side.take_requests(0, 0, False)), None)


def audit_orders(world: World) -> AuditOrders | None:
    """What the workers are told since this was last asked, or the last request has run."""
    before, world.audit_orders = world.audit_orders or AuditOrders(), None
    now = world.side.take_step(True).messages.get("audit") or AuditOrders()
    found = AuditOrders(
        before.record | now.record, before.compare | now.compare, before.forget + now.forget
    )
    return found or None


def image(identifier: str) -> dict[str, Any]:
    place = PlaceholderRange(offset=2, length=4)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", identifier, place)]}


def cached_document(**fields: Any) -> World:
    world = World()
    request = world.add(DOCUMENT, **fields)
    world.run(request)
    world.side.finished(request, [])
    return world


def test_the_document_is_reused_behind_new_text() -> None:
    world = cached_document()
    request = world.add(PROMPT)
    assert world.run(request) == len(PROMPT) - 1
    report = world.report(request)
    assert (report["reused_tokens"], report["bypass_reason"]) == (32, None)
    assert report["computed_share"] == pytest.approx(2 / 34, abs=1e-4)


BYPASSED: dict[str, dict[str, Any]] = {
    "multimodal": image("a picture"),
    "prompt_logprobs": {"sampling": {"prompt_logprobs": 1}},
    "prefix_cache_skipped": {"sampling": {"skip_reading_prefix_cache": True}},
    "prompt_embeds": {"embedded": True},
    "streaming_input": {"resumable": True},
}


@pytest.mark.parametrize("reason", BYPASSED)
def test_15_35_requests_of_other_kinds_run_without_reuse(reason: str) -> None:
    world = cached_document()
    request = world.add(PROMPT, **BYPASSED[reason])
    assert world.run(request) == 0
    report = world.report(request)
    assert report["bypass_reason"] == reason
    assert (report["reused_tokens"], report["new_tokens"]) == (0, len(PROMPT))


@pytest.mark.parametrize(
    ("reason", "donates"),
    [
        ("multimodal", False),
        ("prompt_embeds", False),
        ("streaming_input", False),
        ("prompt_logprobs", True),
        ("prefix_cache_skipped", True),
    ],
)
def test_35_nothing_is_donated_from_placeholder_tokens(reason: str, donates: bool) -> None:
    world = World()
    world.run(world.add(DOCUMENT, **BYPASSED[reason]))
    assert len(world.index) == (len(DOCUMENT) // SIZE if donates else 0)


@pytest.mark.parametrize("also", ["prompt_logprobs", "prefix_cache_skipped"])
@pytest.mark.parametrize("reason", NEVER_DONATES)
def test_35_nothing_is_donated_from_them_for_another_reason_either(reason: str, also: str) -> None:
    world = World()
    request = world.add(DOCUMENT, **BYPASSED[reason], **BYPASSED[also])
    world.run(request)
    assert len(world.index) == 0
    assert world.report(request)["bypass_reason"] == reason


@pytest.mark.parametrize(("adapter", "lora_id"), [(None, 0), (LORA, LORA.lora_int_id)])
def test_34_a_plan_says_with_which_adapter_it_is_computed(
    adapter: LoRARequest | None, lora_id: int
) -> None:
    world = cached_document(lora_request=adapter)
    request = world.add(PROMPT, lora_request=adapter)
    assert world.run(request) == len(PROMPT) - 1
    assert [plan.lora_id for plan in world.plans] == [lora_id]


def test_15_pooling_requests_are_none_of_ours() -> None:
    world = cached_document()
    request = Request("pooling", PROMPT, None, PoolingParams())
    world.side.add(request)
    assert world.match(request, 0) == 0
    assert world.side.finished(request, []) is None


OTHERS: list[dict[str, Any]] = [
    {"cache_salt": "salt"},
    {"lora_request": LORA},
    {"options": OPTIONS | {"extra_keys": "other"}},
    {"options": OPTIONS | {"extra_keys": ["tests", "tests"]}},
]


@pytest.mark.parametrize("fields", OTHERS)
def test_09_what_separates_namespaces(fields: dict[str, Any]) -> None:
    world = cached_document()
    request = world.add(PROMPT, **fields)
    world.run(request)
    assert world.report(request)["reused_tokens"] == 0
    again = cached_document(**fields)
    same = again.add(PROMPT, **fields)
    again.run(same)
    assert again.report(same)["reused_tokens"] == len(DOCUMENT)


def test_09_an_adapter_that_was_replaced_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    world = cached_document(lora_request=LORA)
    for path, reused in (("/adapters/1", 32), ("/adapters/2", 0)):
        adapter = LoRARequest("adapter", 1, path)
        request = world.add(PROMPT, lora_request=adapter)
        world.run(request)
        assert world.report(request)["reused_tokens"] == reused


def test_10_a_namespace_ends_with_its_last_request_and_block() -> None:
    world = cached_document()
    world.side.finished(world.add(PROMPT, OPTIONS | {"extra_keys": "nobody else's"}), [])
    assert len(parts_of(world.side).namespaces) == 1
    fill_pool(world)
    world.side.finished(world.add(PROMPT), [])
    assert len(parts_of(world.side).namespaces) == 0


def test_an_engine_may_start_switched_off() -> None:
    world = World(enabled=False)
    world.run(world.add(DOCUMENT))
    assert world.side.status() == {"enabled": False, "indexed_blocks": 8}
    assert world.match(world.add(PROMPT), 0) == 0
    assert world.side.set_enabled(True)
    assert world.match(world.add(PROMPT), 0) == 33


def test_an_engine_that_observes_says_what_it_would_reuse() -> None:
    world = World(enabled="observe")
    world.run(world.add(DOCUMENT))
    assert world.side.status() == {"enabled": "observe", "indexed_blocks": 8}
    observed = world.add(PROMPT)
    assert world.run(observed) == 0
    # Computed in full: its blocks have their exact names, and donate as such.
    assert world.pool.get_cached_block(observed.block_hashes[1], [0]) is not None
    report = world.report(observed)
    assert report["bypass_reason"] == "observed"
    assert (report["reused_tokens"], report["computed_share"]) == (0, 1.0)

    assert world.side.set_enabled(True) is True
    twin = world.add(PROMPT, OPTIONS | {"segreuse_policy": "epic"})
    assert world.match(twin, 0) == 33
    assert world.side.set_enabled("observe") == "observe"
    assert world.match(twin, 0) == 0
    assert not world.side.set_enabled(False)
    assert world.match(twin, 0) == 0
    off = world.add(PROMPT, OPTIONS | SEEN)
    world.run(off)
    assert world.report(off)["bypass_reason"] == "disabled"


def test_what_is_observed_is_what_would_have_been_done() -> None:
    for policy in ("shift", "epic", "sparsex"):
        options = OPTIONS | {"segreuse_policy": policy}
        reusing, observing = cached_document(), cached_document()
        done, seen = reusing.add(PROMPT, options), observing.add(PROMPT, SEEN | options)
        assert reusing.run(done) == 33
        assert observing.run(seen) == 0
        report, observed = reusing.report(done), observing.report(seen)["observed"]
        assert observed == {name: report[name] for name in observed}
        assert set(observed) == {
            *("reused_tokens", "recomputed_tokens", "similar_tokens"),
            *("computed_share", "matches"),
        }
        counted = observing.stats.data
        assert counted["observed_tokens_total"]["reused"] == report["reused_tokens"]
        assert counted["observed_tokens_total"]["recomputed"] == report["recomputed_tokens"]
        assert counted["tokens_total"]["reused"] == 0
        assert counted["requests_total"]["bypassed"]["observed"] == 1


def explained(world: World, tokens: list[int], options: Any = OPTIONS) -> list[tuple[int, str]]:
    """Tokens of each stretch, and its source or the reason."""
    request = world.add(tokens, options | {"segreuse_explain": True})
    world.run(request)
    return [(s["tokens"], s.get("reason", s["source"])) for s in world.report(request)["explain"]]


def test_a_report_explains_the_prompt_where_it_is_asked_for() -> None:
    world = cached_document()
    found = [(1, "shorter_than_block"), (32, "segment"), (1, "last_token")]
    assert explained(world, PROMPT) == found
    more = OPTIONS | {"segreuse_min_reused_tokens": 33}
    assert explained(cached_document(), PROMPT, more) == found, "found, and too few to be reused"
    assert explained(world, PROMPT, OPTIONS | SEEN) == found
    world.side.set_enabled(False)
    assert explained(world, PROMPT) == [(34, "disabled")]
    plain = world.add(PROMPT)
    world.run(plain)
    assert "explain" not in world.report(plain)


def recomputed(world: World, request: Request) -> list[Any]:
    """Of each segment of an explained prompt."""
    stretches = world.report(request)["explain"]
    return [each["recomputed"] for each in stretches if each["source"] == "segment"]


@pytest.mark.parametrize("seen", [{}, SEEN])
def test_what_is_known_to_be_recomputed_is_explained(seen: dict[str, Any]) -> None:
    options = OPTIONS | {"segreuse_policy": "epic", "segreuse_explain": True} | seen
    world = cached_document()
    request = world.add(PROMPT, options | {"segreuse_recompute_ratio": 0.1})
    world.run(request)
    [runs] = recomputed(world, request)
    assert runs == [[1, 3]], "the segment's first tokens"


def test_what_the_workers_chose_is_explained_once_they_have_reported() -> None:
    options = OPTIONS | {"segreuse_policy": "focus", "segreuse_explain": True}
    world = cached_document()
    for seen, positions, expected in [
        ({}, (0, 5, 6, 9), [[5, 2], [9, 1]]),
        ({}, None, None),
        (SEEN, None, None),
    ]:
        request = world.add(PROMPT, options | {"segreuse_recompute_ratio": 0.3} | seen)
        world.run(request)
        if positions is not None:
            [plan] = world.plans
            assert plan.explains
            outcome = PlanOutcome(4, positions=positions)
            world.side.reported({}, {request.request_id: outcome}, {request.request_id: request})
        assert recomputed(world, request) == [expected]


def test_what_is_found_and_not_reused_is_not_said_to_be_recomputed() -> None:
    world = cached_document()
    options = OPTIONS | {"segreuse_explain": True, "segreuse_min_reused_tokens": 33}
    request = world.add(PROMPT, options)
    world.run(request)
    assert recomputed(world, request) == [None]


OTHER_LORA = LoRARequest("other", 2, "/adapters/2")


@pytest.mark.parametrize("cached", [None, OTHER_LORA])
@pytest.mark.parametrize("keys", ["tests", "others"])
def test_text_of_another_adapter_is_explained_in_its_own_namespace_only(
    cached: LoRARequest | None, keys: str
) -> None:
    world = cached_document(lora_request=cached)
    options = OPTIONS | {"segreuse_explain": True, "extra_keys": keys}
    request = world.add(PROMPT, options, lora_request=LORA)
    world.run(request)
    reason = "other_adapter" if keys == "tests" else "unknown"
    assert [each["reason"] for each in world.report(request)["explain"]] == [reason, "last_token"]


def test_a_salt_separates_adapters_too() -> None:
    world = cached_document(lora_request=OTHER_LORA)
    options = OPTIONS | {"segreuse_explain": True}
    request = world.add(PROMPT, options, lora_request=LORA, cache_salt="mine")
    world.run(request)
    assert world.report(request)["explain"][0]["reason"] == "unknown"


def test_only_the_latest_adapters_are_looked_at() -> None:
    world = World()
    for i in range(65):
        world.add([1], lora_request=LoRARequest(f"adapter {i}", i + 1, "/adapters"))
    request = world.add([1], lora_request=LoRARequest("adapter 1", 2, "/adapters"))
    others = parts_of(world.side).feature["explain"].adapters.others(request, ("tests",))
    assert len(others) == len(set(others)) == 63
    assert namespace_of(request, ("tests",)) not in others


def test_text_that_was_evicted_is_explained_as_such() -> None:
    world = cached_document()
    fill_pool(world)
    assert explained(world, PROMPT) == [(33, "evicted"), (1, "last_token")]
    assert explained(world, PROMPT, {**OPTIONS, "extra_keys": "others"})[0] == (33, "unknown")


def test_what_was_computed_behind_too_much_reused_text_is_explained_as_such() -> None:
    world = World(max_provenance_depth=0)
    world.run(world.add(DOCUMENT))
    behind = [*range(300, 312)]
    reusing = world.add([7, *DOCUMENT, 8, 9, 10, *behind, 8])
    assert world.run(reusing) == 33
    assert explained(world, [7, *behind, 8]) == [(13, "too_deep"), (1, "last_token")]
    copied = DOCUMENT[SIZE - 1 : 2 * SIZE - 1]  # a block of the reusing request, not of the donor
    assert explained(world, [7, *copied, 8, 8, 8]) == [(7, "unknown"), (1, "last_token")]


def test_where_nothing_would_be_reused_nothing_is_observed() -> None:
    world = World()
    stranger = world.add(PROMPT, SEEN | OPTIONS)
    world.run(stranger)
    report = world.report(stranger)
    assert (report["bypass_reason"], report["observed"]) == ("too_few_reused_tokens", None)


def test_blocks_behind_the_plan_have_no_exact_name() -> None:
    world = cached_document()
    request = world.add([*range(200, 200 + SIZE), *DOCUMENT, 8])
    world.run(request)
    assert world.pool.get_cached_block(request.block_hashes[0], [0]) is None
    plain = world.add([*range(300, 300 + SIZE), 8], options=None)
    world.run(plain)
    assert world.pool.get_cached_block(plain.block_hashes[0], [0]) is not None


def test_a_block_freed_in_the_step_that_named_it_does_not_donate() -> None:
    """Its request was preempted or aborted before it was computed."""
    world = World()
    request = world.add(DOCUMENT)
    world.match(request, 0)
    blocks = world.pool.get_new_blocks(8)
    world.pool.cache_full_blocks(request, blocks, 0, 8, SIZE, 0)
    assert len(world.index) == 8
    assert world.pool.get_cached_block(request.block_hashes[0], [0]) is not None
    world.pool.free_blocks(reversed(blocks))
    assert len(world.index) == 0
    assert all(world.pool.get_cached_block(name, [0]) is None for name in request.block_hashes)


def test_a_block_named_by_the_output_of_a_step_keeps_its_name() -> None:
    """With asynchronous scheduling: the step that computes it has left by then."""
    world = World()
    request = world.add(DOCUMENT)
    world.match(request, 0)
    blocks = world.pool.get_new_blocks(8)
    world.side.take_step(True)
    request.num_computed_tokens = len(DOCUMENT)
    world.pool.cache_full_blocks(request, blocks, 0, 8, SIZE, 0)
    world.pool.free_blocks(reversed(blocks))
    assert len(world.index) == 8
    assert world.pool.get_cached_block(request.block_hashes[7], [0]) == [blocks[7]]


def test_evicted_blocks_leave_the_index() -> None:
    world = cached_document()
    assert len(world.index) == 8
    world.pool.get_new_blocks(world.pool.get_num_free_blocks())
    assert len(world.index) == 0
    check_integrity(world.index)


def test_pinned_donors_are_not_handed_out() -> None:
    world = cached_document()
    donors = {b.block_id for b in world.pool.blocks if b.block_id in world.index}
    request = world.add(PROMPT)
    assert world.match(request, 0)
    room = world.pool.get_num_free_blocks()
    assert donors.isdisjoint(b.block_id for b in world.pool.get_new_blocks(room))
    world.side.take_step(True)
    assert world.pool.get_num_free_blocks() == len(donors)


def test_20_a_request_may_end_at_any_point() -> None:
    world = cached_document()
    free = world.pool.get_num_free_blocks()
    for steps in range(3):
        request = world.add(PROMPT)
        if steps > 0:
            world.match(request, 0)
        if steps > 1:
            world.side.take_step(True)
        assert world.side.finished(request, []) is None
        assert world.side.finished(request, []) is None
        assert world.pool.get_num_free_blocks() == free
        world.side.take_step(True)
    assert not parts_of(world.side).core.requests


@pytest.mark.parametrize(
    ("others", "most", "spread"),
    [([], 1, False), ([1], 1, True), ([1], None, False), ([1], 1000, False), ([1], 0, False)],
)
def test_what_would_hold_others_up_is_spread_over_steps(
    others: list[int], most: int | None, spread: bool
) -> None:
    world = World(spread_tokens=most)
    world.run(world.add(DOCUMENT))
    world.tables["ended"] = []
    world.tables["runs"] = others
    prompt = [7, 6, *DOCUMENT, 8]
    assert world.side.match(world.add(prompt), 0) == (len(prompt) - 1, spread)
    world.side.take_step(True)
    # A choice by attention reads the last token, too; vLLM computes it.
    chooses = OPTIONS | {"segreuse_policy": "sparsex", "segreuse_overflow_tokens": 0}
    request = world.add(prompt, chooses | {"segreuse_recompute_ratio": 0.5})
    assert world.side.match(request, 0) == (len(prompt) - 1, spread)


def test_a_pass_larger_than_a_chunk_is_spread_however_little_work_it_is() -> None:
    """Its states would not fit beside those of another that is under way."""
    world = World(spread_tokens=1000)
    world.run(world.add(DOCUMENT))
    world.tables["runs"] = [1]
    for new, spread in ((100, False), (101, True)):  # a chunk has 100
        request = world.add([*range(1000, 1000 + new), *DOCUMENT, 8])
        assert world.side.match(request, 0) == (new + 32, spread)
        world.side.take_step(True)


def test_between_pipeline_stages_every_plan_takes_several_steps() -> None:
    """The last stage knows how it has ended when the first has left the step."""
    world = World(stages=2, spread_tokens=0)
    world.run(world.add(DOCUMENT))
    assert world.side.match(world.add([7, 6, *DOCUMENT, 8]), 0) == (len(DOCUMENT) + 2, True)


@pytest.mark.parametrize(
    ("policy", "dense", "stages", "reused"),
    [
        ("focus", 0, 2, True),
        ("prophet", 0, 4, True),
        ("peaks", 0, 2, True),
        ("sparsex", 2, 2, True),
        ("sparsex", 3, 2, False),
        ("cacheblend", 1, 2, True),
        ("cacheblend", 2, 2, False),
        ("epic", 0, 4, True),
    ],
)
def test_tokens_are_chosen_by_layers_of_the_first_stage_or_between_two_goes(
    policy: str, dense: int, stages: int, reused: bool
) -> None:
    """The model has 4 layers."""
    world = World(stages=stages)
    world.run(world.add(DOCUMENT))
    options = {"segreuse_policy": policy, "segreuse_dense_layers": dense}
    given = options | {"segreuse_recompute_ratio": 0.3, "segreuse_overflow_tokens": 0}
    request = world.add([7, 6, *DOCUMENT, 8], OPTIONS | given)
    world.side.match(request, 0)
    blocks = world.pool.get_new_blocks(9)
    world.side.allocated(request, [b.block_id for b in blocks])
    world.pool.free_blocks(blocks)
    reason = world.report(request)["bypass_reason"]
    assert reason == (None if reused else "chooses_behind_first_stage")


def test_a_plan_with_an_adapter_is_carried_out_in_the_step_that_has_it_loaded() -> None:
    world = World(spread_tokens=1)
    world.run(world.add(DOCUMENT, lora_request=LORA))
    world.tables["runs"] = [1]
    request = world.add([7, 6, *DOCUMENT, 8], lora_request=LORA)
    assert world.side.match(request, 0) == (len(DOCUMENT) + 2, False)


def test_a_spread_plan_leaves_the_step_to_others_and_no_pin_behind() -> None:
    world = World(spread_tokens=1, max_step_tokens=3)
    world.run(world.add(DOCUMENT))
    world.tables["runs"] = [1]
    for _ in range(3):
        request = world.add([next(_ids) + 1000, *PROMPT])
        supplied, spread = world.side.match(request, 0)
        assert (supplied, spread) == (len(PROMPT), True)
        blocks = world.pool.get_new_blocks(9)
        world.side.allocated(request, [b.block_id for b in blocks])
        world.pool.free_blocks(blocks)
    plans = world.side.take_step(True).plans
    assert [plan.spread for plan in plans] == [True] * 3
    assert world.pool.get_num_free_blocks() == world.pool.num_gpu_blocks - 1
    # Set aside until the plan is done, it is told of again when it runs.
    request.num_computed_tokens = len(PROMPT)
    world.side.allocated(request, [b.block_id for b in blocks])
    assert world.side.take_step(True).plans == []
    assert world.report(request)["reused_tokens"] == len(DOCUMENT)


@pytest.mark.parametrize("hook", ["to_add", "to_fail", "to_abort"])
def test_an_error_over_requests_of_our_own_ends_reuse_and_not_the_engine(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(heal_tokens=8)
    features = parts_of(world.side).feature

    def fails(*_: Any) -> Any:
        raise ArithmeticError

    monkeypatch.setattr(features["audit"], hook, fails)
    monkeypatch.setattr(features["healing"], hook, lambda *_: ["another's"])
    ask = {
        "to_add": lambda: world.side.take_requests(0, 0, False),
        "to_fail": world.side.take_failed,
        "to_abort": world.side.resetting,
    }
    assert ask[hook]() == ["another's"]
    assert parts_of(world.side).health.broken


def test_an_error_over_who_had_a_spread_plan_sets_nobody_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM asserts that whom it sets aside is supplied with something: the engine would end."""
    world = World(spread_tokens=1)
    world.run(world.add(DOCUMENT))
    world.tables["runs"] = [1]
    request = world.add([6, *PROMPT])
    assert world.side.match(request, 0) == (len(PROMPT), True)
    blocks = world.pool.get_new_blocks(9)
    world.side.allocated(request, [b.block_id for b in blocks])
    world.side.take_step(True)
    world.pool.free_blocks(blocks)
    request.num_preemptions = 1
    request.append_output_token_ids([3])

    def fails(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Prompt, "with_tokens", fails)
    assert world.side.match(request, 0) == (0, False)


def test_26_workers_are_told_once_of_what_was_called_back() -> None:
    """Or they would go on writing into blocks that are somebody else's by then."""
    world = cached_document()
    request = world.add(PROMPT)
    world.run(request)
    world.side.call_back(request)
    assert world.side.take_step(True).called_back == [request.request_id]
    assert world.side.take_step(True).called_back == []
    assert world.match(request, 0) == 0, "it starts anew, without reuse"
    assert world.side.saved_tokens(request) == 0


def focused(world: World) -> Request:
    """A request that was admitted with a plan of which only the workers know how it ends."""
    options = OPTIONS | {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.3}
    request = world.add(PROMPT, options)
    world.run(request)
    return request


@pytest.mark.parametrize(
    ("policy", "new", "given", "reason"),
    [
        ("focus", 2, None, "nothing_saved"),  # all of the document would be computed again
        ("peaks", 60, None, "nothing_saved"),  # the question runs twice
        ("peaks", 2, None, None),
        ("focus", 60, 0.1, None),
        ("focus", 2, 1.0, None),
        ("shift", 60, None, None),
    ],
)
def test_what_takes_as_much_work_as_computing_everything_is_not_reused(
    policy: str, new: int, given: float | None, reason: str | None
) -> None:
    wanted = OPTIONS | {"segreuse_policy": policy, "segreuse_recompute_ratio": given}
    for seen in (False, True):
        world = World(max_model_len=256)
        world.run(world.add(DOCUMENT))
        prompt = [*range(new), *DOCUMENT, *range(new)]
        request = world.add(prompt, wanted | {"segreuse_observe": seen})
        supplied = world.run(request)
        assert bool(supplied) is (reason is None and not seen)
        expected = reason or ("observed" if seen else None)
        assert world.report(request)["bypass_reason"] == expected


class Seen:
    """What is known of later turns."""

    def __init__(self, later: float) -> None:
        self.later = later
        self.prompts: list[tuple[int, int, int]] = []
        self.sessions: list[bytes | None] = []

    def began(self, names: Any, hit: int, exact: int, session: bytes | None) -> None:
        assert len(set(names)) == len(names)
        self.prompts.append((len(names), hit, exact))
        self.sessions.append(session)


@pytest.mark.parametrize(
    ("policy", "more", "later", "weighs", "reused"),
    [
        # `epic` computes a tenth of what is reused, and at each later turn of the whole prompt.
        ("epic", {}, 0.0, True, True),
        ("epic", {}, 4.0, True, True),
        ("epic", {}, 12.0, True, False),
        ("epic", {}, 12.0, False, True),
        ("epic", {"segreuse_recompute_ratio": 0.1}, 12.0, True, True),
        ("epic", {"segreuse_recompute_once": True}, 12.0, True, True),  # not at later turns
        ("shift", {}, 100.0, True, True),  # which computes nothing of it again
    ],
)
def test_later_turns_that_would_find_the_prompt_are_weighed(
    policy: str, more: dict[str, Any], later: float, weighs: bool, reused: bool
) -> None:
    world = cached_document()
    parts_of(world.side).feature["conversations"].turns = Seen(later)
    options = {"segreuse_policy": policy, "segreuse_weigh_turns": weighs}
    request = world.add(PROMPT, OPTIONS | options | more)
    assert bool(world.run(request)) is reused
    assert world.report(request)["bypass_reason"] == (None if reused else "nothing_saved")


def test_prompts_are_counted_of_those_who_weigh_turns() -> None:
    world = cached_document()
    seen = parts_of(world.side).feature["conversations"].turns = Seen(0.0)
    world.run(world.add(PROMPT))
    assert seen.prompts == []
    weighing = OPTIONS | {"segreuse_weigh_turns": True}
    request = world.add(PROMPT, weighing)
    assert world.match(request, 4)
    blocks = [b.block_id for b in world.pool.get_new_blocks(9)]
    world.side.allocated(request, blocks)
    world.side.allocated(request, blocks)  # its plan is done, or it was preempted
    for token, session_id in ((1, "a"), (2, "b"), (3, "a")):
        world.run(world.add([token] * 9, weighing, session_id=session_id))
    *first, one, other, again = seen.sessions
    assert set(first) == {None}
    assert one == again != other
    assert seen.prompts[0] == (8, 1, 1), "what is behind moved text has no exact name"
    assert seen.prompts[-1] == (2, 0, 2)


@pytest.mark.parametrize("session_id", [None, "one"])
def test_equal_prompts_at_once_are_no_later_turns_of_each_other(session_id: str | None) -> None:
    """Of one that is reused the others take its KV: they lose nothing."""
    world = cached_document()
    seen = parts_of(world.side).feature["conversations"].turns = Seen(0.0)
    weighing = OPTIONS | {"segreuse_weigh_turns": True}
    requests = [world.add(PROMPT, weighing, session_id=session_id) for _ in range(3)]
    for request in requests:
        world.run(request)
    assert len(seen.prompts) == 1
    world.run(world.add([*PROMPT, 1], weighing, session_id=session_id))
    world.run(world.add(PROMPT, weighing, session_id="other"))
    assert len(seen.prompts) == 3, "other prompts, and those of other sessions, count"
    for request in requests:
        world.report(request)
    world.run(world.add(PROMPT, weighing, session_id=session_id))
    assert len(seen.prompts) == 4, "one that comes again when they have ended is a later turn"


def test_a_named_document_is_reused_however_much_work_that_is() -> None:
    """The tokens that were kept of it, computed as a text, would have the KV of that text."""
    world = World(max_model_len=256)
    wanted = OPTIONS | {"segreuse_policy": "peaks", "segreuse_recompute_ratio": None}
    reused = np.isin(np.arange(152), np.arange(60, 92))
    segments = Segments.elsewhere(np.array([60]), np.array([0]))
    for options, is_taken in ((wanted, False), (wanted | {"segreuse_documents": ["a"]}, True)):
        tracked = parts_of(world.side).planner.get(world.add(PROMPT, options).request_id)
        assert tracked is not None
        assert (tracked.method.make_recipe(reused, segments) is not None) is is_taken
        assert (tracked.method.work is None) is is_taken, "and nothing of it is left out"


def test_blocks_of_what_was_not_worth_it_are_exact() -> None:
    """The next step of the same conversation finds them as its prefix."""
    prompt = [*range(20), *DOCUMENT, *range(200, 220)]
    found = []
    for policy in ("focus", "shift"):
        world = World(max_model_len=256)
        world.run(world.add(DOCUMENT))
        world.run(world.add(prompt, OPTIONS | {"segreuse_policy": policy}))
        later = world.add([*prompt, 1, 2, 3, 4, 5], OPTIONS | {"segreuse_policy": "exact"})
        found.append(world.match(later, 0))
    assert found == [len(prompt), 0], "all of it; and nothing, since the pass computes what is new"


def test_what_workers_tell_is_in_the_report_once() -> None:
    world = cached_document()
    request = focused(world)
    # The first token is new, and three of the document were chosen.
    world.side.reported({}, {request.request_id: PlanOutcome(4)}, {request.request_id: request})
    first = world.report(request)
    assert first["recomputed_tokens"] == 3
    told_twice = focused(world)
    for number in (4, 20):  # of the first admission's plan, and of that after a preemption
        outcomes = {told_twice.request_id: PlanOutcome(number)}
        world.side.reported({}, outcomes, {told_twice.request_id: told_twice})
    assert world.report(told_twice) == first
    # The first token and three more at four layers; the question, which is the first and the last,
    # at three before that; and the last at all layers, by vLLM itself.
    computed = 4 * (1 + 3) + 3 * 2 + 4
    assert first["computed_share"] == pytest.approx(computed / (4 * 34), abs=1e-4)


def test_a_plan_that_reports_nothing_is_reported_where_it_was_computed_in_full() -> None:
    world = cached_document()
    request = world.add(PROMPT, OPTIONS | {"segreuse_policy": "epic"})
    world.run(request)
    tracked = parts_of(world.side).planner.get(request.request_id)
    assert tracked is not None
    plan = tracked.plan
    assert plan is not None
    assert not plan.reports
    before = tracked.report
    assert before is not None
    assert 0 < before.recomputed_tokens < before.reused_tokens
    outcomes = {request.request_id: PlanOutcome(plan.num_tokens)}
    tracked.plan = None
    world.side.reported({}, outcomes, {request.request_id: request})
    assert tracked.report == before, "it is of another plan, after a preemption"
    tracked.plan = plan
    world.side.reported({}, outcomes, {request.request_id: request})
    after = world.report(request)
    assert after["recomputed_tokens"] == before.reused_tokens
    assert after["computed_share"] == 1
    assert world.stats.data["tokens_total"]["recomputed"] == after["recomputed_tokens"]


def test_work_is_counted_by_the_layers_that_the_workers_found() -> None:
    """The probes go no further than the last layer that gives scores."""
    world = cached_document()
    world.side.learn(ModelLayers(4, scored=(1,)), {})
    request = focused(world)
    outcomes = {request.request_id: PlanOutcome(4)}
    world.side.reported({}, outcomes, {request.request_id: request})
    computed = 4 * (1 + 3) + 2 * 2 + 4
    share = world.report(request)["computed_share"]
    assert share == pytest.approx(computed / (4 * 34), abs=1e-4)


def test_drift_is_reported_and_that_everything_was_computed_because_of_it() -> None:
    world = cached_document()
    near, far = focused(world), focused(world)
    outcomes = {
        near.request_id: PlanOutcome(4, drift=2.50004),
        far.request_id: PlanOutcome(4, drift=7.0, in_full=True),
    }
    world.side.reported({}, outcomes, {request.request_id: request for request in (near, far)})
    assert world.stats.data["drift"] == [2.50004, 7.0]
    assert world.stats.data["in_full_total"] == 1
    assert far.prefill_stats is not None
    assert far.prefill_stats.num_external_cached_tokens == 0, "nothing was saved"
    wanted = ("recomputed_tokens", "drift", "in_full")
    reports = world.report(near), world.report(far)
    assert [[report[name] for name in wanted] for report in reports] == [
        [3, 2.5, False],
        [len(DOCUMENT), 7.0, True],
    ]
    # What is computed in full comes on top; the last token is vLLM's.
    shares = [report["computed_share"] for report in reports]
    assert shares[1] - shares[0] == pytest.approx(33 / 34, abs=2e-4)


def test_a_plan_carries_its_requests_bound_on_drift() -> None:
    world = cached_document()
    options = OPTIONS | {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.1}
    for bound, carried in ((None, math.inf), (2.5, 2.5), (0, 0)):
        request = world.add(PROMPT, options | {"segreuse_max_drift": bound})
        assert world.match(request, 0)
        plan = parts_of(world.side).planner.get(request.request_id).plan
        assert plan.max_drift == carried


SIMILARITY: dict[str, Any] = {
    "window_tokens": 8,
    "stride_tokens": 2,
    "shingle_tokens": 2,
    "context_tokens": 8,
    "permutations": 32,
    "threshold": 0.1,
    "min_run_tokens": 2,
    "max_windows": 64,
}
CHANGED = [token if 0 < i % 8 < 7 else 90 + i for i, token in enumerate(DOCUMENT)]
"""Four runs of six tokens of the document, none of which is a whole block."""


def similar(policy: str, supplied: int | None = None, **options: Any) -> tuple[World, Request]:
    """A request whose text is similar to that of a cached document, and was matched and run."""
    if supplied is None:  # the last two tokens are new: a pass that need not compute them does not
        leaves = policy in ("shift", "focus") and "max_boundary_drift" not in options
        supplied = 32 if leaves else 33
    world = World(similarity=SIMILARITY | options, min_reused_tokens=4)
    world.run(world.add(DOCUMENT))
    wanted = {"segreuse_policy": policy, "segreuse_explain": True, "segreuse_min_reused_tokens": 4}
    wanted["segreuse_recompute_ratio"] = 1.0 if policy == "focus" else 0.1  # as they choose here
    request = world.add([7, *CHANGED, 8], OPTIONS | wanted)
    assert world.run(request) == supplied
    return world, request


@pytest.mark.parametrize("policy", ["shift", "focus", "cacheblend", "sparsex"])
def test_halos_of_similar_segments_are_computed_whatever_the_policy(policy: str) -> None:
    plain, _ = similar(policy)
    world, _ = similar(policy, halo_tokens=3)
    [before], [plan] = plain.plans, world.plans
    segments = plan.pieces.segments(0).first.tolist()
    assert segments == [2, 10, 18, 26]
    halos = {first + i for first in segments for i in range(3)}
    always = set(np.flatnonzero(plan.recipe.always).tolist())
    assert always == set(np.flatnonzero(before.recipe.always).tolist()) | halos
    assert plan.check is None, "there is no bound"
    assert plan.reports == before.reports


@pytest.mark.parametrize("policy", ["shift", "epic"])
def test_tokens_of_similar_segments_enter_where_their_context_allows(policy: str) -> None:
    options = {"w_exact": {1: 1, 2: 3, "all": 5}}
    world, request = similar(policy, supplied=33, **options)
    [plan] = world.plans
    layers = plan.pieces.layers.tolist()
    assert layers == [1, 2, ALL_LAYERS] * 4
    assert plan.pieces.length.tolist() == [2, 2, 1] * 4
    entering = plan.num_entering
    assert plan.recipe.program == Staged((1, 2))
    assert entering == 16 - int((plan.recipe.always & plan.reused).sum())
    report = world.report(request)
    assert (report["similar_tokens"], report["entering_tokens"]) == (20, entering)
    assert world.stats.data["tokens_total"]["entering"] == entering
    assert len([it for it in report["explain"] if it["source"] == "similar"]) == 4


@pytest.mark.parametrize("policy", ["focus", "cacheblend", "sparsex"])
def test_policies_that_choose_move_at_all_layers_or_not_at_all(policy: str) -> None:
    world, _ = similar(policy, w_exact={1: 1, 2: 2, "all": 4})
    [plan] = world.plans
    assert plan.pieces.length.tolist() == [2] * 4
    assert set(plan.pieces.layers.tolist()) == {ALL_LAYERS}
    world, request = similar(policy, supplied=0, w_exact={1: 1, 2: 2})
    assert world.report(request)["bypass_reason"] == "too_few_reused_tokens"


def test_policies_that_find_the_same_are_known() -> None:
    def alike(one: str, other: str, **options: Any) -> bool:
        world = World(similarity=SIMILARITY | options)
        both = [RequestOptions(policy=policy, similarity=True) for policy in (one, other)]
        return finds_alike(parts_of(world.side).core.config, *both)

    assert alike("shift", "focus")
    assert not alike("exact", "focus")
    assert not alike("shift", "focus", w_exact={1: 2})
    assert alike("shift", "epic", w_exact={1: 2})
    assert alike("focus", "sparsex", w_exact={1: 2})
    once = RequestOptions(recompute_once=True)
    assert not finds_alike(SegReuseConfig(), once, RequestOptions())
    assert finds_alike(SegReuseConfig(), once, once)


def test_other_options_of_the_search_hold_for_requests_to_come() -> None:
    world = World(similarity=SIMILARITY | {"w_exact": {1: 0}}, min_reused_tokens=4)
    world.run(world.add(DOCUMENT))
    wanted = OPTIONS | {"segreuse_policy": "shift"}
    earlier = world.add([7, *CHANGED, 8], wanted)
    world.side.call("set_similarity", {"halo_tokens": 3, "w_exact": None})
    later = world.add([9, *CHANGED, 8], wanted)
    world.run(earlier)
    [first] = world.plans
    world.run(later)
    [second] = world.plans
    assert set(first.pieces.layers.tolist()) == {1}
    assert not first.recipe.always[2:5].any()
    assert set(second.pieces.layers.tolist()) == {ALL_LAYERS}
    assert second.recipe.always[2:5].all(), "the halo of the first segment"
    world.side.call("set_similarity", {})
    assert (
        parts_of(world.side).methods.finder(RequestOptions(policy="shift", similarity=True)).halo
        == NO_HALO
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"w_exact": {2: 0}}, "has other layers than"),
        ({"stride_tokens": 4}, "only by_default, threshold"),
        ({"threshold": 0.05}, "threshold=0.05 must be at least 0.1"),
        ({"halo": 3}, "halo"),
    ],
)
def test_options_that_the_server_cannot_search_by_are_refused(
    options: dict[str, Any], said: str
) -> None:
    world = World(similarity=SIMILARITY | {"w_exact": {1: 0}})
    before = parts_of(world.side).feature["similar"].similar
    with pytest.raises(ValueError, match=said):
        world.side.call("set_similarity", options)
    assert parts_of(world.side).feature["similar"].similar is before
    with pytest.raises(ValueError, match="the server has no option `similarity`"):
        World().side.call("set_similarity", {})


def test_runs_that_are_no_longer_than_the_halo_are_not_reused() -> None:
    world, _ = similar("shift", halo_tokens=5)
    [plan] = world.plans
    assert (plan.num_reused, plan.num_recomputed) == (4 * 6, 4 * 5)
    world, request = similar("shift", supplied=0, halo_tokens=6)
    assert world.report(request)["bypass_reason"] == "too_few_reused_tokens"


def test_the_test_of_similar_segments_is_reported_and_counted() -> None:
    world, request = similar("shift", halo_tokens=3, max_boundary_drift=0.5)
    [plan] = world.plans
    assert plan.check is not None
    assert plan.check.max_drift == 0.5
    starts = plan.check.first.tolist()
    assert plan.reports
    computed = int(plan.recipe.always.sum())
    drifts = (0.12345, 0.6, math.nan, 0.5)
    outcome = PlanOutcome(computed, positions=(0, 1), acceptance=AcceptanceOutcome(drifts, 6, 17))
    world.side.reported({}, {request.request_id: outcome}, {request.request_id: request})
    report = world.report(request)
    assert (report["accepted_segments"], report["rejected_segments"]) == (2, 2)
    assert (report["rejected_tokens"], report["recomputed_tokens"]) == (6, 4 * 3 + 6)
    work = (computed + 17 + 1) / (1 + len(CHANGED) + 1)
    assert report["computed_share"] == pytest.approx(work, abs=1e-4)
    assert request.prefill_stats is not None
    assert request.prefill_stats.num_external_cached_tokens == report["reused_tokens"] - 18
    shown = [each for each in report["explain"] if each["source"] == "similar"]
    assert [each["start"] for each in shown] == starts
    assert [(each["boundary_drift"], each["rejected"]) for each in shown] == [
        (0.1235, False),
        (0.6, True),
        (None, True),
        (0.5, False),
    ]
    assert [each["recomputed"] for each in shown] == [[]] * 4
    data = world.stats.data
    assert data["boundary_drift"] == [0.12345, 0.6, 0.5], "what is not a number is not counted"
    assert data["similar_segments_total"] == {"accepted": 2, "rejected": 2}


def test_where_everything_is_computed_nothing_is_tested() -> None:
    world, request = similar("shift", halo_tokens=3, max_boundary_drift=0.5)
    [plan] = world.plans
    outcome = PlanOutcome(plan.num_tokens)  # it met NaN
    world.side.reported({}, {request.request_id: outcome}, {request.request_id: request})
    report = world.report(request)
    assert (report["accepted_segments"], report["rejected_segments"]) == (0, 0)
    assert report["recomputed_tokens"] == report["reused_tokens"]
    assert "boundary_drift" not in world.stats.data
    world, request = similar("shift", halo_tokens=3, max_boundary_drift=0.5)
    again = OPTIONS | {"segreuse_policy": "epic", "segreuse_recompute_ratio": 1.0}
    request = world.add([9, *CHANGED, 8], again | {"segreuse_min_reused_tokens": 4})
    world.run(request)
    [plan] = world.plans
    assert plan.recipe.always.all()
    assert (plan.check, plan.reports) == (None, False)


def test_an_error_while_a_number_is_noted_stays_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    world = cached_document()
    broken, sound = focused(world), focused(world)
    requests = {request.request_id: request for request in (broken, sound)}
    whole, calls = ReusePlan.computed_share, count()

    def failing_once(*args: Any) -> float:
        if next(calls) == 0:
            raise ArithmeticError
        return whole(*args)

    monkeypatch.setattr(ReusePlan, "computed_share", failing_once)
    world.side.reported({}, dict.fromkeys(requests, PlanOutcome(4)), requests)
    assert world.report(sound)["recomputed_tokens"] == 3
    assert world.report(broken)["reused_tokens"] == len(DOCUMENT)


def test_a_full_step_closes_the_pool_until_it_ends() -> None:
    """So vLLM's loop over the waiting requests ends; see `SegmentBlockPool`."""
    world = cached_document()
    filler = world.add([*range(1000, 1120), *DOCUMENT, 8])
    assert world.match(filler, 0)
    assert world.pool.get_num_free_blocks() > 0
    assert world.match(world.add(PROMPT), 0) == 0
    assert world.pool.get_num_free_blocks() == 0
    world.side.take_step(True)
    assert world.pool.get_num_free_blocks() == world.pool.num_gpu_blocks - 1


def test_the_saved_tokens_are_told_to_vllm() -> None:
    world = cached_document()
    request = world.add(PROMPT)
    assert world.side.saved_tokens(request) == 0
    world.run(request)
    assert world.side.saved_tokens(request) == len(DOCUMENT)
    assert request.prefill_stats.num_external_cached_tokens == len(DOCUMENT)
    world.report(request)
    assert world.side.saved_tokens(request) == 0


def test_what_is_computed_again_is_not_saved() -> None:
    world = cached_document()
    chooses = OPTIONS | {"segreuse_policy": "sparsex", "segreuse_overflow_tokens": 0}
    request = world.add(PROMPT, chooses | {"segreuse_recompute_ratio": 0.25})
    world.run(request)
    assert world.side.saved_tokens(request) == 24
    assert request.prefill_stats.num_external_cached_tokens == 24
    assert world.stats.data["tokens_total"]["recomputed"] == 8


def test_a_request_whose_plan_was_called_back_is_counted_once() -> None:
    world = cached_document()
    request = world.add(PROMPT)
    world.run(request)
    before = {name: dict(world.stats.data[name]) for name in ("tokens_total", "requests_total")}
    world.side.call_back(request)
    assert world.run(request) == 0
    assert {name: dict(world.stats.data[name]) for name in before} == before
    report = world.report(request)
    assert (report["reused_tokens"], report["bypass_reason"]) == (0, "reset")


def test_a_preempted_request_is_planned_with_what_it_has_generated() -> None:
    world = cached_document()
    request = world.add(PROMPT)
    world.run(request)
    request.append_output_token_ids([9, 10, 11])
    request.num_preemptions += 1
    assert world.run(request) == 1 + len(DOCUMENT), "vLLM computes what is behind"
    counted = world.stats.data
    assert counted["tokens_total"]["reused"] == len(DOCUMENT), "as vLLM, once"
    assert counted["requests_total"]["reused"] == {"": 1}
    report = world.report(request)  # of its first admission
    assert (report["prompt_tokens"], report["new_tokens"]) == (len(PROMPT), 2)


def test_only_vllms_own_pool_is_adopted() -> None:
    class Other(BlockPool):
        pass

    from vllm_segreuse.compat.block_pool import SegmentBlockPool

    other: Any = Other(4, enable_caching=True, hash_block_size=SIZE)
    with pytest.raises(RuntimeError, match="found Other"):
        SegmentBlockPool.adopt(other, World().pool.group)


def test_requests_are_told_apart_by_their_policy() -> None:
    world = cached_document()
    options = OPTIONS | {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 1.0}
    request = world.add(PROMPT, options=options)
    world.run(request)
    report = world.report(request)
    assert (report["policy"], report["recomputed_tokens"]) == ("sparsex", len(DOCUMENT))


# Frozen blocks (21, 24, 26).

CONTEXT = [1, 2, 3, 4, 5]


def ingest(
    world: World,
    tokens: list[int] = DOCUMENT,
    name: str = "doc",
    ends_with: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED,
    context: list[int] = CONTEXT,
) -> Any:
    """Compute and freeze a document behind a context, padded to whole blocks."""
    order = FreezeOrder(name, 0, 1, len(context)).encode()
    prompt = [*context, *tokens]
    prompt += prompt[-1:] * (-len(prompt) % SIZE)
    world.ends_with = ends_with
    world.run(world.add(prompt, OPTIONS | {"segreuse_freeze": order}))
    world.ends_with = None
    return world.answer


def fill_pool(world: World) -> None:
    """Somebody takes every free block, and gives it back."""
    blocks = world.pool.get_new_blocks(world.pool.get_num_free_blocks())
    world.pool.free_blocks(blocks)


def test_a_frozen_document_survives_what_evicts_the_rest() -> None:
    world = World()
    assert ingest(world)["frozen"] is True
    fill_pool(world)
    request = world.add(PROMPT)
    assert world.run(request) == len(PROMPT) - 1
    assert world.report(request)["reused_tokens"] == len(DOCUMENT)
    # 37 tokens are 10 blocks, of which one is context only.
    assert world.side.call("frozen")["warm"] == {"doc": [9, 0]}


def test_the_share_that_is_frozen_is_counted_when_it_changes() -> None:
    world = World()
    for _ in range(2):
        world.side.take_step(True)
    assert "frozen_share" not in world.stats.data
    ingest(world)
    for _ in range(2):
        world.side.take_step(True)
    assert world.stats.data["frozen_share"] == [9 / world.frozen.num_blocks]
    world.side.call("unfreeze", ["doc"])
    world.side.take_step(True)
    assert world.stats.data["frozen_share"][1:] == [0]


def test_uses_count_requests_that_reuse_it() -> None:
    world = World()
    ingest(world)
    for _ in range(3):
        world.run(world.add(PROMPT))
    assert world.side.call("frozen")["uses"]["doc"][0] == 3
    assert world.side.call("frozen")["uses"] == {}, "uses are told once"


def test_what_a_document_is_computed_behind_is_no_donor() -> None:
    """The same text is computed as a document of its own, behind more."""
    world = World()
    sibling = [*range(700, 732)]
    assert ingest(world, context=[*CONTEXT, *sibling])["frozen"] is True
    for text, reused in ((sibling, 0), (DOCUMENT, len(DOCUMENT))):
        request = world.add([800, *text, 801, 802])
        world.run(request)
        assert world.report(request)["reused_tokens"] == reused


@pytest.mark.parametrize(
    ("context", "front", "reused"),
    [([], [800], True), (CONTEXT, [800], False), (CONTEXT, [*CONTEXT, 800], True)],
    ids=["alone", "gone", "in front"],
)
def test_a_document_carries_what_it_was_computed_behind(
    context: list[int], front: list[int], reused: bool
) -> None:
    """With `context=same` it is reused where that is in front of it."""
    world = World()
    assert ingest(world, context=context)["frozen"] is True
    for same in ({"segreuse_context": "same"}, {}):
        request = world.add([*front, *DOCUMENT, 801, 802], OPTIONS | same)
        world.run(request)
        assert (world.report(request)["reused_tokens"] > 0) is (reused or not same)


def test_ingest_reuses_nothing_of_other_prompts() -> None:
    world = cached_document()
    assert ingest(world)["bypass_reason"] == "knowledge_base"


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_20_what_was_aborted_is_not_frozen(status: RequestStatus) -> None:
    world = World()
    assert ingest(world, ends_with=status)["frozen"] is False
    assert world.side.call("frozen")["warm"] == {}
    assert world.pool.get_num_free_blocks() == 63


def test_20_what_was_preempted_as_it_ended_is_not_frozen() -> None:
    """Its token comes from a step that had left before; its blocks are gone."""
    world, kept = cached_document(), [1, 2, 5, 6, 9]
    copied = {
        "segreuse_freeze": FreezeOrder("doc", 0, 1, 0).encode(),
        "segreuse_copy": CopyOrder(DOCUMENT, kept).encode(),
    }
    for holds_its_blocks in (False, True):
        request = world.add([*(DOCUMENT[i] for i in kept), 7, 7, 7, 7], OPTIONS | copied)
        assert world.match(request, 0) == 8
        blocks = world.pool.get_new_blocks(3)
        world.side.allocated(request, ids := [block.block_id for block in blocks])
        world.side.take_step(True)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        report = world.side.finished(request, ids if holds_its_blocks else [])
        assert report is not None
        assert report["frozen"] is holds_its_blocks
        assert ("doc" in world.side.call("frozen")["warm"]) is holds_its_blocks
        check_integrity(world.frozen)


def kept_of_document(kept: list[int]) -> World:
    """These tokens of a document are an entry."""
    world = cached_document()
    copied = {
        "segreuse_freeze": FreezeOrder("doc", 0, 1, 0).encode(),
        "segreuse_copy": CopyOrder(DOCUMENT, kept).encode(),
    }
    request = world.add([*(DOCUMENT[i] for i in kept), *[7] * SIZE], OPTIONS | copied)
    assert world.match(request, 0)
    blocks = world.pool.get_new_blocks(1 + request.num_tokens // SIZE)
    world.side.allocated(request, ids := [block.block_id for block in blocks])
    world.side.take_step(True)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    report = world.side.finished(request, ids)
    assert report is not None
    assert report["frozen"] is True
    return world


@pytest.mark.parametrize(
    ("kept", "front"), [([1, 2, 5, 6, 9], [9]), ([1, 9], []), ([3], [9])], ids=str
)
def test_a_named_document_is_reused_however_short_it_is(kept: list[int], front: list[int]) -> None:
    """Its tokens as a text are another one, of which half the words are missing."""
    world = kept_of_document(kept)
    asked = OPTIONS | {"segreuse_min_reused_tokens": 128, "segreuse_documents": ["doc"]}
    request = world.add([*front, *(DOCUMENT[i] for i in kept), 8], asked)
    world.run(request)
    report = world.report(request)
    assert (report["reused_tokens"], report["bypass_reason"]) == (len(kept), None)


def test_while_a_named_document_is_cold_text_is_reused_as_without_it() -> None:
    world = cached_document()
    for least, reused in ((len(DOCUMENT), len(DOCUMENT)), (len(DOCUMENT) + 1, 0)):
        asked = OPTIONS | {"segreuse_min_reused_tokens": least, "segreuse_documents": ["doc"]}
        request = world.add([next(_ids) + 1000, *PROMPT], asked)
        world.run(request)
        assert world.report(request)["reused_tokens"] == reused


@pytest.mark.parametrize("computed", [(3, 8), (8, 3)], ids=["at last", "at first"])
def test_20_of_a_copy_that_was_preempted_the_last_plan_counts(computed: tuple[int, int]) -> None:
    """The report is about the first admission; what the workers compute where a copy failed is the
    KV of a text."""
    world, kept = cached_document(), [1, 2, 5, 6, 9]
    copied = {
        "segreuse_freeze": FreezeOrder("doc", 0, 1, 0).encode(),
        "segreuse_copy": CopyOrder(DOCUMENT, kept).encode(),
    }
    request = world.add([*(DOCUMENT[i] for i in kept), 7, 7, 7, 7], OPTIONS | copied)
    for admission, count_computed in enumerate(computed):
        request.num_preemptions = admission
        assert world.match(request, 0) == 8
        blocks = world.pool.get_new_blocks(3)
        world.side.allocated(request, ids := [block.block_id for block in blocks])
        world.side.take_step(True)
        done = {request.request_id: PlanOutcome(count_computed)}
        world.side.reported({}, done, {request.request_id: request})
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    report = world.side.finished(request, ids)
    assert report is not None
    assert report["frozen"] is (computed[-1] == 3)
    assert ("doc" in world.side.call("frozen")["warm"]) is (computed[-1] == 3)
    if not report["frozen"]:
        assert "computed as a text" in report["not_frozen"]


def test_a_request_that_could_not_be_admitted_leaves_nothing_behind() -> None:
    world = cached_document()
    held = parts_of(world.side).namespaces.num_references
    wrong = {"extra_keys": "of its own", "segreuse_freeze": "no order"}
    request = world.add(PROMPT, OPTIONS | wrong)
    assert world.run(request) == 0
    assert world.report(request)["bypass_reason"] == "error"
    assert parts_of(world.side).namespaces.num_references == held
    assert len(parts_of(world.side).namespaces) == 1, "its name is free again"


def test_24_the_longest_request_always_fits_beside_frozen_blocks() -> None:
    world = World()
    limit = world.side.call("frozen")["limit"]
    assert limit == 31, "half of 63 blocks"
    for i in range(4):
        ingest(world, [*range(1000 * i, 1000 * i + 32)], f"doc {i}")
    assert world.side.call("frozen")["frozen"] <= limit
    assert len(world.side.call("frozen")["warm"]) == 3
    assert world.pool.get_num_free_blocks() >= 64 // SIZE


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 63 - 16 - 1),  # all that the longest request and its next token leave
        ({"watermark_blocks": 5}, 63 - 16 - 5 - 1),
        ({"max_model_len": 65}, 63 - 17 - 1),
        ({"max_model_len": 4096}, 0),
    ],
)
def test_24_no_share_is_so_large_that_the_longest_request_would_not_fit(
    options: dict[str, Any], limit: int
) -> None:
    assert World(frozen_share=1.0, **options).side.call("frozen")["limit"] == limit


def test_uses_do_not_count_the_parts_of_a_document_itself() -> None:
    world = World()
    ingest(world)
    blocks = world.frozen.block_ids
    for freeze, uses in ((FreezeOrder("more", 0, 1, 5).encode(), {}), (None, {"doc"})):
        request = world.add([*CONTEXT, *DOCUMENT], OPTIONS | {"segreuse_freeze": freeze})
        world.match(request, 9 * SIZE)
        world.side.allocated(request, blocks)
        assert world.side.call("frozen")["uses"].keys() == set(uses)


def test_26_a_reset_lets_frozen_documents_go() -> None:
    world = World()
    ingest(world)
    assert world.pool.reset_prefix_cache()
    assert world.side.call("frozen")["warm"] == {}
    assert not len(world.index)
    assert world.pool.get_num_free_blocks() == 63
    assert ingest(world)["frozen"] is True, "it is warm again with one call"


def test_26_a_reset_that_cannot_be_leaves_them_frozen() -> None:
    world = World()
    ingest(world)
    held = world.pool.get_new_blocks(1)
    assert not world.pool.reset_prefix_cache()
    assert list(world.side.call("frozen")["warm"]) == ["doc"]
    world.pool.free_blocks(held)


def test_23_frozen_blocks_go_when_a_request_needs_room() -> None:
    world = World()
    ingest(world)
    assert not world.pool.make_room(10), "only 9 are frozen: none is evicted for nothing"
    assert world.side.call("frozen")["frozen"] == 9
    assert world.pool.make_room(9)
    assert world.side.call("frozen")["frozen"] == 0


def test_what_was_evicted_is_wanted_when_a_prompt_contains_it() -> None:
    world = World()
    ingest(world)
    world.pool.make_room(9)
    fill_pool(world)
    world.run(world.add([7, 8, 9]))
    assert world.side.call("frozen")["wanted"] == []
    world.run(world.add(PROMPT))
    assert world.side.call("frozen")["wanted"] == ["doc"]


def test_a_frozen_block_that_vllm_invalidates_makes_its_document_cold() -> None:
    world = World()
    ingest(world)
    frozen = world.frozen.block_ids[0]
    world.pool.evict_blocks({frozen})
    assert world.side.call("frozen")["warm"] == {}
    assert world.pool.get_num_free_blocks() == 63
    check_integrity(world.frozen)


# The exact tier.

EXACT = OPTIONS | {"segreuse_policy": "exact"}


def holes(world: World, *block_ids: int) -> None:
    """Blocks are evicted, as vLLM does: from the end of what it finds by prefix, or anywhere."""
    world.pool.evict_blocks(set(block_ids))


def test_resident_blocks_behind_a_hole_are_reused_in_place() -> None:
    world = cached_document()
    first = world.pool.blocks[1].block_id
    holes(world, first + 1, first + 4)
    request = world.add([*DOCUMENT, 8], EXACT)
    assert world.match(request, SIZE) == 28
    tracked = parts_of(world.side).planner.get(request.request_id)
    assert tracked is not None
    assert tracked.plan is not None
    assert tracked.plan.donor_blocks == [first + i for i in (7, 6, 5, 3, 2)]
    pieces = tracked.plan.pieces
    assert (pieces.destination == pieces.position).all()


def test_the_exact_tier_counts_its_tokens() -> None:
    world = cached_document()
    holes(world, world.pool.blocks[1].block_id)
    request = world.add([*DOCUMENT, 8], EXACT)
    world.run(request)
    report = world.report(request)
    assert (report["exact_tokens"], report["reused_tokens"], report["new_tokens"]) == (28, 28, 5)
    assert report["computed_share"] == pytest.approx(5 / 33, abs=1e-4)
    assert world.stats.data["tokens_total"]["exact"] == 28


@pytest.mark.parametrize(
    "other",
    [{"tokens": [7, *DOCUMENT[1:], 8]}, {"cache_salt": "another"}],
    ids=["another first token", "another salt"],
)
def test_the_exact_tier_asks_for_the_whole_prefix(other: dict[str, Any]) -> None:
    world = cached_document()
    holes(world, world.pool.blocks[1].block_id)
    request = world.add(**{"tokens": [*DOCUMENT, 8], "options": EXACT} | other)
    assert world.run(request) == 0
    assert world.report(request)["bypass_reason"] == "too_few_reused_tokens"


def test_the_exact_tier_needs_extra_keys_but_no_namespace() -> None:
    """As vLLM's prefix cache: whoever computed a prefix, it is the same KV."""
    world = cached_document(options={})
    holes(world, world.pool.blocks[1].block_id)
    exact_without_keys = {k: v for k, v in EXACT.items() if k != "extra_keys"}
    assert world.run(world.add([*DOCUMENT, 8], exact_without_keys)) == 0
    world = cached_document(options={})
    holes(world, world.pool.blocks[1].block_id)
    assert world.run(world.add([*DOCUMENT, 8], EXACT)) == len(DOCUMENT)


def test_what_the_exact_tier_filled_has_no_exact_name() -> None:
    world = cached_document()
    holes(world, world.pool.blocks[1].block_id)
    world.run(world.add([*DOCUMENT, 8], EXACT))
    request = world.add([*DOCUMENT, 9], EXACT)
    found = world.pool.resident_blocks(request, 0, 8).tolist()
    assert found == [-1, *range(2, 9)]


def test_22_blocks_named_in_this_step_are_not_resident() -> None:
    world = World()
    document = world.add(DOCUMENT)
    world.match(document, 0)
    blocks = world.pool.get_new_blocks(8)
    world.pool.cache_full_blocks(document, blocks, 0, 8, SIZE, 0)
    request = world.add([*DOCUMENT, 8], EXACT)
    assert world.pool.resident_blocks(request, 0, 8).tolist() == [-1] * 8
    world.side.take_step(True)
    assert world.pool.resident_blocks(request, 0, 8).tolist() == [b.block_id for b in blocks]


# Audits.

AUDIT = {"share": 1.0, "per_minute": 6000, "classes": {"te": "ours"}}


def audited(**options: Any) -> World:
    """Everything that reuses is audited; a document is known."""
    world = World(audit=AUDIT | options)
    world.run(world.add(DOCUMENT))
    return world


def answered(world: World, tokens: list[int], options: Any = OPTIONS, **fields: Any) -> Request:
    """A request that has run, and said two tokens."""
    request = world.add(tokens, options, **fields)
    world.run(request)
    request.append_output_token_ids([41, 42])
    request.status = RequestStatus.FINISHED_STOPPED
    return request


def outcomes(world: World) -> dict[str, int]:
    audits = world.stats.data.get("audits_total", {})
    assert not audits or audits.keys() == {"shift"}
    counted: dict[str, int] = audits.get("shift", {}).get("ours", {})
    return counted


def compare(world: World, kl: float) -> Request | None:
    """The next reference, once it has been compared."""
    reference = next_reference(world)
    if reference is not None:
        parts_of(world.side).audits.compared({reference.request_id: AuditResult(kl, 1, 2)})
        reference.status = RequestStatus.FINISHED_LENGTH_CAPPED
        assert world.side.finished(reference, []) is None
    return reference


def test_a_request_that_reuses_is_audited() -> None:
    world = audited()
    request = answered(world, PROMPT, lora_request=LORA)
    assert audit_orders(world) is None, "of another adapter: nothing is reused"
    request = answered(world, PROMPT)
    orders = audit_orders(world)
    assert orders is not None
    assert orders.record == {request.request_id: Recording(len(PROMPT), 8)}
    assert next_reference(world) is None
    report = world.report(request)
    assert "fallback" not in report
    reference = compare(world, 0.5)
    assert reference is not None
    assert reference.prompt_token_ids == PROMPT
    assert reference.sampling_params is not None
    assert reference.sampling_params.max_tokens == 3
    orders = audit_orders(world)
    assert orders is not None
    assert orders.compare[reference.request_id].answer == (41, 42)
    assert world.stats.data["audit_kl"] == {"shift": {"ours": [0.5]}}
    assert world.stats.data["audit_tokens_total"] == {"shift": {"ours": {"same": 1, "other": 1}}}
    (recent,) = world.side.call("audits")["recent"]
    assert recent["kl"] == 0.5


def test_an_audit_says_what_was_found_planned_and_computed(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    world = audited(log=str(log))
    options = OPTIONS | {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.5}
    request = answered(world, PROMPT, options)
    planned = world.plans[0].num_recomputed
    always = world.plans[0].recipe.counts(0).always
    outcome = PlanOutcome(always + 1, drift=9.0, in_full=False)
    world.side.reported({}, {request.request_id: outcome}, {request.request_id: request})
    report = world.report(request)
    compare(world, 0.25)
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line["request_id"] == request.request_id
    assert line["found"] == {
        "prompt_tokens": len(PROMPT),
        "prefix_tokens": 0,
        "segment_tokens": 32,
        "segments": 1,
        "depth": 0,
    }
    assert line["planned"]["recomputed_tokens"] == planned
    assert line["materialised"]["recomputed_tokens"] == report["recomputed_tokens"] == 1 < planned
    assert line["materialised"]["drift"] == 9.0
    assert line["materialised"]["in_full"] is False
    assert line["planned"]["computed_share"] > line["materialised"]["computed_share"]


def test_what_does_not_reuse_is_not_audited() -> None:
    world = audited()
    for tokens, options in (
        ([*range(900, 940)], OPTIONS),
        (PROMPT, OPTIONS | SEEN),
        (PROMPT, None),
        (PROMPT, OPTIONS | {"extra_keys": "others"}),
    ):
        world.side.finished(answered(world, tokens, options), [])
    assert audit_orders(world) is None
    assert outcomes(world) == {}


def test_answers_of_a_grammar_are_not_audited() -> None:
    world = audited()
    grammar = {"structured_outputs": StructuredOutputsParams(json='{"type": "string"}')}
    answered(world, PROMPT, sampling=grammar)
    assert world.plans
    assert audit_orders(world) is None


def test_an_aborted_request_is_compared_by_the_tokens_that_it_had() -> None:
    """vLLM's API server aborts a request whose answer has come to a stop string."""
    world = audited()
    request = answered(world, PROMPT)
    request.status = RequestStatus.FINISHED_ABORTED
    report = world.side.finished(request, [])
    assert report is not None
    reference = compare(world, 0.5)
    assert reference is not None
    orders = audit_orders(world)
    assert orders is not None
    assert orders.compare[reference.request_id].answer == (41, 42)
    assert outcomes(world) == {"compared": 1}


@pytest.mark.parametrize("how", ["preempted", "called back"])
def test_what_is_not_what_was_recorded_is_forgotten(how: str) -> None:
    world = audited()
    request = answered(world, PROMPT)
    if how == "preempted":
        request.num_preemptions = 1
        world.run(request)
    else:
        world.side.call_back(request)
    world.side.finished(request, [])
    assert outcomes(world) == {"ended": 1}
    assert next_reference(world) is None


def test_a_reference_waits_for_room() -> None:
    world = audited()
    world.side.finished(answered(world, PROMPT), [])
    held = world.pool.get_new_blocks(world.pool.get_num_free_blocks() - 9)
    assert next_reference(world) is None, "34 tokens and 3 take ten blocks"
    world.pool.free_blocks(held[:1])
    assert next_reference(world) is not None


def test_a_reset_forgets_audits() -> None:
    world = audited()
    world.side.finished(answered(world, PROMPT), [])
    assert parts_of(world.side).audits.reset() is None
    assert next_reference(world) is None


DRIFTS = {"max_kl": 0.1, "min_audits": 1, "on_drift": "fallback"}


def drifted(**options: Any) -> World:
    world = audited(**DRIFTS, **options)
    world.side.finished(answered(world, PROMPT), [])
    assert compare(world, 0.2) is not None
    return world


def test_requests_of_a_namespace_that_has_drifted_run_in_full() -> None:
    world = drifted()
    request = answered(world, PROMPT)
    report = world.report(request)
    assert (report["reused_tokens"], report["bypass_reason"]) == (0, "fallback")
    assert report["fallback"] is True
    assert world.pool.get_cached_block(request.block_hashes[1], [0]) is not None, "it donates"
    assert [each["above"] for each in world.side.call("audits")["drifted"]] == [1]


def test_or_with_the_options_of_the_fallback() -> None:
    careful = {"policy": "sparsex", "recompute_ratio": 1.0, "dense_layers": 0}
    world = drifted(fallback=careful)
    report = world.report(answered(world, PROMPT))
    assert (report["policy"], report["fallback"]) == ("sparsex", True)
    assert report["reused_tokens"] == report["recomputed_tokens"] == 32
    compare(world, 0.9)
    assert len(world.side.call("audits")["drifted"]) == 1


def test_others_do_not_fall_back() -> None:
    world = drifted()
    others = OPTIONS | {"extra_keys": "others"}
    world.run(world.add(DOCUMENT, others))
    report = world.report(answered(world, PROMPT, others))
    assert (report["policy"], report["reused_tokens"]) == ("shift", 32)
    assert "fallback" not in report
