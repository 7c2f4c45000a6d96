# SPDX-License-Identifier: Apache-2.0
"""What the real engine answers under each setting, next to full prefill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from segreuse_tools.calibrate.search import CANDIDATES, Trial, agreement, divergence
from segreuse_tools.calibrate.segmented_prompts import SegmentedPrompt, contexts
from vllm_segreuse.options.values import MAX_TOKENS

LOGPROBS = 128
"""Most likely first tokens that are compared; all of them where the vocabulary is smaller."""
ANSWER_TOKENS = 8
"""Greedy tokens that are compared."""
IN_FULL = {"segreuse_min_reused_tokens": MAX_TOKENS}
"""Options of a request that reuses nothing, and donates all of its KV."""


class MeasuredAnswer(NamedTuple):
    """The beginning of an answer.

    Attributes:
        first: log-probabilities of the first token.
        tokens: at most `ANSWER_TOKENS`, greedy.
        report: of the request; empty without extra keys.
    """

    first: Mapping[int, float]
    tokens: Sequence[int]
    report: Mapping[str, Any]


def try_all(llm: Any, prompts: Sequence[SegmentedPrompt]) -> list[list[Trial]]:
    """Trials of each candidate, in the order of the prompts."""
    from tqdm import tqdm

    trials: list[list[Trial]] = [[] for _ in CANDIDATES]
    for index, prompt in enumerate(tqdm(prompts, desc="prompts", disable=None)):
        namespace = {"extra_keys": [f"calibration {index}"]}
        before = contexts(prompts, index, llm.llm_engine.model_config.max_model_len)
        reusing = [*_under_each(llm, prompt, before, namespace)]
        # In full last: its blocks are exact, and vLLM's own prefix cache would find them.
        full = answer(llm, prompt.token_ids, None)
        for made, other in zip(trials, reusing, strict=True):
            made.append(trial(full, other))
    return trials


def _under_each(
    llm: Any, prompt: SegmentedPrompt, before: Sequence[list[int]], namespace: Mapping[str, Any]
) -> Iterator[MeasuredAnswer]:
    """Answers under each candidate, with nothing cached but the contexts."""
    is_prepared = False
    for options in CANDIDATES:
        if not is_prepared:
            llm.reset_prefix_cache()
            for context in before:
                answer(llm, context, {**namespace, **IN_FULL}, max_tokens=1)
        mine = {f"segreuse_{key}": value for key, value in options.items()}
        given = answer(llm, prompt.token_ids, {**namespace, **mine})
        # Without reuse it was computed in full: the next one would find all of it as its prefix.
        is_prepared = given.report.get("bypass_reason") is None
        yield given


def trial(full: MeasuredAnswer, other: MeasuredAnswer) -> Trial:
    """An answer beside that of full prefill."""
    return Trial(
        divergence=divergence(full.first, other.first),
        agreement=agreement(full.tokens, other.tokens),
        work=other.report.get("computed_share", 1.0),
        drift=other.report.get("drift"),
    )


def answer(
    llm: Any,
    prompt: list[int],
    extra_args: Mapping[str, Any] | None,
    max_tokens: int = ANSWER_TOKENS,
    salt: str | None = None,
) -> MeasuredAnswer:
    """One request, alone.

    Args:
        llm: `vllm.LLM`.
        prompt: token ids.
        extra_args: extra keys and our options; None: it reuses nothing.
        max_tokens: of the answer.
        salt: vLLM's `cache_salt`.
    """
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        logprobs=min(LOGPROBS, vocabulary),
        extra_args=dict(extra_args) if extra_args else None,
    )
    asked = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
    [output] = llm.generate([asked], sampling, use_tqdm=False)
    [said] = output.outputs
    return MeasuredAnswer(
        first={token: entry.logprob for token, entry in said.logprobs[0].items()},
        tokens=said.token_ids,
        report=(output.kv_transfer_params or {}).get("segreuse", {}),
    )
