# SPDX-License-Identifier: Apache-2.0
"""What the model is trained on: worlds of all tasks at once, at many sizes, with many questions.

Nothing tells the model which layer should do what: its only signal is the next word, where that
word can be known: answers, values that an assignment repeats, words said before.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from bench.quality import language
from bench.quality.tasks import agents, base, chat, counting, documents, retrieval, variables
from bench.quality.tasks.base import Names, Thread

RECALL_NAMES = language.VARIABLES + language.KEYS + language.NUMBERS + language.CODES


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes:
        length: tokens of a row.
        rows: rows of a batch.
        max_hops: longest chain of assignments.
        recall: share of rows that only repeat words of the row in another order (they teach
            attention to what stood two words after the same word).
        counting: share of the other rows that carry a counting task.
        frequent: share of the counting tasks that ask for the most frequent words.
        single: share of the other rows with statements of one task only.
        chains: share of the other rows with nothing but chains of `max_hops` assignments.
    """

    length: int
    rows: int
    max_hops: int
    recall: float = 0.0
    counting: float = 0.35
    frequent: float = 0.5
    single: float = 0.3
    chains: float = 0.0


@dataclass
class Row:
    """Words of one row, with the kind of each word that is to be learnt (None: it is not)."""

    words: list[str]
    kinds: list[str | None]

    def say(self, words: tuple[str, ...], kind: str | None = None) -> None:
        """Append words, all of one kind."""
        self.words += words
        self.kinds += [kind] * len(words)


def recall_row(rng: Random, length: int) -> Row:
    """Distinct names, then the same in another order: each with the name two after it."""
    count = min(length // 3, len(RECALL_NAMES))
    names = rng.sample(RECALL_NAMES, rng.randint(count // 2, count))
    row = Row([], [])
    row.say(("<bos>", *names))
    starts = rng.sample(range(len(names) - 2), len(names) - 2)
    for start in starts:
        if len(row.words) + 2 > length:
            break
        row.say((names[start],))
        row.say((names[start + 2],), "recall")
    return row


def world_row(rng: Random, stage: Stage) -> Row:
    """An instruction, documents, and as many questions about them as there is room for."""
    row = Row([], [])
    row.say(("<bos>",))
    if rng.random() < 0.7:
        row.say(base.instruction(rng, 2, 14))
    questions_share = rng.uniform(0.15, 0.4) if stage.length < 512 else rng.uniform(0.08, 0.2)
    text_length = int((stage.length - len(row.words)) * (1 - questions_share))
    if rng.random() < 0.5:
        text_length = int(text_length * rng.uniform(0.5, 1))
    number = rng.randint(1, 8)
    size = max(12, text_length // number)
    sizes = [size] * max(1, text_length // size)
    threads = _threads(rng, stage, sum(sizes))
    world = base.lay_out(rng, threads, sizes, apart=rng.random() < 0.5)
    questions = list(world.questions)
    if questions and rng.random() < 0.15:
        row.say(rng.choice(questions).words)
    for document in world.documents:
        for statement in document:
            for index, word in enumerate(statement.words):
                row.say((word,), "hint" if index in statement.predictable else None)
    if rng.random() < 0.4:
        row.say(base.instruction(rng, 1, 10))
    rng.shuffle(questions)
    for question in questions:
        if len(row.words) + len(question.words) + len(question.answer) > stage.length:
            continue
        row.say(question.words)
        row.say(question.answer, question.kind)
    return row


def _threads(rng: Random, stage: Stage, room: int) -> list[Thread]:
    """Threads of statements that fill a share of the room."""
    names = Names(rng)
    threads: list[Thread] = []
    budget = room * rng.uniform(0.3, 0.75)
    only_chains = stage.chains > 0 and rng.random() < stage.chains
    if not only_chains and rng.random() < stage.counting:
        threads.append(_counting(names, rng, budget, stage.frequent))
    hint_rate = rng.choice([0.0, 0.3, 0.6])
    makers = {
        "variables": lambda: _chain(names, rng, stage, hint_rate),
        "long chains": lambda: variables.chain(names, rng, stage.max_hops, hint_rate),
        "several": lambda: variables.several(
            [_chain(names, rng, stage, hint_rate) for _ in range(rng.randint(2, 4))], rng
        ),
        "dangling": lambda: variables.dangling(names, rng),
        "needles": lambda: _needles(names, rng),
        "bridge": lambda: documents.bridge(names, rng),
        "chat": lambda: chat.memory(names, rng, rng.randint(0, 2)),
        "agents": lambda: agents.debate(names, rng, rng.randint(2, 6)),
    }
    weights = {
        "variables": 6,
        "several": 1,
        "dangling": 1,
        "needles": 2,
        "bridge": 2,
        "chat": 2,
        "agents": 1,
    }
    if only_chains:
        weights = {"long chains": 1}
    elif rng.random() < stage.single:
        kept = rng.choices(list(weights), list(weights.values()))[0]
        weights = {kept: 1}
    used = sum(len(s.words) for thread in threads for s in thread.statements)
    while used < budget:
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if (
            names.left(language.VARIABLES) < 4 * (stage.max_hops + 1)
            or names.left(language.KEYS) < 8
        ):
            break
        thread = makers[kind]()
        used += sum(len(statement.words) for statement in thread.statements)
        threads.append(thread)
    return threads


def _chain(names: Names, rng: Random, stage: Stage, hint_rate: float) -> Thread:
    return variables.chain(names, rng, rng.randint(0, stage.max_hops), hint_rate)


def _needles(names: Names, rng: Random) -> Thread:
    count = rng.randint(1, 6)
    return retrieval.needles(names, rng, count, rng.randint(1, min(count, 4)))


def _counting(names: Names, rng: Random, budget: float, frequent: float) -> Thread:
    """A counting task that takes at most the budget, easier where there is less of it.

    As in RULER, how many words are asked for is part of the task: 4 common or 3 frequent ones.
    """
    if rng.random() >= frequent:
        times, rare = rng.randint(3, 12), rng.randint(2, 24)
        while 2 * (4 * times + rare) > budget and (times > 2 or rare > 1):
            times, rare = max(2, times - 1), max(1, rare - 2)
        return counting.common(names, rng, 4, times, rare)
    exponent, kinds = rng.uniform(1.4, 2.4), rng.randint(4, 12)
    law = [1 / (rank + 1) ** exponent for rank in range(kinds)]
    scale = budget * rng.uniform(0.3, 1) / sum(law)
    counts = [max(1, round(scale * share)) for share in law]
    while sum(counts) > budget and counts[0] > 4:
        counts = [max(1, count * 3 // 4) for count in counts]
    for rank in (3, 2, 1):  # neighbours in the answer differ by at least two
        counts[rank - 1] = max(counts[rank - 1], counts[rank] + 2)
    return counting.frequent(names, rng, counts, 3)


Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, and what is to be learnt of them.

    Attributes:
        tokens: `[rows, length]`, padded.
        where: flat indices of the positions whose next token is to be learnt.
        kinds: for each of these, an index into `names`.
        names: kinds that occur.
    """

    tokens: Int64Array
    where: Int64Array
    kinds: Int64Array
    names: list[str]


def batch(rng: Random, stage: Stage) -> Batch:
    """Draw one batch of a stage."""
    tokens = np.full((stage.rows, stage.length), language.TOKEN_OF["<pad>"], dtype=np.int64)
    where: list[int] = []
    kinds: list[int] = []
    names: dict[str, int] = {}
    for index in range(stage.rows):
        if rng.random() < stage.recall:
            row = recall_row(rng, stage.length)
        else:
            row = world_row(rng, stage)
        encoded = language.encode(row.words[: stage.length])
        tokens[index, : len(encoded)] = encoded
        for position, kind in enumerate(row.kinds[: stage.length]):
            if kind is not None:
                where.append(index * stage.length + position - 1)
                kinds.append(names.setdefault(kind, len(names)))
    return Batch(tokens, np.asarray(where), np.asarray(kinds), list(names))
