# SPDX-License-Identifier: Apache-2.0
"""What 1,000 waiting requests add to one scheduling step (a part of `lookup`).

Every request brings a document that is known at another offset, behind text of its own, and each
step has compute for one of them: the others wait. Both engines, with the plugin and without, get
the same requests; measured is vLLM's own `Scheduler.schedule`.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench import engine, harness, shapes

WAITING = 1000
STEP_TOKENS = 1024
DOCUMENT_TOKENS = 1024
_NAMESPACE = {"extra_keys": ["bench-waiting"]}
_KV_SPACE_GIB = 1


def run(quick: bool) -> tuple[list[harness.Row], dict[str, float]]:
    """Rows and summary (`schedule_ms_1000_waiting`), to be joined with the suite's others."""
    engine.prepare_environment(_KV_SPACE_GIB)
    steps = 8 if quick else 30
    rows: list[harness.Row] = []
    for segreuse in (False, True):
        times = _schedule_times(segreuse, steps)
        rows.append(
            {
                "case": f"schedule, {WAITING} waiting, {'with' if segreuse else 'without'} reuse",
                "ms": statistics.median(times),
                "max_ms": max(times),
                "steps": len(times),
            }
        )
    added = rows[1]["ms"] - rows[0]["ms"]
    return rows, {"schedule_ms_1000_waiting": added}


def _schedule_times(segreuse: bool, steps: int) -> list[float]:
    """Milliseconds of each of `steps` scheduling steps while at least 1,000 requests wait."""
    generator = random.Random(0)

    def fresh(count: int) -> list[int]:
        return generator.choices(range(300, shapes.VOCAB_SIZE), k=count)

    with engine.engine(
        shapes.make_model("qwen3"),
        segreuse=segreuse,
        max_model_len=4096,
        max_num_batched_tokens=STEP_TOKENS,
        enforce_eager=True,
    ) as llm:
        document = fresh(DOCUMENT_TOKENS)
        engine.first_token(llm, document, _NAMESPACE)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        times: list[float] = []
        scheduler.schedule = _timed(scheduler.schedule, times)
        names = _add(llm, [fresh(17) + document + fresh(30) for _ in range(WAITING + steps)])
        for _ in range(steps):
            llm.llm_engine.step()
        if len(scheduler.waiting) < WAITING:
            raise harness.BenchError(
                f"only {len(scheduler.waiting)} requests were waiting instead of {WAITING}: "
                "a step admitted more than one"
            )
        llm.llm_engine.abort_request(names)
        return times


def _add(llm: Any, prompts: list[list[int]]) -> list[str]:
    from vllm import SamplingParams

    names = [f"waiting-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        params = SamplingParams(max_tokens=1, extra_args=dict(_NAMESPACE))
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    return names


def _timed(schedule: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = schedule(*args, **kwargs)
        times.append(1e3 * (time.perf_counter() - began))
        return result

    return timed
