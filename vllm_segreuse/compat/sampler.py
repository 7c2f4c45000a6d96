# SPDX-License-Identifier: Apache-2.0
"""vLLM's runners where they sample (`v1/worker/`): logits for audits, before anything changes them.

Log-probabilities of the whole vocabulary are more than vLLM allows a request by default
(`max_logprobs`), and would have to be sent to the API server and listed there. Audits compare them
on the device instead. Only a worker that is to record something looks at them.

Obsolete when connectors are given the logits of a step. None filed that we know of: vLLM's logits
processors come after structured outputs, and not at all with speculative decoding.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from vllm_segreuse.compat.patching import wrap


class Sampled(NamedTuple):
    """Logits from which a request's next token is sampled in this step.

    Attributes:
        request_id: of the request.
        row: of the logits.
        num_tokens: tokens of the request that are computed then.
    """

    request_id: str
    row: int
    num_tokens: int


class Records(Protocol):
    """What logits are given to."""

    @property
    def is_idle(self) -> bool:
        """Whether no logits are wanted."""

    def see(self, rows: Iterator[Sampled], logits: Any) -> None:
        """The logits of a step."""


_recorder: Records | None = None


def watch(recorder: Records | None) -> None:
    """Have the logits of this process's steps recorded from here on, in this one place."""
    global _recorder
    _recorder = recorder


def install() -> None:
    """Wrap the sampling of vLLM's model runners (V1, V2), once."""
    v1 = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    wrap(v1.GPUModelRunner, "sample_tokens", _sample_tokens)
    for module, name in (
        ("vllm.v1.worker.gpu.sample.sampler", "Sampler"),
        ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "RejectionSampler"),
    ):
        wrap(getattr(importlib.import_module(module), name), "__call__", _call)


def _sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.execute_model_state
        if _recorder is not None and not _recorder.is_idle and state is not None:
            _recorder.see(_rows_of_v1(self.input_batch, state), state.logits)
        return original(self, *args, **kwargs)

    return sample_tokens


def _rows_of_v1(batch: Any, state: Any) -> Iterator[Sampled]:
    scheduled, metadata = state.scheduler_output.num_scheduled_tokens, state.spec_decode_metadata
    drafts = [0] * batch.num_reqs if metadata is None else metadata.num_draft_tokens
    first_rows = accumulate((1 + number for number in drafts), initial=0)
    for i, (request_id, row) in enumerate(zip(batch.req_ids, first_rows, strict=False)):
        computed = int(batch.num_computed_tokens_cpu[i]) + scheduled[request_id]
        yield Sampled(request_id, row, computed - drafts[i])


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample(self: Any, logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if _recorder is not None and not _recorder.is_idle:
            _recorder.see(_rows_of_v2(input_batch), logits)
        return original(self, logits, input_batch, *args, **kwargs)

    return sample


def _rows_of_v2(batch: Any) -> Iterator[Sampled]:
    drafts = batch.num_draft_tokens_per_req
    for i, request_id in enumerate(batch.req_ids):
        computed = int(batch.num_computed_tokens_np[i]) + int(batch.num_scheduled_tokens[i])
        drafted = 0 if drafts is None else int(drafts[i])
        yield Sampled(request_id, int(batch.cu_num_logits_np[i]), computed - drafted)
