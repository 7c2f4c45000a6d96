# SPDX-License-Identifier: Apache-2.0
"""Examples asked of the real engine: once in full, once under each policy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import engine, harness
from bench.quality import language
from bench.quality.tasks import Example

IntArray = npt.NDArray[np.int64]

MODEL = Path(os.environ.get("BENCH_QUALITY_MODEL", harness.REPOSITORY / "models" / "lab"))
MAX_TOKENS = 4096
KV_SPACE_GIB = 1


@dataclass(frozen=True)
class Arm:
    """One way to compute a prompt; `options` None: in full, without reuse."""

    name: str
    options: Mapping[str, Any] | None

    @property
    def extra_args(self) -> dict[str, Any]:
        """The options as a request carries them."""
        return {f"segreuse_{key}": value for key, value in (self.options or {}).items()}


FULL = Arm("full", None)


@dataclass(frozen=True)
class Outcome:
    """What came of one example under one arm.

    Attributes:
        score: see `Example.score`.
        first: log-probabilities of the first word of the answer, by token id.
        work: share of (token, layer) pairs that were computed.
        ttft_ms: time to the first token.
        reused: share of the documents' tokens that were reused.
    """

    score: float
    first: Mapping[int, float]
    work: float
    ttft_ms: float
    reused: float


def require_model(model: Path = MODEL) -> None:
    """Raises BenchError where there is none."""
    if not (model / "model.safetensors").is_file():
        raise harness.BenchError(
            f"no model at {model}: train one with `python -m lab DIR`, and write "
            "it there with `python -m lab.export DIR/model.pt FOLDER`"
        )


@contextmanager
def lab_engine(model: Path = MODEL, **arguments: Any) -> Iterator[Lab]:
    """The bundled model, served with segment reuse."""
    engine.prepare_environment(KV_SPACE_GIB)
    require_model(model)
    with engine.engine(
        model,
        # Only exact KV donates: what one arm leaves behind must not help the next.
        segreuse={"max_provenance_depth": 0, "min_reused_tokens": 32},
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        max_logprobs=-1,
        enforce_eager=True,
        **arguments,
    ) as llm:
        yield Lab(llm)


class Lab:
    """Asks examples; every example has a namespace of its own."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._asked = 0

    def ask(self, example: Example, arms: list[Arm]) -> dict[str, Outcome]:
        """Compute the documents in their other contexts, then ask under every arm.

        Arms with reuse come first: a full prefill leaves blocks behind that prefix caching finds.

        Raises:
            BenchError: documents were not reused as they should have been.
        """
        self._asked += 1
        namespace = {"extra_keys": [f"example {self._asked}"]}
        for context in example.contexts:
            self._generate(language.encode(context), 1, namespace)
        reusing = [arm for arm in arms if arm.options is not None]
        in_full = [arm for arm in arms if arm.options is None]
        order = (harness.rotated(reusing, self._asked) if reusing else []) + in_full
        outcomes = {arm.name: self._outcome(example, arm, namespace) for arm in order}
        if not self.llm.reset_prefix_cache():
            raise harness.BenchError("the prefix cache could not be reset: a request still runs")
        return outcomes

    def computed_tokens(self, example: Example, arms: list[Arm]) -> dict[str, IntArray]:
        """How often each layer computed each token of the prompt, `[layers, tokens]` by arm.

        The prompt's last token, which vLLM computes itself, is not counted.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        layers = get_kv_transfer_group().worker_side.backlog.prefill.runner
        original = layers.run
        counts = {}
        for arm in arms:
            if arm.options is None:
                continue
            count = np.zeros((len(layers), len(example.prompt)), dtype=np.int64)

            def counting(first: int, last: int, tokens: Any, *rest: Any) -> Any:
                count[first:last, tokens.positions.numpy()] += 1  # noqa: B023
                return original(first, last, tokens, *rest)

            layers.run = counting
            try:
                self.ask(example, [arm])
            finally:
                layers.run = original
            counts[arm.name] = count
        return counts

    def _outcome(self, example: Example, arm: Arm, namespace: Mapping[str, Any]) -> Outcome:
        prompt = language.encode(example.prompt)
        extra_args = None if arm.options is None else {**namespace, **arm.extra_args}
        output, ttft_ms = self._generate(prompt, len(example.answer), extra_args, logprobs=-1)
        reused, work = 0.0, 1.0
        if arm.options is not None:
            told = (output.kv_transfer_params or {}).get("segreuse")
            timed = engine.Timed(ttft_ms, 0, output.num_cached_tokens, told)
            report = engine.require_reuse(timed, arm.options["policy"], len(prompt) // 2)
            reused = report["reused_tokens"] / sum(map(len, example.documents))
            work = report["computed_share"]
        elif output.num_cached_tokens:
            raise harness.BenchError(
                f"a full prefill found {output.num_cached_tokens} tokens in the prefix cache"
            )
        [answer] = output.outputs
        first = {token: entry.logprob for token, entry in answer.logprobs[0].items()}
        score = example.score(language.decode(answer.token_ids))
        return Outcome(score, first, work, ttft_ms, reused)

    def _generate(
        self,
        prompt: list[int],
        words: int,
        extra_args: Mapping[str, Any] | None,
        logprobs: int | None = None,
    ) -> tuple[Any, float]:
        return generate(self.llm, prompt, words, extra_args, logprobs)


def generate(
    llm: Any,
    prompt: list[int],
    words: int,
    extra_args: Mapping[str, Any] | None,
    logprobs: int | None = None,
) -> tuple[Any, float]:
    """The output of one request of `words` words, and the milliseconds until its first token."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=words,
        temperature=0.0,
        logprobs=logprobs,
        extra_args=dict(extra_args) if extra_args else None,
        ignore_eos=True,
    )
    return engine.generate(llm, prompt, sampling)
