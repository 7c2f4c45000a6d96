# SPDX-License-Identifier: Apache-2.0
"""The connector's half in a worker process: plans on one side, the loaded model on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_segreuse.compat.model_runner import (
    captured_graphs,
    loaded_drafter,
    loaded_model,
    once_captured,
)
from vllm_segreuse.engine.kv_group import segment_group
from vllm_segreuse.engine.metrics import Counted
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.options.server import ServerOptions
from vllm_segreuse.plan import Message, ModelLayers, PlanOutcome, ReusePlan
from vllm_segreuse.prefill.backlog import Backlog
from vllm_segreuse.prefill.checks import OtherStages, Runtime, prove
from vllm_segreuse.prefill.executor import PassReport, SparsePrefill
from vllm_segreuse.prefill.feature import WorkerFeature
from vllm_segreuse.prefill.proofs.graphs import GraphProof

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.segreuse")


class WorkerSide:
    """One per worker: carries plans out.

    Args:
        backlog: plans under way.
        features: their halves here.
        stats: counts what happens.
        is_first: whether it is the one of all ranks that counts what all agree on.

    Attributes:
        backlog, features: as above.
    """

    def __init__(
        self,
        backlog: Backlog,
        features: Sequence[WorkerFeature],
        stats: Counted,
        is_first: bool,
    ) -> None:
        self.backlog = backlog
        self.features = features
        self._stats = stats
        self._is_first = is_first
        self._outcomes: dict[str, PlanOutcome] = {}

    def close(self) -> None:
        """The engine ends."""
        for feature in self.features:
            feature.close()

    @property
    def layers(self) -> ModelLayers:
        """Of the model, or of this pipeline stage."""
        return self.backlog.prefill.own_layers

    def facts(self) -> dict[str, Any]:
        """What the scheduler's half of features has to know of the model, by feature."""
        found = {it.name: it.fact() for it in self.features}
        return {name: fact for name, fact in found.items() if fact is not None}

    def begin_step(self, messages: Mapping[str, Any]) -> None:
        """Before anything of a step writes pages.

        Args:
            messages: of the scheduler's half of features, by feature.
        """
        for feature in self.features:
            feature.begin_step(messages.get(feature.name))

    def end_step(self) -> dict[str, Message]:
        """All of a step's plans are queued: messages to the scheduler's half, by feature."""
        found = {it.name: it.end_step() for it in self.features}
        return {name: message for name, message in found.items() if message is not None}

    @property
    def is_idle(self) -> bool:
        """Whether no plan is under way that takes several steps."""
        return self.backlog.is_empty

    def before_forward(self, plans: list[ReusePlan]) -> None:
        """Carry out a step's plans, or begin those that take several steps."""
        for feature in self.features:
            feature.begin_plans(plans)
        report = self.backlog.take(plans)
        if report is not None:
            self._ended([plan.request_id for plan in plans if not plan.spread], report)

    def after_forward(self, called_back: list[str], ended: set[str]) -> set[str]:
        """Go on with plans that take several steps; also called in steps without a forward.

        Args:
            called_back: requests whose plan is dropped, and for which vLLM does not wait.
            ended: requests that have ended.

        Returns:
            Requests for which vLLM need not wait any more.
        """
        self.backlog.drop(called_back)
        over = self.backlog.drop(ended)
        for feature in self.features:
            feature.drop_plans([*called_back, *ended])
        done = self.backlog.advance()
        for request_id, report in done.items():
            self._ended([request_id], report)
        return over | done.keys()

    def take_outcomes(self) -> dict[str, PlanOutcome]:
        """How plans have ended since the last call, by request, where they report it."""
        taken, self._outcomes = self._outcomes, {}
        return taken

    def _ended(self, request_ids: Sequence[str], report: PassReport) -> None:
        """Plans of these requests were carried out together."""
        self._note(report)
        for feature in self.features:
            feature.end_plans(request_ids, report)

    def _note(self, report: PassReport) -> None:
        self._stats.observe("align_seconds", report.align_s)
        self._stats.observe("sparse_pass_seconds", report.sparse_s)
        self._outcomes |= report.outcomes
        if report.not_finite:
            if self._is_first:  # ranks agree on it, and vLLM adds up what they count
                self._stats.inc("not_finite_total")
            logger.warning(
                "segment reuse met NaN or infinity; computed in full: %s", report.not_finite
            )


def proven(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    cuts: Sequence[int],
    codec: Codec,
    stats: Counted,
    stages: OtherStages | None = None,
) -> Runtime:
    """What carries plans out on the loaded model.

    Args:
        cuts: layers whose inputs are stored as boundary states.
        codec: of the second tier's records.
        stages: the other pipeline stages; None: there are none.

    Raises:
        RefusedError: what could not be proven.
    """
    model, drafter = loaded_model(), loaded_drafter()
    runtime = prove(model, vllm_config, kv_cache_config, cuts, codec, drafter, stages)
    logger.info(
        "segment reuse: proven on this model (largest deviation %.1e); %s",
        runtime.max_deviation,
        runtime.kernels,
    )
    if told := windows_note(runtime.prefill.runner.known, kv_cache_config):
        logger.info("segment reuse: %s", told)
    if runtime.graphs is not None:
        once_captured(partial(_prove_graphs, runtime.graphs))
    states = runtime.prefill.states
    if states is not None:
        stats.set("state_bytes", states.num_bytes)
        logger.info(
            "segment reuse: boundary states at layers %s take %.2f GiB beside the KV cache",
            ", ".join(map(str, states.cuts)),
            states.num_bytes / (1 << 30),
        )
    return runtime


def windows_note(layers: Sequence[LayerKv], kv_cache_config: KVCacheConfig) -> str | None:
    """What keeping all blocks of layers with a window takes; None: there are none, or these have
    blocks of their own."""
    windows = [layer.kind.window for layer in layers if layer.kind.window]
    if not windows or (group := segment_group(kv_cache_config)).others:
        return None
    names = [layer.attention.layer_name for layer in layers if layer.kind.window]
    size = sum(group.specs[name].page_size_bytes for name in names) // group.block_size
    return (
        f"{len(windows)} of {len(layers)} layers attend to {max(windows)} tokens at most, and all "
        f"of their blocks are kept: {size} bytes more for each token that windows have passed; "
        "--no-disable-hybrid-kv-cache-manager frees them (docs/limits.md)"
    )


def backlog_of(
    prefill: SparsePrefill,
    vllm_config: VllmConfig,
    config: ServerOptions,
    stages: OtherStages | None,
) -> Backlog:
    """What spreads plans over steps as the server's options say.

    Args:
        stages: the other pipeline stages; None: there are none.
    """
    most = vllm_config.scheduler_config.max_num_batched_tokens
    num_layers = prefill.layers.in_all
    step_work = config.spread_work(most, num_layers)
    if stages is None:
        return Backlog(prefill, step_work or 0)
    return stages.backlog(prefill, step_work or most * num_layers)


def _prove_graphs(proof: GraphProof) -> None:
    """vLLM has captured its CUDA graphs: passes may run by them from here on.

    Raises:
        RefusedError: they do not compute what the model does.
    """
    captured = captured_graphs()
    if captured is None:
        return
    try:
        proof.prove(captured)
    except UnsupportedModelError as error:
        raise RefusedError(
            f"{error}; start without these graphs: -cc.cudagraph_mode=FULL_DECODE_ONLY"
        ) from error
    logger.info(
        "segment reuse: passes of up to %d tokens run by vLLM's CUDA graphs", captured.sizes[-1]
    )
