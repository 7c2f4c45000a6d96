# SPDX-License-Identifier: Apache-2.0
"""Traces asked of a real server over HTTP, under one arm after the other.

Steps are asked behind the right history, so that every arm gets the very same prompts; or freely:
the model's own text is the history, and the tools that it names are called. All caches are emptied
before each trace: what an arm finds, it has computed itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from bench.agents import scoring
from bench.agents.arms import Arm
from bench.agents.tokens import Tokens
from bench.agents.traces import Trace, Writer
from bench.harness import BenchError
from bench.server import Server
from examples.agents import react
from examples.agents.tools import Tools

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 2560
KV_BLOCKS = 82
"""Of the server: a little more than one long history. Those of three users do not fit."""
SPARE_TOKENS = 6
"""A step may say so many tokens more than what is right."""
FREE_TOKENS = 64
FREE_STEPS = 10
_FLAGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK_TOKENS)),
    *("--num-gpu-blocks-override", str(KV_BLOCKS), "--max-num-seqs", "4"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
    *("--no-enable-log-requests", "--disable-uvicorn-access-log"),
)
_START_S = 900


@dataclass(frozen=True)
class Answered:
    """One request.

    Attributes:
        said: text of the answer.
        ttft_s, total_s: seconds to the first token, and to the end.
        tokens: of the prompt; not known where there is no report.
    """

    said: str
    ttft_s: float
    total_s: float
    tokens: Tokens


@dataclass(frozen=True)
class Taken:
    """A step under an arm: what was asked, what came of it, and 1.0 if it was right."""

    kind: str
    trace: int
    conversation: int
    step: int
    arm: str
    answered: Answered
    score: float


@dataclass(frozen=True)
class Free:
    """A conversation that the model led itself.

    Attributes:
        kind, trace, conversation, arm: which.
        calls, good_calls: of tools, and those without an error. Text without a call and without
            an answer counts as a call.
        success: whether the answer was right.
        total_s: of all requests.
    """

    kind: str
    trace: int
    conversation: int
    arm: str
    calls: int
    good_calls: int
    success: float
    total_s: float


@contextmanager
def asking(model: Path, options: Mapping[str, Any], dtype: str, writer: Writer) -> Iterator[Client]:
    """A server with these options, and a client of it.

    Args:
        model: its folder.
        options: of segment reuse.
        dtype: in which the model computes, vLLM's option.
        writer: of the prompts.

    Raises:
        ServerError: it does not start.
    """
    with TemporaryDirectory() as folder:
        config = Path(folder, "segreuse.yaml")
        config.write_text(json.dumps(dict(options)))  # JSON is YAML
        flags = [*_FLAGS, "--dtype", dtype, "--segreuse-config", str(config)]
        env = {"VLLM_SERVER_DEV_MODE": "1"}
        with Server(model, flags, env, start_timeout_s=_START_S) as server:
            yield Client(server, writer)


class Client:
    """Asks one server."""

    def __init__(self, server: Any, writer: Writer) -> None:
        self._server = server
        self._client = server.client(timeout=600)
        self._model = self._client.models.list().data[0].id
        self._writer = writer

    def reset(self) -> None:
        """Nothing is cached afterwards."""
        httpx.post(f"{self._server.url}/reset_prefix_cache", timeout=30).raise_for_status()

    def trace(
        self, trace: Trace, arm: Arm, temperature: float = 0.0, seed: int | None = None
    ) -> list[Taken]:
        """Every step of a trace, behind the right history.

        Raises:
            BenchError: a prompt is too long, or the connector does not answer.
        """
        self.reset()
        space = f"{trace.kind} {trace.number} {arm.name} {temperature} {seed}"
        taken = []
        for number, request in enumerate(trace.requests):
            label = trace.label(request)
            answered = self._ask(
                self._writer.request(trace, request),
                arm.body(space, number),
                # Not until a stop string: vLLM answers without a report then.
                most=self._writer.measure(label.label) + SPARE_TOKENS,
                temperature=temperature,
                seed=seed,
            )
            score = scoring.step(answered.said, label)
            at = (trace.kind, trace.number, request.conversation, request.step, arm.name)
            taken.append(Taken(*at, answered, score))
        return taken

    def free(self, trace: Trace, conversation: int, arm: Arm) -> Free:
        """A conversation as the model leads it."""
        self.reset()
        told = trace.conversations[conversation]
        at = (trace.kind, trace.number, conversation, arm.name)
        tools = Tools(trace.shop.articles, f"free {trace.kind} {trace.number} {conversation}")
        space, history, calls, good, seconds = f"free {at}", "Thought:", 0, 0, 0.0
        for step in range(FREE_STEPS):
            prompt = self._writer.prompt(told, history)
            if len(prompt) + FREE_TOKENS > MAX_MODEL_LEN:
                break
            answered = self._ask(prompt, arm.body(space, step), FREE_TOKENS, stop=react.STOP)
            seconds += answered.total_s
            answer = react.answer(answered.said)
            if answer is not None:
                right = scoring.answer(answer, told.episode.answer)
                return Free(*at, calls, good, right, seconds)
            calls += 1
            action = react.action(answered.said)
            if action is None:
                break
            observation = tools.call(*action)
            good += "error" not in json.loads(observation)
            history += f"{react.turn(answered.said)}\nObservation: {observation}\nThought:"
        return Free(*at, calls, good, 0.0, seconds)

    def _ask(
        self,
        prompt: Sequence[int],
        body: Mapping[str, Any],
        most: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Answered:
        if len(prompt) + most > MAX_MODEL_LEN:
            raise BenchError(f"a prompt of {len(prompt)} tokens is too long for {MAX_MODEL_LEN}")
        began = time.perf_counter()
        stream = self._client.completions.create(
            model=self._model,
            prompt=list(prompt),
            max_tokens=most,
            temperature=temperature,
            seed=seed,
            stop=list(stop),
            stream=True,
            stream_options={"include_usage": True},
            extra_body=dict(body),
        )
        ttft_s, said, cached, report = None, "", 0, None
        for chunk in stream:
            ttft_s = ttft_s or time.perf_counter() - began
            said += "".join(choice.text for choice in chunk.choices)
            if chunk.usage and (details := chunk.usage.prompt_tokens_details):
                cached = details.cached_tokens or 0
            params = (chunk.model_extra or {}).get("kv_transfer_params") or {}
            report = params.get("segreuse", report)
        total_s = time.perf_counter() - began
        if ttft_s is None or (not stop and (report is None) != ("extra_keys" not in body)):
            raise BenchError(f"a request with {sorted(body)} was reported as {report}")
        return Answered(said, ttft_s, total_s, Tokens.of(len(prompt), cached, report))
