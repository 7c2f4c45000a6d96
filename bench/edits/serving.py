# SPDX-License-Identifier: Apache-2.0
"""Conversations asked of a real server over HTTP, under one arm after the other.

Every arm gets the same prompts, and computes all that it finds: caches are emptied before it. The
prompts of the tool loop come first, as an agent sends them. Then come the edit with a question, and
the later turns behind it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from bench.agents.arms import Arm
from bench.agents.tokens import Tokens
from bench.edits.conversations import LATER_TURNS, Conversation
from bench.edits.edits import Edit
from bench.edits.writing import Writer
from bench.harness import BenchError
from bench.server import Server

MAX_MODEL_LEN = 16384
ANSWER_TOKENS = 8
"""Of every question: a price has three digits."""
_FLAGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", "32", "--max-num-seqs", "2"),
    *("--enforce-eager", "--enable-prompt-tokens-details", "--dtype", "bfloat16"),
    *("--no-enable-log-requests", "--disable-uvicorn-access-log"),
)
_START_S = 900


@dataclass(frozen=True)
class Asked:
    """One question.

    Attributes:
        edit, conversation, arm: which.
        turn: 0 at the edit, then those behind it.
        ttft_s: seconds to the first token.
        right: whether the answer contains the right one.
        said: the answer.
        tokens: of the prompt.
    """

    edit: str
    conversation: int
    arm: str
    turn: int
    ttft_s: float
    right: bool
    said: str
    tokens: Tokens


@contextmanager
def asking(model: Path, options: Mapping[str, Any], writer: Writer) -> Iterator[Client]:
    """A server with these options of segment reuse, and a client of it.

    Raises:
        ServerError: it does not start.
    """
    with TemporaryDirectory() as folder:
        config = Path(folder, "segreuse.yaml")
        config.write_text(json.dumps(dict(options)))  # JSON is YAML
        flags = [*_FLAGS, "--segreuse-config", str(config)]
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        with Server(model, flags, env, start_timeout_s=_START_S) as server:
            yield Client(server, writer)


class Client:
    """Asks one server."""

    def __init__(self, server: Any, writer: Writer) -> None:
        self._server = server
        self._client = server.client(timeout=600)
        self._model = self._client.models.list().data[0].id
        self._writer = writer

    def conversation(self, before: Conversation, edit: Edit, arm: Arm) -> list[Asked]:
        """A conversation under an arm: its loop, the edit, and the later turns.

        Raises:
            BenchError: the connector does not answer.
        """
        httpx.post(f"{self._server.url}/reset_prefix_cache", timeout=30).raise_for_status()
        space = f"{edit.name} {before.number} {arm.name}"
        if arm.prefix:
            for number, prompt in enumerate(self._writer.history(before, edit.keeps_thoughts)):
                self._ask(prompt, arm.body(space, f"step {number}"), 1)
            if edit.retries:
                self._turn(before, edit, 0, arm.body(space, "retried"))
        after = edit.change(before, Random(f"{edit.name} {before.number}"))
        asked = []
        for turn in range(LATER_TURNS + 1):
            ttft_s, said, tokens = self._turn(after, edit, turn, arm.body(space, turn))
            right = after.questions[turn].right in said
            asked.append(
                Asked(edit.name, before.number, arm.name, turn, ttft_s, right, said, tokens)
            )
        return asked

    def _turn(
        self, conversation: Conversation, edit: Edit, turn: int, added: Mapping[str, Any]
    ) -> tuple[float, str, Tokens]:
        messages = conversation.asked(turn)
        prompt = self._writer.prompt(conversation, messages, edit.keeps_thoughts)
        return self._ask(prompt, added, ANSWER_TOKENS)

    def _ask(
        self, prompt: Sequence[int], added: Mapping[str, Any], most: int
    ) -> tuple[float, str, Tokens]:
        began = time.perf_counter()
        stream = self._client.completions.create(
            model=self._model,
            prompt=list(prompt),
            max_tokens=most,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=dict(added),
        )
        ttft_s, said, cached, report = None, "", 0, None
        for chunk in stream:
            ttft_s = ttft_s or time.perf_counter() - began
            said += "".join(choice.text for choice in chunk.choices)
            if chunk.usage and (details := chunk.usage.prompt_tokens_details):
                cached = details.cached_tokens or 0
            params = (chunk.model_extra or {}).get("kv_transfer_params") or {}
            report = params.get("segreuse", report)
        if ttft_s is None or (report is None) != ("extra_keys" not in added):
            raise BenchError(f"a request with {sorted(added)} was reported as {report}")
        return ttft_s, said, Tokens.of(len(prompt), cached, report)
