# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs requests that do not use it.

Two engines, each in a process of its own on the same cores: vLLM alone (no plugin is even loaded),
and vLLM with segment reuse enabled. Both get the same batches of requests without extra keys,
taking turns: one works while the other sleeps. `throughput_ratio` is the median over all batches of
(time of vLLM alone) / (time with the plugin): 1.0 means that it costs nothing.
"""

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from bench import engine, harness, shapes

SHAPE = "bench8"
ENGINES = ("plain", "segreuse")

_KV_SPACE_GIB = 1
_ANSWER_S = 300


class Load(NamedTuple):
    """How much is asked: some batches, each of requests that run together."""

    batches: int
    requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def batch_tokens(self) -> int:
        """Tokens that one batch computes."""
        return self.requests * (self.prompt_tokens + self.output_tokens)


FULL = Load(batches=40, requests=8, prompt_tokens=256, output_tokens=32)
QUICK = Load(batches=16, requests=4, prompt_tokens=128, output_tokens=16)


def run(quick: bool) -> harness.SuiteResult:
    """Compare the two engines (`quick`: less load, and without torch.compile)."""
    load = QUICK if quick else FULL
    engine.prepare_environment(_KV_SPACE_GIB)
    # Imported before the children are forked: it takes longer than the rest of their start.
    from vllm import LLM  # noqa: F401

    draw = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
    with (
        _child("plain", load, eager=quick) as plain,
        _child("segreuse", load, eager=quick) as segreuse,
    ):
        children = {"plain": plain, "segreuse": segreuse}
        for child in children.values():
            _receive(child)  # it is up
        for turn in harness.progress(range(load.batches + 1), "overhead"):
            batch = _batch(load, draw)
            taken = {n: _ask(children[n], batch) for n in harness.rotated(ENGINES, turn)}
            if turn > 0:  # the first batch warms up
                for name, value in taken.items():
                    seconds[name].append(value)
    return _result(load, seconds, eager=quick)


def _result(load: Load, seconds: dict[str, list[float]], eager: bool) -> harness.SuiteResult:
    rows: list[harness.Row] = [
        {
            "shape": SHAPE,
            "engine": name,
            "execution": "eager" if eager else "compiled",
            "requests_per_batch": load.requests,
            "prompt_tokens": load.prompt_tokens,
            "output_tokens": load.output_tokens,
            "batches": len(values),
            "median_batch_ms": harness.median(values) * 1e3,
            "min_batch_ms": min(values) * 1e3,
            "tokens_per_s": load.batch_tokens / harness.median(values),
        }
        for name, values in seconds.items()
    ]
    pairs = zip(seconds["plain"], seconds["segreuse"], strict=True)
    summary = {
        "throughput_ratio": harness.median([alone / plugin for alone, plugin in pairs]),
        "plain_tokens_per_s": float(rows[0]["tokens_per_s"]),
        "segreuse_tokens_per_s": float(rows[1]["tokens_per_s"]),
    }
    return {"rows": rows, "summary": summary}


def _batch(load: Load, draw: random.Random) -> list[list[int]]:
    """Prompts that no prefix cache knows."""
    text_tokens = range(300, shapes.VOCAB_SIZE)
    return [draw.choices(text_tokens, k=load.prompt_tokens) for _ in range(load.requests)]


@contextmanager
def _child(name: str, load: Load, eager: bool) -> Iterator[Connection]:
    """An engine process and the pipe to it; ended with the block."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, name, load, eager), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        # Not left to the end of the pipe: the other child has inherited this end too.
        with suppress(BrokenPipeError):
            ours.send(None)
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _ask(child: Connection, batch: list[list[int]]) -> float:
    child.send(batch)
    return _receive(child)


def _receive(child: Connection) -> float:
    """The child's answer in seconds; its failure is ours."""
    if not child.poll(_ANSWER_S):
        raise harness.BenchError(f"an engine gave no answer within {_ANSWER_S} s")
    try:
        answer = child.recv()
    except EOFError:
        raise harness.BenchError("an engine process ended; see its messages above") from None
    if isinstance(answer, str):
        raise harness.BenchError(answer)
    return float(answer)


def _serve(pipe: Connection, name: str, load: Load, eager: bool) -> None:
    """Child process: build one engine, then time every batch that arrives."""
    if name == "plain":
        os.environ["VLLM_PLUGINS"] = ""  # an empty list: not even the entry point is loaded
    try:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True)
        with engine.engine(
            shapes.make_model(SHAPE),
            segreuse=name == "segreuse",
            max_model_len=4096,
            enforce_eager=eager,
        ) as llm:
            pipe.send(0.0)
            while (batch := pipe.recv()) is not None:
                prompts = [{"prompt_token_ids": ids} for ids in batch]
                started = time.perf_counter()
                llm.generate(prompts, sampling, use_tqdm=False)
                pipe.send(time.perf_counter() - started)
    except Exception as error:
        pipe.send(f"engine {name}: {type(error).__name__}: {error}")
