# SPDX-License-Identifier: Apache-2.0
"""Prompts asked of a real server over HTTP: when the first token came, and what was reported."""

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

from bench.agents.tokens import Tokens
from bench.harness import BenchError
from bench.server import Server, with_tokens

_START_S = 900
_FLAGS = (
    *("--enforce-eager", "--enable-prompt-tokens-details"),
    *("--no-enable-log-requests", "--disable-uvicorn-access-log"),
)


@contextmanager
def serving(
    model: Path, options: Mapping[str, Any], flags: Sequence[str], env: Mapping[str, str]
) -> Iterator[Server]:
    """A server whose caches can be emptied.

    Args:
        model: its folder.
        options: of segment reuse.
        flags: further ones of the server.
        env: of the server, beside what it needs for that.

    Raises:
        ServerError: it does not start.
    """
    with TemporaryDirectory() as folder:
        config = Path(folder, "segreuse.yaml")
        config.write_text(json.dumps(dict(options)))  # JSON is YAML
        every = [*_FLAGS, *flags, "--segreuse-config", str(config)]
        own = {"VLLM_SERVER_DEV_MODE": "1", **env}
        with Server(model, every, own, start_timeout_s=_START_S) as server:
            yield server


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


class Completions:
    """Asks one server.

    Args:
        server: a `Server`.
        max_model_len: tokens of its longest prompt and answer.

    Attributes:
        url: root of the server.
    """

    def __init__(self, server: Any, max_model_len: int) -> None:
        self._server = server
        self.url = str(server.url)
        self._max_model_len = max_model_len
        self._client = server.client(timeout=600)
        self._model = self._client.models.list().data[0].id

    def reset(self) -> None:
        """Nothing is cached afterwards."""
        httpx.post(f"{self._server.url}/reset_prefix_cache", timeout=30).raise_for_status()

    def likeliest(
        self, prompt: Sequence[int], body: Mapping[str, Any], most: int
    ) -> dict[str, float]:
        """Logarithms of the probabilities of the likeliest next tokens, by `token_id:` and its id.

        Args:
            prompt: token ids.
            body: what is added to the request.
            most: tokens; the server has to allow for as many (`--max-logprobs`).
        """
        found = self._client.completions.create(
            model=self._model,
            prompt="",
            max_tokens=1,
            temperature=0.0,
            logprobs=most,
            extra_body=with_tokens(prompt, {**body, "return_tokens_as_token_ids": True}),
        )
        (choice,) = found.choices
        return dict(choice.logprobs.top_logprobs[0])

    def ask(
        self,
        prompt: Sequence[int],
        body: Mapping[str, Any],
        most: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Answered:
        """One prompt.

        Args:
            prompt: token ids.
            body: what is added to the request.
            most: tokens of the answer.
            stop: texts that end it; vLLM answers without a report then.
            temperature, seed: of the request.

        Raises:
            BenchError: the prompt is too long, or the connector does not answer.
        """
        if len(prompt) + most > self._max_model_len:
            raise BenchError(
                f"a prompt of {len(prompt)} tokens is too long for {self._max_model_len}"
            )
        began = time.perf_counter()
        stream = self._client.completions.create(
            model=self._model,
            prompt="",
            max_tokens=most,
            temperature=temperature,
            seed=seed,
            stop=list(stop),
            stream=True,
            stream_options={"include_usage": True},
            extra_body=with_tokens(prompt, body),
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
