# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases that change all the time, in a nearly full pool, on the real server: leaks.

Half an hour of an operator's life, compressed: two requests per second, and one change of a base
for every two of them, sent as fast as the server answers. Changes go on beside the requests:
documents are added, replaced, removed and warmed, bases are deleted and made anew. Documents are
promised as many blocks as leaves a little more than the running requests need; the rest is theirs.

A request brings passages of documents that are in a base, some bring none and name no extra key.
The share of the passages' tokens that was reused must not fall; every block must come back. Plans
of more than a few dozen tokens take several steps, as those of long prompts do.
"""

import random
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness, shapes
from bench.server import Server, ServerError
from segreuse_tools.knowledge.client import TOKEN_ENV, ClientError, KnowledgeClient
from vllm_segreuse.features.knowledge.schemas import NewDocument, Stats

SHAPE = "qwen3"
BLOCK_TOKENS = 32
NUM_BLOCKS = 1601  # one is vLLM's null block
RUNNING = 8
BASES = ("handbook", "wiki", "tickets", "contracts")
DOCUMENT_TOKENS = (40, 400)
PASSAGES = 3
NEW_TOKENS = (3, 40)
OUTPUT_TOKENS = (1, 8, 40)
PLAIN = 0.1
REQUESTS_PER_CHANGE = 2
TENTHS = 10

KINDS = {"replace": 0.45, "remove and add": 0.35, "warm": 0.15, "delete a base": 0.05}
"""What is changed, and how often."""

_CONFIG = """
policy: sparsex
dense_layers: 0
min_reused_tokens: 32
frozen_share: 0.96
frozen_pressure: 0.995
spread_tokens: 64
"""
_PROMISED = 0.95
"""Of all blocks. With 0.94, and what eight requests hold, 95 % of the pool was in use."""
_FIRST_TOKEN = 300
_IDLE_TRIES, _IDLE_S = 100, 0.1


class Load(NamedTuple):
    """How long it goes on."""

    requests: int


FULL = Load(requests=3600)  # 30 minutes at two per second
QUICK = Load(requests=200)


class Question(NamedTuple):
    """A prompt, how many tokens of it are passages', and the base they are of."""

    prompt: list[int]
    passage_tokens: int
    key: str | None
    max_tokens: int


class Asked(NamedTuple):
    """One request: tokens of its passages, those of them that were reused, and what went wrong."""

    passage_tokens: int
    reused_tokens: int
    error: str | None


@dataclass
class Tenth:
    """What a tenth of the load showed."""

    asked: list[Asked] = field(default_factory=list)
    changes: Counter[str] = field(default_factory=Counter)
    failed_changes: list[str] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)

    @property
    def reused_share(self) -> float:
        """Of the tokens of all passages."""
        tokens = sum(asked.passage_tokens for asked in self.asked)
        return sum(asked.reused_tokens for asked in self.asked) / max(1, tokens)

    @property
    def usage(self) -> float:
        """Mean share of the blocks that documents or requests hold."""
        used = [1 - stats.blocks.free / stats.blocks.total for stats in self.stats]
        return sum(used) / len(used) if used else 0.0

    @property
    def errors(self) -> list[str]:
        """Of requests."""
        return [asked.error for asked in self.asked if asked.error is not None]


class Document(NamedTuple):
    """One that a base has."""

    base: str
    id: str
    tokens: list[int]


def run(quick: bool) -> harness.SuiteResult:
    """Half an hour's worth of changes (`quick`: a minute and a half's)."""
    load = QUICK if quick else FULL
    model = shapes.make_model(SHAPE)
    token = secrets.token_hex()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Server(model, _arguments(Path(folder)), {TOKEN_ENV: token}) as server,
            KnowledgeClient(server.url, token) as bases,
        ):
            churn = Churn(server.url, server.model_name, bases, load)
            churn.run()
            return churn.result()
    except (ServerError, ClientError) as error:
        raise harness.BenchError(str(error)) from error


def _arguments(folder: Path) -> list[str]:
    config = folder / "config.yaml"
    config.write_text(_CONFIG + f"knowledge_path: {folder / 'manifest.sqlite'}\n")
    return [
        *("--segreuse-config", str(config), "--enforce-eager"),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--block-size", str(BLOCK_TOKENS)),
        *("--max-model-len", "2048", "--max-num-batched-tokens", "2048"),
        *("--max-num-seqs", str(RUNNING), "--no-enable-log-requests"),
    ]


class Churn:
    """Asks a server with as many requests as it runs at once, and changes its bases meanwhile.

    Args:
        url: root of the server.
        model: name of its model.
        bases: its knowledge bases.
        load: how long.
    """

    def __init__(self, url: str, model: str, bases: KnowledgeClient, load: Load) -> None:
        import httpx

        # The server closes connections after five idle seconds; whoever writes just then fails.
        kept = httpx.Limits(keepalive_expiry=2)
        self._http = httpx.Client(base_url=url, timeout=120, limits=kept)
        self._model = model
        self._bases = bases
        self._load = load
        self._dice, self._change_dice = random.Random(0), random.Random(1)
        self._documents: list[Document] = []
        self._numbers = 0
        self._asked = self._changed = 0
        self._state = threading.Condition()
        self._tenths = [Tenth() for _ in range(TENTHS)]
        self._after: Stats | None = None
        self._emptied: Stats | None = None
        self._seconds = 0.0

    def run(self) -> None:
        """Fill the bases; requests and changes; then nothing, then no documents either."""
        for name in BASES:
            self._bases.create(name)
        self._fill()
        started = time.perf_counter()
        with ThreadPoolExecutor(RUNNING + 1) as pool:
            changes = pool.submit(self._change_on)
            workers = [pool.submit(self._ask_on) for _ in range(RUNNING)]
            for work in (*workers, changes):
                work.result()
        self._seconds = time.perf_counter() - started
        self._after = self._when_idle()
        for name in BASES:
            self._bases.delete(name)
        self._emptied = self._when_idle()
        self._http.close()

    def result(self) -> harness.SuiteResult:
        """Rows by tenth, and the figures that matter.

        Raises:
            BenchError: the load was not what it claims to be.
        """
        assert self._after is not None
        assert self._emptied is not None
        first, last = self._tenths[0], self._tenths[-1]
        changes: Counter[str] = sum((tenth.changes for tenth in self._tenths), Counter())
        if set(changes) != set(KINDS) and self._load is FULL:
            raise harness.BenchError(f"bases were only changed in these ways: {dict(changes)}")
        rows = [
            {
                "tenth": number,
                "requests": len(tenth.asked),
                "failed": len(tenth.errors),
                "changes": tenth.changes.total(),
                "failed_changes": len(tenth.failed_changes),
                "reused_share": tenth.reused_share,
                "usage": tenth.usage,
                "warm": tenth.stats[-1].documents.warm if tenth.stats else None,
                "cold": tenth.stats[-1].documents.cold if tenth.stats else None,
                "given_back": tenth.stats[-1].given_back if tenth.stats else None,
            }
            for number, tenth in enumerate(self._tenths, 1)
        ]
        errors = [e for t in self._tenths for e in (*t.errors, *t.failed_changes)]
        summary: dict[str, float | str] = {
            "requests": sum(len(tenth.asked) for tenth in self._tenths),
            "changes": changes.total(),
            **{f"changes: {kind}": changes[kind] for kind in KINDS},
            "failed_requests": sum(len(tenth.errors) for tenth in self._tenths),
            "failed_changes": sum(len(tenth.failed_changes) for tenth in self._tenths),
            "first_error": errors[0] if errors else "",
            "usage": sum(tenth.usage for tenth in self._tenths) / TENTHS,
            "given_back": self._after.given_back,
            "reused_first_tenth": first.reused_share,
            "reused_last_tenth": last.reused_share,
            "leaked_blocks": leaked(self._after),
            "leaked_blocks_without_documents": leaked(self._emptied) + self._emptied.blocks.frozen,
            "requests_per_s": sum(len(tenth.asked) for tenth in self._tenths) / self._seconds,
        }
        return {"rows": rows, "summary": summary}

    # Requests.

    def _ask_on(self) -> None:
        for number in iter(self._next, None):
            with self._state:
                question = self._question()
            asked = self._ask(question)
            with self._state:
                self._tenth(number).asked.append(asked)

    def _next(self) -> int | None:
        """Number of the next request; None: all were sent. Waits for changes that are due."""
        with self._state:
            number = self._asked
            if number >= self._load.requests:
                return None
            self._asked += 1
            self._state.notify_all()
            due = number // REQUESTS_PER_CHANGE
            self._state.wait_for(lambda: self._changed > due - RUNNING)
            return number

    def _question(self) -> Question:
        dice = self._dice
        prompt = self._tokens(dice, NEW_TOKENS)
        max_tokens = dice.choice(OUTPUT_TOKENS)
        documents = [] if dice.random() < PLAIN else self._documents
        if not documents:
            return Question(prompt + self._tokens(dice, DOCUMENT_TOKENS), 0, None, max_tokens)
        base = dice.choice(documents).base
        mine = [document for document in documents if document.base == base]
        passages = dice.sample(mine, min(PASSAGES, len(mine)))
        for document in passages:
            prompt = prompt + document.tokens + self._tokens(dice, NEW_TOKENS)
        return Question(prompt, sum(len(d.tokens) for d in passages), base, max_tokens)

    def _ask(self, question: Question) -> Asked:
        import httpx

        body: dict[str, Any] = {
            "model": self._model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if question.key is not None:
            body["extra_keys"] = question.key
        error, reused = None, 0
        try:
            response = self._http.post("/v1/completions", json=body)
            answer = response.raise_for_status().json()
            if answer["usage"]["completion_tokens"] != question.max_tokens:
                error = f"{answer['usage']} for {question.max_tokens} tokens"
            if question.key is not None:
                report = answer["kv_transfer_params"]["segreuse"]
                reused = report["prefix_tokens"] + report["reused_tokens"]
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as fault:
            error = f"{type(fault).__name__}: {fault}"
        # A new token may be found somewhere, too: never more than the passages count.
        return Asked(question.passage_tokens, min(reused, question.passage_tokens), error)

    # Changes.

    def _change_on(self) -> None:
        try:
            for number in range(self._load.requests // REQUESTS_PER_CHANGE):
                self._wait_for_requests(number * REQUESTS_PER_CHANGE)
                self._change(self._tenth(number * REQUESTS_PER_CHANGE))
                with self._state:
                    self._changed += 1
                    self._state.notify_all()
        finally:
            with self._state:
                self._changed = self._load.requests  # nobody waits for a change any more
                self._state.notify_all()

    def _wait_for_requests(self, count: int) -> None:
        with self._state:
            self._state.wait_for(lambda: self._asked >= count)

    def _change(self, tenth: Tenth) -> None:
        [kind] = self._change_dice.choices(list(KINDS), list(KINDS.values()))
        try:
            {
                "replace": self._replace,
                "remove and add": self._remove_and_add,
                "warm": self._warm,
                "delete a base": self._delete_a_base,
            }[kind]()
            tenth.stats.append(self._bases.stats())
        except ClientError as error:
            tenth.failed_changes.append(f"{kind}: {error}")
        tenth.changes[kind] += 1

    def _replace(self) -> None:
        """Other text under the same id; as long, so that what is promised stays as it is."""
        document = self._take()
        tokens = self._tokens(self._change_dice, (len(document.tokens), len(document.tokens)))
        self._add(document.base, [document._replace(tokens=tokens)])

    def _remove_and_add(self) -> None:
        document = self._take()
        self._bases.remove(document.base, document.id)
        self._fill()

    def _warm(self) -> None:
        self._bases.warm(self._change_dice.choice(BASES), wait=True)

    def _delete_a_base(self) -> None:
        name = self._change_dice.choice(BASES)
        with self._state:
            self._documents = [d for d in self._documents if d.base != name]
        self._bases.delete(name)
        self._bases.create(name)
        self._fill()

    def _fill(self) -> None:
        """Add documents until as many blocks are promised as should be."""
        blocks = self._bases.stats().blocks
        room = int(_PROMISED * blocks.total) - blocks.promised
        new: dict[str, list[Document]] = {}
        while True:
            tokens = self._tokens(self._change_dice, DOCUMENT_TOKENS)
            room -= -(-len(tokens) // blocks.block_size)
            if room < 0:
                break
            base = self._change_dice.choice(BASES)
            self._numbers += 1
            new.setdefault(base, []).append(Document(base, f"{self._numbers}", tokens))
        for base, documents in new.items():
            self._add(base, documents)

    def _add(self, base: str, documents: Sequence[Document]) -> None:
        self._bases.add(
            base, [NewDocument(id=d.id, token_ids=d.tokens) for d in documents], wait=True
        )
        with self._state:
            self._documents = self._documents + list(documents)

    def _take(self) -> Document:
        """A document that no further request brings."""
        with self._state:
            document = self._change_dice.choice(self._documents)
            self._documents = [d for d in self._documents if d is not document]
        return document

    # Both.

    def _tenth(self, number: int) -> Tenth:
        return self._tenths[number * TENTHS // self._load.requests]

    @staticmethod
    def _tokens(dice: random.Random, between: tuple[int, int]) -> list[int]:
        return dice.choices(range(_FIRST_TOKEN, shapes.VOCAB_SIZE), k=dice.randint(*between))

    def _when_idle(self) -> Stats:
        """Statistics once nothing runs; documents that were brought back may take a moment."""
        for _ in range(_IDLE_TRIES):
            stats = self._bases.stats()
            if not stats.documents.warming and not leaked(stats):
                break
            time.sleep(_IDLE_S)
        return stats


def leaked(stats: Stats) -> int:
    """Blocks that are neither free nor frozen."""
    return stats.blocks.total - stats.blocks.free - stats.blocks.frozen
