# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a hybrid with linear attention whose prompts are known to 98 %.

A random model of Qwen3-Next's kind: 24 layers of the gated delta rule, 8 of attention. Eight
documents of 512 tokens were read in one prompt, and their maps were noted in a second one. Each
measured prompt is new to the prefix cache: 16 fresh tokens, the documents in another order, a
question of 64 tokens.

Three engines have a process each, and take turns on all cores, in an order that changes every
round; the others sleep meanwhile. All of them are eager, since nothing else is served with composed
states.

- `none`: vLLM without a prefix cache.
- `prefix`: vLLM with its prefix cache, which finds nothing of these prompts.
- `shift` and `focus`, of the engine that reuses: KV is moved and states are composed; `focus` then
  reads the two documents again that the question attends to most.

A speed-up is the median of the rounds' own ratios against `prefix`, or against `none`
(`_over_none`), over all starts of the engines; its interval of 95 % is by bootstrap, of rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from bench import engine, harness, shapes

SHAPE = "bench32_states"
DOCUMENTS = 8
DOCUMENT_TOKENS = 512
"""Two blocks: a whole one is in it, wherever it stands, and only whole blocks donate."""
PREAMBLE_TOKENS = 16
QUESTION_TOKENS = 64
KNOWN_TOKENS = DOCUMENTS * DOCUMENT_TOKENS
PROMPT_TOKENS = PREAMBLE_TOKENS + KNOWN_TOKENS + QUESTION_TOKENS
TAIL_TOKENS = 300
"""Behind the last document where it is read, so that its last block is whole."""

_NAMESPACE = ["bench-states"]
_FIRST_TEXT_TOKEN = 300  # below are special tokens and single bytes
_KV_SPACE_GIB = 1
_ARGUMENTS: dict[str, Any] = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 8,
    "dtype": "bfloat16",
    "enforce_eager": True,
}


class Arm(NamedTuple):
    """One way to the first token: which engine is asked, and by which policy if it reuses."""

    name: str
    engine: str
    policy: str | None = None

    @property
    def options(self) -> dict[str, Any] | None:
        """What the request carries."""
        if self.policy is None:
            return None
        return {"extra_keys": _NAMESPACE, "segreuse_policy": self.policy}


ARMS = (
    Arm("none", "none"),
    Arm("prefix", "prefix"),
    Arm("shift", "reusing", "shift"),
    Arm("focus", "reusing", "focus"),
)
ENGINES: dict[str, dict[str, Any]] = {
    "none": {"enable_prefix_caching": False},
    "prefix": {},
    "reusing": {"segreuse": True},
}


class Load(NamedTuple):
    """How often: engines are started, and rounds that count, of each start."""

    starts: int
    rounds: int


FULL = Load(starts=2, rounds=3)
QUICK = Load(starts=1, rounds=2)


class Facts(NamedTuple):
    """What an engine that reuses says of its memory.

    Attributes:
        map_bytes: of what one document changes of the states.
        token_bytes: KV of one token, of the layers that attend.
        block_tokens: of a block.
    """

    map_bytes: int
    token_bytes: float
    block_tokens: int


class Prompts:
    """Documents that stay, and prompts over them that never come twice."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.documents = [self.fresh(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]

    def reading(self) -> list[int]:
        """Documents in any order, each behind fresh text, so that it is told from the others."""
        prompt = list[int]()
        for number in self._order():
            prompt += self.fresh(PREAMBLE_TOKENS) + self.documents[number]
        return prompt + self.fresh(TAIL_TOKENS)

    def next(self) -> list[int]:
        """A prompt of `PROMPT_TOKENS` token ids."""
        body = [token for number in self._order() for token in self.documents[number]]
        return [*self.fresh(PREAMBLE_TOKENS), *body, *self.fresh(QUESTION_TOKENS)]

    def _order(self) -> list[int]:
        return self._random.sample(range(DOCUMENTS), DOCUMENTS)

    def fresh(self, count: int) -> list[int]:
        """So many tokens of nobody's."""
        return self._random.choices(range(_FIRST_TEXT_TOKEN, shapes.VOCAB_SIZE), k=count)


class Apart:
    """An engine in a process of its own: vLLM has one connector per process.

    Args:
        name: of `ENGINES`.

    Raises:
        BenchError: it has ended; it has said why.
    """

    def __init__(self, name: str) -> None:
        spawn = multiprocessing.get_context("spawn")  # an engine must not inherit another's threads
        self._name = name
        self._pipe, its_end = spawn.Pipe()
        self._process = spawn.Process(target=_work, args=(its_end, ENGINES[name]), daemon=True)
        self._process.start()
        its_end.close()
        self.facts: Facts | None = self._received()

    def first_token(self, prompt: list[int], options: Mapping[str, Any] | None) -> engine.Timed:
        """See `engine.first_token`."""
        self._pipe.send((prompt, options))
        timed = self._received()
        assert isinstance(timed, engine.Timed)
        return timed

    def _received(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise harness.BenchError(f"the engine {self._name!r} has ended; see above") from None

    def close(self) -> None:
        """Have it end."""
        with suppress(OSError):  # it has ended already
            self._pipe.send(None)
        self._process.join()


def _work(pipe: Any, arguments: Mapping[str, Any]) -> None:
    """An engine's process: answers until it is sent None."""
    options = _ARGUMENTS | shapes.SHAPES[SHAPE].arguments | {"segreuse": False} | dict(arguments)
    if not options["segreuse"]:
        os.environ["VLLM_PLUGINS"] = "none"  # a name that no plugin has
    engine.prepare_environment(_KV_SPACE_GIB)
    with engine.engine(shapes.make_model(SHAPE), **options) as llm:
        pipe.send(_facts(llm) if options["segreuse"] else None)
        while (asked := pipe.recv()) is not None:
            pipe.send(engine.first_token(llm, *asked))


def _facts(llm: Any) -> Facts:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    prefill = get_kv_transfer_group().worker_side.backlog.prefill
    block_tokens = int(pool.group.block_size)
    slots = pool.num_gpu_blocks * block_tokens
    of_layers = [layer.attention.kv_cache for layer in prefill.kv]
    token_bytes = sum(it.nbytes for it in of_layers) / slots
    return Facts(prefill.state_layers.map_bytes, token_bytes, block_tokens)


def run(quick: bool) -> harness.SuiteResult:
    """Compare the arms (`quick`: one start, few rounds)."""
    load = QUICK if quick else FULL
    shapes.make_model(SHAPE)
    rows: list[harness.Row] = []
    taken: dict[str, list[engine.Timed]] = {arm.name: [] for arm in ARMS}
    facts: Facts | None = None
    for start in range(load.starts):
        with started() as engines:
            found = measure(engines, load.rounds, start)
            facts = engines["reusing"].facts
        rows += [_row(start, arm, found[arm.name]) for arm in ARMS]
        for name, of_arm in found.items():
            taken[name] += of_arm
    assert facts is not None
    return {"rows": rows, "summary": summary(taken, facts)}


@contextmanager
def started() -> Iterator[dict[str, Apart]]:
    """All engines, one start of each."""
    with ExitStack() as stack:
        engines = {}
        for name in ENGINES:
            engines[name] = Apart(name)
            stack.callback(engines[name].close)
        yield engines


def measure(engines: Mapping[str, Apart], rounds: int, start: int) -> dict[str, list[engine.Timed]]:
    """Rounds of all arms, by turns; the first one is not counted.

    Raises:
        BenchError: an arm did other work than it is to do.
    """
    prompts = Prompts(seed=start)
    taken: dict[str, list[engine.Timed]] = {arm.name: [] for arm in ARMS}
    for read in (prompts.reading(), prompts.reading()):
        for name, of_name in engines.items():
            of_name.first_token(read, {"extra_keys": _NAMESPACE} if name == "reusing" else None)
    for turn in harness.progress(range(rounds + 1), f"states, start {start + 1}"):
        for arm in harness.rotated(ARMS, turn):
            timed = engines[arm.engine].first_token(prompts.next(), arm.options)
            _check(arm, timed)
            if turn:
                taken[arm.name].append(timed)
    return taken


def _check(arm: Arm, timed: engine.Timed) -> None:
    if arm.policy is None:
        if timed.cached_tokens or timed.report:
            raise harness.BenchError(
                f"{arm.name} is to compute all, but {timed.cached_tokens} tokens were cached and "
                f"its report is {timed.report}"
            )
        return
    report = engine.require_reuse(timed, arm.policy, KNOWN_TOKENS)
    wanted = 2 * DOCUMENT_TOKENS if arm.policy == "focus" else 0
    if report["recomputed_tokens"] != wanted:
        raise harness.BenchError(
            f"{arm.name} was to read {wanted} tokens again, but the report says {dict(report)}"
        )


def _row(start: int, arm: Arm, taken: Sequence[engine.Timed]) -> harness.Row:
    times = [timed.ms for timed in taken]
    report = taken[-1].report or {"reused_tokens": 0, "recomputed_tokens": 0, "computed_share": 1.0}
    return {
        "start": start + 1,
        "arm": arm.name,
        "shape": SHAPE,
        "execution": "eager",
        "prompt_tokens": PROMPT_TOKENS,
        "reused": report["reused_tokens"],
        "recomputed": report["recomputed_tokens"],
        "computed_share": report["computed_share"],
        "median_ms": harness.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "rounds": len(times),
        "times_ms": " ".join(f"{it:.0f}" for it in times),
    }


def summary(taken: Mapping[str, Sequence[engine.Timed]], facts: Facts) -> dict[str, float | str]:
    """The figures that matter."""
    found: dict[str, float | str] = {
        f"{name}_ms": harness.median([timed.ms for timed in of_arm])
        for name, of_arm in taken.items()
    }
    for arm in ARMS:
        if arm.policy is not None:
            found |= _speedup(f"{arm.name}_speedup", taken["prefix"], taken[arm.name])
            found |= _speedup(f"{arm.name}_speedup_over_none", taken["none"], taken[arm.name])
            report = taken[arm.name][-1].report
            assert report is not None
            found[f"{arm.name}_computed_share"] = report["computed_share"]
    found |= _speedup("prefix_speedup_over_none", taken["none"], taken["prefix"])
    document_bytes = facts.token_bytes * DOCUMENT_TOKENS
    return found | {
        "known_share": KNOWN_TOKENS / PROMPT_TOKENS,
        "prompt_tokens": PROMPT_TOKENS,
        "documents": DOCUMENTS,
        "document_tokens": DOCUMENT_TOKENS,
        "rounds": len(taken["prefix"]),
        "block_tokens": facts.block_tokens,
        "map_bytes": facts.map_bytes,
        "map_mib": facts.map_bytes / 2**20,
        "document_kv_mib": document_bytes / 2**20,
        "map_over_document_kv": facts.map_bytes / document_bytes,
        "map_in_tokens": facts.map_bytes / facts.token_bytes,
    }


def _speedup(
    name: str, slower: Sequence[engine.Timed], quicker: Sequence[engine.Timed]
) -> dict[str, float]:
    """Median of the ratios of each round, which ran in the same minute, and its interval."""
    import numpy as np
    from scipy import stats

    ratios = [one.ms / other.ms for one, other in zip(slower, quicker, strict=True)]
    middle = harness.median(ratios)
    if min(ratios) == max(ratios):
        return {name: middle, f"{name}_low": middle, f"{name}_high": middle}
    interval = stats.bootstrap(
        (ratios,), np.median, method="percentile", n_resamples=9999, rng=np.random.default_rng(0)
    ).confidence_interval
    return {
        name: middle,
        f"{name}_low": float(interval.low),
        f"{name}_high": float(interval.high),
    }
