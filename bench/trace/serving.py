# SPDX-License-Identifier: Apache-2.0
"""The same prompts asked of one server after the other, by turns.

Each arm is a server with a KV cache of its own, since what one has computed must not evict what
another has. While an arm has its turn, the processes of the others are halted. Two passes, each
from empty caches: `timed` sends requests when the trace does, in quicker time; `closed` sends the
next one when one of a few has been answered, which shows the throughput.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import harness
from bench.agents.completions import Answered, Completions
from bench.agents.tokens import Tokens
from bench.engine import BLOCK_TOKENS
from bench.server import SEGREUSE_COMMAND, VLLM_COMMAND, Server
from bench.trace.slices import TracePrompt, at_a_time

PREFIX = "prefix"
TIMED, CLOSED = "timed", "closed"
CONCURRENCY = 4
"""Requests at a time in the closed pass."""
MOST_WAIT_S = 5.0
"""Longest pause between two requests of the timed pass: nights are cut."""
_MOST_IN_FLIGHT = 64
_WAKING = TracePrompt([7] * (BLOCK_TOKENS // 2), (), 1, 0.0)
"""Wakes a server that was halted. Too short for a block: nothing of it is cached."""
_WARMING = 4
_NAMESPACE = ["bench-trace"]
_START_S = 900
_FLAGS = (
    *("--enforce-eager", "--enable-prompt-tokens-details", "--dtype", "bfloat16"),
    *("--no-enable-log-requests", "--disable-uvicorn-access-log"),
    *("--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "8"),
)


@dataclass(frozen=True)
class Load:
    """How prompts are sent.

    Attributes:
        blocks: of the KV cache of each server.
        turn: prompts of an arm, until it is another's turn.
        quicker: how many times as quickly as in the trace.
    """

    blocks: int
    turn: int
    quicker: float


@dataclass(frozen=True)
class Turn:
    """Prompts that an arm got in one go.

    Attributes:
        passed: which pass.
        number: of the turn; all arms have the same prompts in it.
        arm: its name.
        seconds: from the first prompt that was sent to the last answer.
        ttft_s: seconds to the first token, of each.
        tokens: of all prompts.
    """

    passed: str
    number: int
    arm: str
    seconds: float
    ttft_s: tuple[float, ...]
    tokens: Tokens


def replayed(
    model: Path, policies: Sequence[str], prompts: list[TracePrompt], load: Load
) -> Iterator[Turn]:
    """Every turn of every arm: prefix caching alone, and the plugin with each policy.

    Raises:
        ServerError: a server does not start.
        BenchError: a server does not report what it should.
    """
    longest = max(len(prompt.tokens) + prompt.answer_tokens for prompt in prompts)
    with ExitStack() as stack:
        servers = {
            arm: stack.enter_context(_serving(model, arm, load.blocks, longest))
            for arm in (PREFIX, *policies)
        }
        clients = {arm: Completions(server, longest) for arm, server in servers.items()}
        for arm, client in clients.items():
            with _only(servers, arm):
                _warm_up(client, arm, prompts)
        for passed in (TIMED, CLOSED):
            for client in clients.values():
                client.reset()
            turns = at_a_time(prompts, load.turn)
            for number, some in enumerate(harness.progress(turns, f"trace, {passed}")):
                for arm in harness.rotated([*servers], number):
                    with _only(servers, arm):
                        ask = partial(_ask, clients[arm], arm)
                        seconds, found = _taken(passed, ask, some, load.quicker)
                    ttft_s = tuple(it.ttft_s for it in found)
                    tokens = sum((it.tokens for it in found), Tokens())
                    yield Turn(passed, number, arm, seconds, ttft_s, tokens)


@contextmanager
def _serving(model: Path, arm: str, blocks: int, longest: int) -> Iterator[Server]:
    flags = [*_FLAGS, "--max-model-len", str(longest)]
    # One block is vLLM's own.
    flags += ["--num-gpu-blocks-override", str(blocks + 1)]
    env = {"VLLM_SERVER_DEV_MODE": "1"}  # caches can be emptied
    if arm == PREFIX:
        # A name that no plugin has: `Server` takes an empty value for one to be unset.
        env["VLLM_PLUGINS"] = "none"
        with Server(model, flags, env, command=VLLM_COMMAND, start_timeout_s=_START_S) as server:
            yield server
        return
    with TemporaryDirectory() as folder:
        config = Path(folder, "segreuse.yaml")
        config.write_text(f"policy: {arm}\n")
        flags += ["--segreuse-config", str(config)]
        with Server(
            model, flags, env, command=SEGREUSE_COMMAND, start_timeout_s=_START_S
        ) as server:
            yield server


@contextmanager
def _only(servers: Mapping[str, Server], arm: str) -> Iterator[None]:
    with ExitStack() as stack:
        for other in servers.keys() - {arm}:
            stack.enter_context(servers[other].halted())
        yield


def _ask(client: Completions, arm: str, prompt: TracePrompt) -> Answered:
    body = {"ignore_eos": True} | ({} if arm == PREFIX else {"extra_keys": _NAMESPACE})
    return client.ask(prompt.tokens, body, prompt.answer_tokens)


def _warm_up(client: Completions, arm: str, prompts: Sequence[TracePrompt]) -> None:
    """The first requests are slow: code is compiled, and the first plans are made."""
    for prompt in prompts[-_WARMING:]:
        _ask(client, arm, prompt)
        _ask(client, arm, replace(prompt, tokens=prompt.tokens[BLOCK_TOKENS // 2 :]))


def _taken(
    passed: str,
    ask: Callable[[TracePrompt], Answered],
    prompts: Sequence[TracePrompt],
    quicker: float,
) -> tuple[float, list[Answered]]:
    """Seconds for all prompts, and the answers."""
    ask(_WAKING)
    sending = sent_at([prompt.time_s / quicker for prompt in prompts])
    began = time.perf_counter()

    def one(number: int) -> Answered:
        if passed == TIMED:
            time.sleep(max(0.0, began + sending[number] - time.perf_counter()))
        return ask(prompts[number])

    most = _MOST_IN_FLIGHT if passed == TIMED else CONCURRENCY
    with ThreadPoolExecutor(most) as pool:
        found = list(pool.map(one, range(len(prompts))))
    return time.perf_counter() - began, found


def sent_at(times_s: Sequence[float]) -> list[float]:
    """The same times, with pauses of `MOST_WAIT_S` at most."""
    sent: list[float] = []
    for number, time_s in enumerate(times_s):
        pause = time_s - times_s[number - 1] if number else 0.0
        sent.append((sent[-1] if sent else 0.0) + min(max(0.0, pause), MOST_WAIT_S))
    return sent
