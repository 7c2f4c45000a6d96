# SPDX-License-Identifier: Apache-2.0
"""Audits of a real engine in this process: what they measure, and that they change no answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from bench.english.recorder import Recorder
from bench.english.tape import Tape, divergences
from segreuse_extras.audit.draw import Draw
from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine

pytestmark = pytest.mark.patches("sampler")

TOKENS = 8
POLICIES = ("shift", "focus", "epic", "sparsex")
BIT_IDENTICAL = (*POLICIES, "cacheblend", "prophet")


def options(policy: str) -> dict[str, Any]:
    return NAMESPACE | {"segreuse_policy": policy}


def ask(running: Engine, prompt: list[int], extra: dict[str, Any] | None, **more: Any) -> Answer:
    """One request, and whatever it has left behind."""
    (answer,) = running.ask(prompt, options=extra, **{"max_tokens": TOKENS} | more)
    drain(running)
    return answer


def drain(running: Engine) -> None:
    """Until the engine has nothing to do: a reference runs when its requests have ended."""
    while running.scheduler.has_requests():
        running.llm.llm_engine.step()


def workload(running: Engine) -> list[Answer]:
    """Documents that are computed, then prompts of them, under several policies."""
    text = Prompts(running.vocab_size, seed=5)
    documents = [text.tokens(200) for _ in range(3)]
    found = [ask(running, text.around(document), NAMESPACE) for document in documents]
    for policy in BIT_IDENTICAL:
        prompt = text.around(documents[2], documents[0], documents[1])
        found.append(ask(running, prompt, options(policy)))
        found.append(ask(running, prompt, options(policy)))  # with what the first has left
        found.append(ask(running, prompt, None))
        sampled = {"temperature": 1.0, "seed": 3, "n": 1}
        found.append(ask(running, text.around(*documents), options(policy), **sampled))
    return found


def start_over(running: Engine) -> None:
    """Everything cached is forgotten, and blocks are handed out as in a new engine: of donors that
    are equally good the one with the lower block id is taken."""
    running.reset()
    blocks = [block for block in running.pool.blocks if not block.is_null]
    running.pool.free_block_queue = FreeKVCacheBlockQueue(blocks)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def audited(log: Path) -> Iterator[Engine]:
    audit = {"share": 1.0, "per_minute": 6000, "tokens": TOKENS, "log": str(log)}
    with engine("llama", {"audit": audit}, logits_processors=[Recorder]) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_held(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "audited" in request.fixturenames:
        running = request.getfixturevalue("audited")
        drain(running)
        running.check_idle()


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def side(running: Engine) -> Any:
    return running.scheduler.connector.scheduler_side


@pytest.mark.parametrize("policy", POLICIES)
def test_the_divergence_is_that_of_two_requests_side_by_side(
    policy: str, audited: Engine, log: Path
) -> None:
    """As `bench english` measures it: from the logits of the whole vocabulary, by a processor."""
    text = Prompts(audited.vocab_size, seed=len(policy))
    documents = [text.tokens(200) for _ in range(2)]
    for document in documents:
        ask(audited, text.around(document), NAMESPACE)
    prompt = text.around(*reversed(documents))
    tape = Tape()
    answer = ask(audited, prompt, {**options(policy), **tape.extra_args})
    reused = tape.logits[:TOKENS]
    assert answer.report["reused_tokens"] > 300
    line = lines(log)[-1]
    assert line["outcome"] == "compared"
    assert line["policy"] == policy

    forced = Tape(answer.token_ids)
    (full,) = audited.ask(
        {"prompt_token_ids": prompt, "cache_salt": policy},
        options=dict(forced.extra_args),
        max_tokens=TOKENS,
    )
    assert full.cached_tokens == 0
    assert full.token_ids == answer.token_ids
    apart = divergences(forced.logits, reused)
    assert apart[0] > 0
    assert line["kl"] == pytest.approx(apart[0], rel=1e-5)
    agreed = sum(
        int(a.argmax()) == int(b.argmax()) for a, b in zip(forced.logits, reused, strict=True)
    )
    assert (line["agreed_tokens"], line["compared_tokens"]) == (agreed, TOKENS)


def test_the_log_tells_found_planned_and_computed_apart(audited: Engine, log: Path) -> None:
    text = Prompts(audited.vocab_size, seed=77)
    document = text.tokens(200)
    ask(audited, text.around(document), NAMESPACE)
    answer = ask(audited, text.around(document), options("peaks"))
    line, report = lines(log)[-1], answer.report
    assert line["found"]["segment_tokens"] == line["planned"]["reused_tokens"]
    assert line["planned"]["reused_tokens"] == report["reused_tokens"] > 150
    assert line["materialised"]["recomputed_tokens"] == report["recomputed_tokens"]
    assert line["materialised"]["recomputed_tokens"] <= line["planned"]["recomputed_tokens"]
    assert not {"prompt", "answer"} & line.keys()


def test_no_answer_and_no_later_one_is_changed(
    audited: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_over(audited)
    before = side(audited).call("audits")["outcomes"].get("compared", 0)
    with_audits = workload(audited)
    reusing = sum(answer.report.get("reused_tokens", 0) > 0 for answer in with_audits)
    after = side(audited).call("audits")["outcomes"]["compared"]
    assert after - before == reusing >= 2 * len(BIT_IDENTICAL)
    monkeypatch.setattr(Draw, "draw", lambda *_: None)
    start_over(audited)
    for without, answer in zip(workload(audited), with_audits, strict=True):
        assert without == answer
    assert side(audited).call("audits")["outcomes"]["compared"] == after


def test_a_reference_runs_beside_others(audited: Engine) -> None:
    """It is forced, they are not; nothing else waits for it."""
    text = Prompts(audited.vocab_size, seed=99)
    document = text.tokens(300)
    ask(audited, text.around(document), NAMESPACE)
    alone = ask(audited, text.tokens(50), None, max_tokens=12)
    audited.reset()
    text = Prompts(audited.vocab_size, seed=99)
    document = text.tokens(300)
    ask(audited, text.around(document), NAMESPACE)
    tokens = text.tokens(50)
    audited.ask(text.around(document), options=options("shift"), max_tokens=TOKENS)
    (beside,) = audited.ask(tokens, max_tokens=12)  # with the reference
    assert beside.token_ids[:1] == alone.token_ids[:1]
    outcomes = side(audited).call("audits")["outcomes"]
    drain(audited)
    assert side(audited).call("audits")["under_way"] == 0
    assert outcomes["compared"] > 0


def test_several_choices_are_audited_each(audited: Engine) -> None:
    text = Prompts(audited.vocab_size, seed=111)
    document = text.tokens(200)
    ask(audited, text.around(document), NAMESPACE)
    before = side(audited).call("audits")["outcomes"]["compared"]
    children = audited.children(
        text.around(document), options("shift"), n=2, temperature=1.0, seed=1, max_tokens=4
    )
    drain(audited)
    assert len(children) == 2
    assert side(audited).call("audits")["outcomes"]["compared"] - before in (1, 2)


def test_a_reset_is_not_kept_from_happening_by_a_reference(audited: Engine) -> None:
    text = Prompts(audited.vocab_size, seed=123)
    document = text.tokens(200)
    ask(audited, text.around(document), NAMESPACE)
    audited.ask(text.around(document), options=options("shift"), max_tokens=2)
    assert side(audited).call("audits")["under_way"] == 1
    audited.llm.llm_engine.step()  # the reference holds blocks from here on
    audited.reset()
    drain(audited)
    assert side(audited).call("audits")["under_way"] == 0
