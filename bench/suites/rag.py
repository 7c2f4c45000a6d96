# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of questions over a knowledge base, with reuse and without.

The documentation topics that ship with Python are ingested once, over HTTP. Questions are asked
four at a time, each with eight passages that BM25 found, in random order.

The server runs `configs/knowledge.yaml`, as an operator would (but keeps no manifest).

Both arms send the very same prompts to the same server, with prefix caching on: `reuse` names the
base's extra key; `plain` names none, and has a `cache_salt`, so that the prefix cache works for its
own requests but never finds what the other arm computed. The arms take turns, some questions each.
"""

import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness, shapes
from bench.server import Server, ServerError
from examples.rag import library
from examples.rag.chat import Answer, ask
from segreuse_tools.knowledge.client import TOKEN_ENV, ClientError, KnowledgeClient
from vllm_segreuse.features.knowledge.schemas import NewDocument

CONFIG = harness.REPOSITORY / "configs" / "knowledge.yaml"
BASE = "python-topics"
PASSAGES = 8
CONCURRENCY = 4
TURN = 10
"""Questions that one arm is asked before it is the other's turn."""

ARMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"cache_salt": "plain"},
    "reuse": {"extra_keys": [BASE]},
}

_SERVER_ARGS = ("--max-model-len", "16384", "--block-size", "32", "--dtype", "bfloat16")
_KV_SPACE_GIB = 4
MAX_TOKENS = 4
_START_S = 1200  # compiling 28 layers takes minutes on a busy machine


class Load(NamedTuple):
    """How much is asked, of which model; every question in `orders` orders of its passages."""

    shape: str
    eager: bool
    questions: int
    orders: int
    longest_document_chars: int


FULL = Load("bench28", eager=False, questions=50, orders=2, longest_document_chars=1 << 30)
QUICK = Load("bench8", eager=True, questions=12, orders=1, longest_document_chars=8_000)


class Prompt(NamedTuple):
    """Chat messages, and how many of their tokens are the passages'."""

    messages: list[dict[str, str]]
    passage_tokens: int


class Ingested(NamedTuple):
    """What it took to fill the base."""

    documents: int
    tokens: int
    seconds: float


def run(quick: bool) -> harness.SuiteResult:
    """Fifty questions, twice, of the 28-layer shape (`quick`: fewer, of the 8-layer shape)."""
    load = QUICK if quick else FULL
    topics = library.python_topics().items()
    documents = {id_: text for id_, text in topics if len(text) <= load.longest_document_chars}
    model = shapes.make_model(load.shape)
    questions = library.questions()[: load.questions] * load.orders
    prompts = prompts_of(model, documents, questions)
    token = secrets.token_hex()
    args = [*_SERVER_ARGS, *(["--enforce-eager"] if load.eager else [])]
    env = {TOKEN_ENV: token, "VLLM_CPU_KVCACHE_SPACE": str(_KV_SPACE_GIB)}
    import openai

    try:
        with tempfile.TemporaryDirectory() as folder:
            args += ["--segreuse-config", str(_config(Path(folder)))]
            with Server(model, args, env, start_timeout_s=_START_S) as server:
                ingested = ingest(server.url, token, documents)
                one = partial(_ask, server.client(timeout=600), server.model_name)
                answers = _ask_all(one, prompts)
    except (ServerError, ClientError, openai.OpenAIError) as error:
        raise harness.BenchError(str(error)) from error
    return result_of(load, ingested, prompts, answers)


def _config(folder: Path) -> Path:
    """The operator's configuration, without a manifest."""
    import yaml

    options = yaml.safe_load(CONFIG.read_text()) | {"knowledge_path": None}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(options))
    return file


def prompts_of(model: Path, documents: Mapping[str, str], questions: Sequence[str]) -> list[Prompt]:
    """One prompt per question, with its passages in random order."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = library.Library(documents)
    shuffle = random.Random(0)
    prompts = []
    for question in questions:
        passages = found.search(question, PASSAGES)
        shuffle.shuffle(passages)
        tokens = sum(len(tokenizer.encode(passage.text).ids) for passage in passages)
        prompts.append(Prompt(library.messages(passages, question), tokens))
    return prompts


def ingest(url: str, token: str, documents: Mapping[str, str]) -> Ingested:
    with KnowledgeClient(url, token) as client:
        client.create(BASE)
        started = time.perf_counter()
        new = (NewDocument(id=id_, text=text) for id_, text in documents.items())
        added = client.add(BASE, new, wait=True)
        seconds = time.perf_counter() - started
    cold = [document for document in added if document.status not in ("warm", "stored")]
    if cold:
        raise harness.BenchError(
            f"{len(cold)} of {len(added)} documents cannot be reused after they were added; "
            f"{cold[0].id} is {cold[0].status} ({cold[0].error})"
        )
    return Ingested(len(added), sum(document.tokens for document in added), seconds)


def _ask(client: Any, model: str, arm: str, prompt: Prompt) -> Answer:
    answer = ask(client, model, prompt.messages, max_tokens=MAX_TOKENS, extra_body=ARMS[arm])
    if (answer.report is None) != (arm == "plain"):
        raise harness.BenchError(f"a request of the arm {arm!r} was reported as {answer.report}")
    return answer


def _ask_all(one: Any, prompts: Sequence[Prompt]) -> dict[str, list[Answer]]:
    """All prompts to both arms, `TURN` at a time; answers in the order of the prompts."""
    answers: dict[str, list[Answer]] = {arm: [] for arm in ARMS}
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for arm in ARMS:  # warms up; another question than those that follow
            list(pool.map(partial(one, arm), [first_half(p) for p in prompts[:CONCURRENCY]]))
        turns = range(0, len(prompts), TURN)
        for turn, at in enumerate(harness.progress(turns, "rag")):
            for arm in harness.rotated(list(ARMS), turn):
                answers[arm] += pool.map(partial(one, arm), prompts[at : at + TURN])
    return answers


def first_half(prompt: Prompt) -> Prompt:
    """A prompt that no other one begins with."""
    [system, user] = prompt.messages
    content = user["content"]
    shorter = user | {"content": "Warm up. " + content[: len(content) // 2]}
    return prompt._replace(messages=[system, shorter])


def result_of(
    load: Load,
    ingested: Ingested,
    prompts: Sequence[Prompt],
    answers: Mapping[str, Sequence[Answer]],
) -> harness.SuiteResult:
    """Rows by arm, and the summary that compares the arms.

    Args:
        answers: of each prompt, by arm: first the plain one, then the one with reuse.
    """
    rows = [_row(load, arm, prompts, taken) for arm, taken in answers.items()]
    plain, reuse = rows
    summary = {
        f"ttft_ratio_{p}": float(reuse[f"ttft_{p}_ms"] / plain[f"ttft_{p}_ms"])
        for p in ("p50", "p99")
    }
    reports = [answer.report or {} for answer in answers["reuse"]]
    # A question's own tokens may be found somewhere, too: never more than the passages count.
    reused = sum(
        min(report["reused_tokens"], prompt.passage_tokens)
        for report, prompt in zip(reports, prompts, strict=True)
    )
    summary |= {
        "reused_share": reused / sum(prompt.passage_tokens for prompt in prompts),
        "recomputed_share": reuse["recomputed"] / max(1, reuse["reused"]),
        "questions": len(prompts),
        "ingest_s": ingested.seconds,
        "ingest_tokens_per_s": ingested.tokens / ingested.seconds,
        "documents": ingested.documents,
        "document_tokens": ingested.tokens,
    }
    return {"rows": rows, "summary": summary}


def _row(load: Load, arm: str, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> harness.Row:
    times_ms = [answer.ttft_s * 1e3 for answer in answers]
    reports = [answer.report or {} for answer in answers]
    return {
        "shape": load.shape,
        "arm": arm,
        "execution": "eager" if load.eager else "compiled",
        "policy": next((report["policy"] for report in reports if report), None),
        "questions": len(answers),
        "concurrency": CONCURRENCY,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "passage_tokens": sum(prompt.passage_tokens for prompt in prompts),
        "prefix": sum(report.get("prefix_tokens", 0) for report in reports),
        "reused": sum(report.get("reused_tokens", 0) for report in reports),
        "recomputed": sum(report.get("recomputed_tokens", 0) for report in reports),
        "ttft_p50_ms": harness.median(times_ms),
        "ttft_p99_ms": p99(times_ms),
        "ttft_min_ms": min(times_ms),
    }


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]
