# SPDX-License-Identifier: Apache-2.0
"""Examples asked of the real engine: in full, and with documents that were computed elsewhere.

Only exact KV donates (`EXACT_DONORS`): what one arm leaves behind must not help the next.
Everything else is as the plugin ships it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

from bench import engine, harness
from bench.english import grading
from bench.english.arms import Arm
from bench.english.donors import KNOWLEDGE, PROMPTS
from bench.english.prompts import Prompts
from bench.english.records import Outcome, rounded
from bench.english.tasks.base import Example

KV_SPACE_GIB = 4
MAX_TOKENS = 10_240
FORCED_TOKENS = 32
"""Tokens of the full answer along which distributions are compared."""
TOGETHER = 4
"""Requests that decode at the same time, so that few prompts take KV at once."""
WARM_UP = "These words are not measured. " * 64
EXACT_DONORS: Mapping[str, Any] = MappingProxyType({"max_provenance_depth": 0})
COMPUTED_IN_FULL = {"segreuse_min_reused_tokens": 2**31 - 1}
"""Options of donors, which reuse nothing themselves."""


class Answered(NamedTuple):
    """One request: its answer, the logits of every step, and what the engine says about it."""

    tokens: tuple[int, ...]
    logits: Any
    ttft_ms: float
    cached_tokens: int
    report: Mapping[str, Any] | None


class Question(NamedTuple):
    """What one request is.

    Attributes:
        prompt: token ids.
        most: tokens of the answer, unless they are forced.
        extra_args: of the request; None: it reuses nothing.
        forced: what it is made to say.
        salt: vLLM's `cache_salt`.
    """

    prompt: list[int]
    most: int
    extra_args: Mapping[str, Any] | None
    forced: Sequence[int] = ()
    salt: str | None = None


class Full(NamedTuple):
    """The answer of full prefill, with what others are compared by."""

    outcome: Outcome
    tokens: tuple[int, ...]
    logits: Any


@contextmanager
def english_engine(
    model: Path,
    kv_space_gib: int = KV_SPACE_GIB,
    kv_cache_dtype: str = "auto",
    segreuse: Mapping[str, Any] = EXACT_DONORS,
    dtype: str = "auto",
) -> Iterator[Lab]:
    """A model, served with segment reuse in this process.

    Args:
        model: its folder.
        kv_space_gib: memory for KV.
        kv_cache_dtype, dtype: vLLM's options.
        segreuse: options of the server.

    Raises:
        BenchError: the model cannot be loaded, or start-up refuses it.
    """
    engine.prepare_environment(kv_space_gib)
    from bench.english.recorder import Recorder

    with engine.engine(
        model,
        segreuse=segreuse,
        max_model_len=context_tokens(model),
        max_num_batched_tokens=MAX_TOKENS,
        enforce_eager=True,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        logits_processors=[Recorder],
    ) as llm:
        lab = Lab(llm)
        lab.warm_up()
        yield lab


def context_tokens(model: Path) -> int:
    """Longest prompt that a model is asked, at most `MAX_TOKENS`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    return min(MAX_TOKENS, getattr(config, "max_position_embeddings", MAX_TOKENS))


class Lab:
    """Asks examples, each in a namespace of its own."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.prompts = Prompts(llm.get_tokenizer())
        self._spaces = self._rounds = 0

    def warm_up(self) -> None:
        """One prefill that counts for nothing: the first one of an engine is slow."""
        self._generate(self.prompts.encode(WARM_UP), 2, None)

    def full(self, example: Example) -> Full:
        """The example's answer by full prefill.

        Raises:
            BenchError: something was found in the prefix cache.
        """
        self._spaces += 1
        # A salt of its own: nobody finds its blocks.
        found = self._ask(example, None, salt=f"full {self._spaces}")
        if found.cached_tokens:
            raise harness.BenchError(
                f"a full prefill found {found.cached_tokens} tokens in the prefix cache"
            )
        kept = min(len(found.tokens), FORCED_TOKENS)
        outcome = Outcome(
            score=self._score(example, found.tokens),
            said=self.prompts.answer(found.tokens),
            ttft_ms=rounded(found.ttft_ms),
            tokens=kept,
        )
        return Full(outcome, found.tokens, found.logits[:kept])

    def reuse(
        self, example: Example, full: Full, donors: str, arms: Sequence[Arm], rng: Random
    ) -> dict[str, Outcome]:
        """Compute the documents elsewhere, then ask under every arm.

        Args:
            example: what is asked.
            full: its answer by full prefill.
            donors: one of `donors.DONORS`.
            arms: ways to reuse.
            rng: source of what the donors leave to chance.

        Raises:
            BenchError: the connector does not run, or the prefix cache could not be reset.
        """
        self._spaces += 1
        self._rounds += 1
        with self._donated(example, donors, rng) as space:
            asked = {
                arm.name: {**space, **arm.extra_args} for arm in harness.rotated(arms, self._rounds)
            }
            outcomes = self._outcomes(example, full, asked)
        if not self.llm.reset_prefix_cache():
            raise harness.BenchError("the prefix cache could not be reset: a request still runs")
        return {arm.name: outcomes[arm.name] for arm in arms}

    @contextmanager
    def _donated(self, example: Example, donors: str, rng: Random) -> Iterator[Mapping[str, Any]]:
        """The namespace in which the documents are known."""
        name = f"english-{self._spaces}"
        space = {"extra_keys": [name]}
        if donors == KNOWLEDGE:
            from vllm_segreuse.serve.offline import KnowledgeBase

            base = KnowledgeBase(self.llm, name)
            written = [*example.others, *example.documents]
            base.add(
                {
                    f"document-{i}": list(self.prompts.encode_document(document))
                    for i, document in enumerate(written)
                }
            )
            yield space
            base.delete()
            return
        for prompt in PROMPTS[donors](example, self.prompts, rng):
            self._generate(prompt, 1, {**space, **COMPUTED_IN_FULL})
        yield space

    def _outcomes(
        self, example: Example, full: Full, asked: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Outcome]:
        """Of arms, by their extra args: along the full answer first, then freely where one would
        say something else."""
        from bench.english.tape import favourites

        forced = self._ask_arms(example, asked, full.tokens)
        would_say = {name: favourites(answered.logits) for name, answered in forced.items()}
        said = list(full.tokens)
        differing = {name: args for name, args in asked.items() if would_say[name] != said}
        free = self._ask_arms(example, differing)
        return {
            name: self._outcome(example, full, answered, would_say[name], free.get(name))
            for name, answered in forced.items()
        }

    def _ask_arms(
        self, example: Example, asked: Mapping[str, Mapping[str, Any]], forced: Sequence[int] = ()
    ) -> dict[str, Answered]:
        prompt = self.prompts.prompt(example.documents, example.question)
        questions = [
            Question(prompt, example.answer_tokens, args, forced) for args in asked.values()
        ]
        return dict(zip(asked, self.ask_all(questions), strict=True))

    def _outcome(
        self,
        example: Example,
        full: Full,
        forced: Answered,
        would_say: Sequence[int],
        free: Answered | None,
    ) -> Outcome:
        from bench.english.tape import apart

        if forced.report is None:
            raise harness.BenchError(
                "a request with extra keys carries no segreuse report: the connector is not active"
            )
        found = apart(full.logits, full.tokens, forced.logits, would_say)
        tokens = full.tokens if free is None else free.tokens
        documents = sum(map(self.prompts.measure, example.documents))
        return Outcome(
            score=self._score(example, tokens),
            said=None if free is None else self.prompts.answer(tokens),
            ttft_ms=rounded(forced.ttft_ms),
            first_kl=rounded(found.first_kl),
            answer_kl=rounded(found.answer_kl),
            agreement=rounded(found.agreement),
            tokens=len(full.logits),
            work=rounded(forced.report["computed_share"]),
            reused=rounded(forced.report["reused_tokens"] / documents),
            policy=forced.report["policy"],
            drift=forced.report.get("drift"),
        )

    def _score(self, example: Example, tokens: Sequence[int]) -> float:
        return rounded(grading.score(self.prompts.answer(tokens), example.answers, example.wrong))

    def _ask(
        self,
        example: Example,
        extra_args: Mapping[str, Any] | None,
        forced: Sequence[int] = (),
        salt: str | None = None,
    ) -> Answered:
        prompt = self.prompts.prompt(example.documents, example.question)
        return self.ask(prompt, example.answer_tokens, extra_args, forced, salt)

    def ask(
        self,
        prompt: list[int],
        most: int,
        extra_args: Mapping[str, Any] | None,
        forced: Sequence[int] = (),
        salt: str | None = None,
    ) -> Answered:
        """One request, by itself; see `Question` and `ask_all`."""
        [answered] = self.ask_all([Question(prompt, most, extra_args, forced, salt)])
        return answered

    def ask_all(self, questions: Sequence[Question]) -> list[Answered]:
        """Requests, `TOGETHER` at a time; each ends where the model ends its answer, or with the
        forced tokens.

        Raises:
            BenchError: not every step was recorded.
        """
        from bench.english.tape import Tape

        tapes = [Tape(question.forced) for question in questions]
        requests = [
            engine.Request(
                question.prompt,
                _sampling(
                    len(question.forced) or question.most,
                    {**(question.extra_args or {}), **tape.extra_args},
                    ignore_eos=bool(question.forced),
                ),
                question.salt,
            )
            for question, tape in zip(questions, tapes, strict=True)
        ]
        found = [
            one
            for first in range(0, len(requests), TOGETHER)
            for one in engine.generate_all(self.llm, requests[first : first + TOGETHER])
        ]
        return [_answered(*one, tape.logits) for one, tape in zip(found, tapes, strict=True)]

    def _generate(self, prompt: list[int], most: int, extra_args: Mapping[str, Any] | None) -> None:
        engine.generate(self.llm, prompt, _sampling(most, extra_args))


def _sampling(most: int, extra_args: Mapping[str, Any] | None, ignore_eos: bool = False) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=most,
        temperature=0.0,
        extra_args=dict(extra_args) if extra_args else None,
        ignore_eos=ignore_eos,
    )


def _answered(output: Any, ttft_ms: float, logits: Sequence[Any]) -> Answered:
    tokens = tuple(output.outputs[0].token_ids)
    if len(logits) < len(tokens):
        raise harness.BenchError(
            f"an answer of {len(tokens)} tokens came of {len(logits)} recorded steps"
        )
    report = (output.kv_transfer_params or {}).get("segreuse")
    cached = output.num_cached_tokens or 0
    return Answered(tokens, logits[: len(tokens)], ttft_ms, cached, report)
