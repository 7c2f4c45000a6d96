# SPDX-License-Identifier: Apache-2.0
"""No pass holds more than is reserved for it (`config/memory.py`) beside the activations of one
chunk, however many tokens are new."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from tests.prefill import loaded as small
from vllm_segreuse.config import memory
from vllm_segreuse.plan import Pieces, Recipe, ReusePlan, Segments
from vllm_segreuse.policies import POLICIES, Situation
from vllm_segreuse.prefill.chunks import finish

TOKENS, CHUNK, LAYERS = 2048, 128, 10


def peak(compute: Callable[[], Any]) -> int:
    """Most bytes that were allocated meanwhile, and not before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    live = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


class Subject:
    """A model whose states, queries and keys are large beside its other activations.

    Attributes:
        reserved: bytes for a pass.
        of_a_chunk: bytes that vLLM's own run on a chunk of the largest size holds.
    """

    def __init__(self, model: small.Loaded, patch: pytest.MonkeyPatch) -> None:
        self.prefill = small.prove(model).prefill
        patch.setattr(memory, "SCRATCH_BYTES", 0)
        patch.setattr(memory, "_BUILDER_BYTES", 0)
        self.vllm_config = model.vllm_config
        transfer = SimpleNamespace(kv_connector_extra_config={})
        patch.setattr(self.vllm_config, "kv_transfer_config", transfer)
        layers = self.prefill.runner
        layers.settings = layers.settings._replace(max_chunk_tokens=CHUNK)
        patch.setattr(model.vllm_config.scheduler_config, "max_num_batched_tokens", CHUNK)
        self.token_ids = np.random.default_rng(0).integers(1, 128, TOKENS).astype(np.int32)
        blocks = np.arange(1, 1 + 2 * TOKENS // small.BLOCK_SIZE, dtype=np.int32)
        self.donors, self.blocks = np.split(blocks, 2)
        everything = Recipe.without_choice(np.ones(TOKENS - 1, bool))
        self.prefill.run([self.plan(everything, self.donors)])
        self.of_a_chunk = self._of_a_chunk()

    @property
    def reserved(self) -> int:
        return memory.pass_bytes(self.vllm_config)

    def plan(self, recipe: Recipe, blocks: np.ndarray | None = None) -> ReusePlan:
        """All but the last token; what is not always computed is reused."""
        where, size = np.flatnonzero(~recipe.always), small.BLOCK_SIZE
        table = np.stack(
            [where, np.ones_like(where), self.donors[where // size], where % size, where], 1
        )
        after = int(self.token_ids[-1])
        return ReusePlan(
            "measured",
            0,
            TOKENS - 1,
            self.token_ids[:-1],
            Pieces.from_table(table),
            recipe,
            [],
            0,
            self.blocks if blocks is None else blocks,
            suffix=self.token_ids[-1:] if recipe.program.probes_suffix else self.token_ids[:0],
            token_at_stop=after,
        )

    def _of_a_chunk(self) -> int:
        recipe = Recipe.without_choice(np.arange(TOKENS - 1) < CHUNK)
        plan = replace(self.plan(recipe), stop=CHUNK, token_ids=self.token_ids[:CHUNK])
        plan = replace(
            plan, pieces=Pieces.from_table([]), recipe=Recipe.without_choice(np.ones(CHUNK, bool))
        )
        batch = self.prefill.prepare([plan]).batches[0]
        layers = self.prefill.runner
        return peak(lambda: finish(layers.stock_model(batch.tokens, batch)))


@contextmanager
def subject_with(tmp_path: Any, **changes: Any) -> Iterator[Subject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "POSITIONS", TOKENS)
        sizes = {
            "num_hidden_layers": LAYERS,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": TOKENS,
        }
        given = sizes | changes
        with small.loaded(tmp_path, num_blocks=200, **given) as model:
            yield Subject(model, patch)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with subject_with(tmp_path_factory.mktemp("llama")) as made:
        yield made


def recipe_of(policy: str, new: float, dense_layers: float) -> Recipe:
    """Of a prompt of which such a share is new, at its end."""
    reused = np.arange(TOKENS - 1) < (1 - new) * TOKENS
    segments = Segments.elsewhere(np.zeros(1, np.int32), np.full(1, 10**6, np.int32))
    given = Situation(reused, segments, small.BLOCK_SIZE, LAYERS, None, dense_layers, None)
    return POLICIES[policy](given)


@pytest.mark.parametrize("new", [0.02, 0.45, 0.9])
@pytest.mark.parametrize(
    ("policy", "dense_layers"),
    [
        ("shift", 0),
        ("focus", 0),
        ("prophet", 0),
        ("peaks", 0),
        ("sparsex", 0),
        ("sparsex", 1),
        ("cacheblend", 1),
        ("exact", 0),
    ],
)
def test_a_pass_fits_into_what_is_reserved(
    policy: str, dense_layers: float, new: float, subject: Subject
) -> None:
    plan = subject.plan(recipe_of(policy, new, dense_layers))
    found = peak(lambda: subject.prefill.run([plan]))
    assert found <= subject.reserved + subject.of_a_chunk


def test_so_does_a_plan_that_is_computed_in_full(subject: Subject) -> None:
    plan = subject.plan(recipe_of("focus", 0.5, 0)).in_full()
    found = peak(lambda: subject.prefill.run([plan]))
    assert found <= subject.reserved + subject.of_a_chunk
