# SPDX-License-Identifier: Apache-2.0
"""NIXL's handshake takes an engine that reuses segments for another one than an engine without."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_segreuse.compat import nixl


@pytest.fixture
def base_worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that computes the hash, as it is without us."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, metadata

    name = "compute_nixl_compatibility_hash"
    monkeypatch.setattr(base_worker, name, getattr(metadata, name))
    return base_worker


def engine(hosted: bool, model: str = "m") -> Any:
    """What the hash is made of, and whether the engine reuses segments."""
    model_config = SimpleNamespace(
        model=model,
        dtype="bfloat16",
        get_total_num_kv_heads=lambda: 2,
        get_head_size=lambda: 16,
        get_total_num_hidden_layers=lambda: 4,
    )
    return SimpleNamespace(
        model_config=model_config,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        speculative_config=None,
        hosted=hosted,
    )


def is_hosted(config: Any) -> bool:
    return bool(config.hosted)


def test_an_engine_without_segment_reuse_has_another_hash(base_worker: Any) -> None:
    before = base_worker.compute_nixl_compatibility_hash(engine(False), "CPU_ATTN")
    nixl.install(is_hosted)
    nixl.install(is_hosted)
    ours = base_worker.compute_nixl_compatibility_hash(engine(True), "CPU_ATTN")
    plain = base_worker.compute_nixl_compatibility_hash(engine(False), "CPU_ATTN")
    assert plain == before, "engines without it shake hands as before"
    assert ours != plain
    assert ours == base_worker.compute_nixl_compatibility_hash(engine(True), "CPU_ATTN")


@pytest.mark.parametrize(
    "other",
    [
        (engine(True, "another model"), "CPU_ATTN", "pull"),
        (engine(True), "FLASH_ATTN", "pull"),
        (engine(True), "CPU_ATTN", "push"),
    ],
    ids=["model", "backend", "mode"],
)
def test_what_else_has_to_agree_still_has_to(base_worker: Any, other: tuple[Any, ...]) -> None:
    nixl.install(is_hosted)
    hash_of = base_worker.compute_nixl_compatibility_hash
    assert hash_of(engine(True), "CPU_ATTN", transfer_mode="pull") != hash_of(*other)


def test_engines_of_another_protocol_are_refused(
    base_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nixl.install(is_hosted)
    before = base_worker.compute_nixl_compatibility_hash(engine(True), "CPU_ATTN")
    monkeypatch.setattr(nixl, "PROTOCOL", nixl.PROTOCOL + 1)
    assert base_worker.compute_nixl_compatibility_hash(engine(True), "CPU_ATTN") != before


def test_workers_compute_it_by_the_name_that_is_wrapped(base_worker: Any) -> None:
    """It is the worker's own module that looks the name up, when caches are registered."""
    worker = base_worker.NixlBaseConnectorWorker
    used = worker.register_kv_caches.__code__.co_names
    assert "compute_nixl_compatibility_hash" in used
