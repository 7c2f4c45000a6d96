# SPDX-License-Identifier: Apache-2.0
"""Similar segments: what finding them costs, how well they are found, and what they add.

No model runs. `arrival_ms`: a prompt of 8,192 tokens against 100,000 indexed windows, when it
arrives ("hit": text of the index with another token at every twentieth or so; "miss": unrelated).
`schedule_ms` is the search within `schedule()`, beside that for equal segments alone. "cpu" is the
processor's time, which others on a busy machine do not lengthen.

Retrieval is measured on labelled pairs: passages of English, and the same with changed values and
zero to six edited words, among other text; a pair is right if both are of one passage. No two
passages are from the same stretch of the English, and neither is the text around donors and around
prompts. An estimated similarity of .8 counts as found.

The trace is synthetic: episodes of a ReAct agent with two tools, whose observations are JSON with
other ids, numbers and times each; once with prompts that only grow ("history only"), once with the
time of day at the top of each ("time first"), so that no prefix is equal. Shares are of the
prompts' tokens, by what finds them, in this order: vLLM's prefix cache, equal content, similar.
"""

from __future__ import annotations

import difflib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench import harness, shapes
from segreuse_extras.similar.align import equal_runs
from segreuse_extras.similar.canonical import Vocabulary
from segreuse_extras.similar.finder import SimilarFinder, warm_up
from segreuse_extras.similar.options import SimilarityOptions
from segreuse_extras.similar.store import SimilarStore
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.cache.prompt import Prompt

BLOCK_SIZE = 32
WINDOWS = 100_000
PROMPT_TOKENS = 8_192
PROMPT_BLOCKS = 512
VOCABULARY = 150_000
TAU = 0.8
PASSAGES, PASSAGE_WORDS = 300, 120
SEED = 2026
"""Nothing was tuned on it; options were chosen on seeds below 100."""


def run(quick: bool) -> harness.SuiteResult:
    """Measure; times are medians."""
    warm_up(SimilarityOptions())
    timings = _timings(10 if quick else 60)
    alignment = measure_alignment(50 if quick else 400)
    retrieval = measure_retrieval(100 if quick else PASSAGES)
    traces = [row for late in (False, True) for row in _trace(4 if quick else 20, late)]
    both = [row for row in traces if row["block_size"] == BLOCK_SIZE]
    summary = {
        **timings,
        "align_us": alignment[0]["us"],
        "align_us_difflib": alignment[1]["us"],
        "precision_tau80": retrieval[-1]["precision"],
        "recall_tau80": retrieval[-1]["recall"],
    }
    for row in both:
        name = "time_first" if row["prompts"].startswith("time") else "history"
        summary |= {f"{key}_{name}": row[key] for key in ("prefix", "content", "similar")}
    return {"rows": [*alignment, *retrieval, *traces], "summary": summary}


class Cache:
    """The scheduler's side of one namespace, without requests."""

    def __init__(self, blocks: int, vocabulary: Vocabulary, block_size: int = BLOCK_SIZE) -> None:
        self.size = block_size
        self.index = SegmentIndex(blocks, block_size)
        names = NamespaceTable()
        self.namespace = names.intern(b"bench")
        self.options = SimilarityOptions()
        self.store = SimilarStore(self.index, names, vocabulary, self.options)
        self.content = ContentFinder(self.index, 0)
        self.searches_s: list[float] = []
        self.finder = SimilarFinder(
            *(self.content, self.store, self.index, 0),
            *(time.perf_counter, self.searches_s.append),
        )
        self._next = 0

    def add(self, tokens: np.ndarray, known: Sequence[int] = ()) -> list[int]:
        """A request computed this behind blocks that were known; all of its full blocks."""
        first, last = len(known), len(tokens) // self.size
        blocks = np.arange(self._next, self._next + last - first, dtype=np.int32)
        self._next += blocks.size
        self.index.insert(
            *(self.namespace, blocks, tokens[first * self.size : last * self.size]),
            first_position=first * self.size,
            parent_block=known[-1] if known else -1,
        )
        self.index.begin_step()
        self.store.inserted(self.namespace, blocks)
        return [*known, *blocks.tolist()]

    def arrive(self, tokens: np.ndarray) -> Prompt:
        """A request arrives."""
        prompt = Prompt(self.namespace, tokens)
        self.finder.prepare(prompt)
        return prompt


# Costs.


def _timings(repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(SEED)
    cache = Cache(WINDOWS, Vocabulary.of_identity())
    documents, insert_us, insert_cpu_us = [], [], []
    while cache._next < WINDOWS:
        blocks = min(PROMPT_BLOCKS, WINDOWS - cache._next)
        documents.append(_random_tokens(blocks * BLOCK_SIZE, rng))
        cache.add(documents[-1])
        began, idle = time.perf_counter(), time.thread_time()
        cache.store.catch_up()
        insert_us.append(1e6 * (time.perf_counter() - began) / blocks)
        insert_cpu_us.append(1e6 * (time.thread_time() - idle) / blocks)
    if len(cache.store.windows) != WINDOWS:
        raise harness.BenchError(f"{len(cache.store.windows)} windows instead of {WINDOWS}")
    hits = [_edited(documents[i % (len(documents) - 1)], rng) for i in range(repeats)]
    misses = [_random_tokens(PROMPT_TOKENS, rng) for _ in range(repeats)]
    found: dict[str, list[float]] = {}
    for pair in zip(hits, misses, strict=True):
        for case, tokens in zip(("hit", "miss"), pair, strict=True):
            for name, ms in _one_prompt(cache, tokens, case == "hit").items():
                found.setdefault(f"{name}_{case}", []).append(ms)
    removed = rng.permutation(WINDOWS)[:5000].tolist()
    began = time.perf_counter()
    for block in removed:
        cache.store.removed([block])
    remove_us = 1e6 * (time.perf_counter() - began) / len(removed)
    medians = {name: harness.median(values) for name, values in found.items()}
    return {
        **medians,
        "insert_us_per_window": harness.median(insert_us),
        "insert_cpu_us_per_window": harness.median(insert_cpu_us),
        "insert_us_per_window_datasketch": _datasketch_us(rng),
        "remove_us_per_block": remove_us,
        "bytes_per_window": cache.store.windows.num_bytes / WINDOWS,
    }


def _one_prompt(cache: Cache, tokens: np.ndarray, is_hit: bool) -> dict[str, float]:
    """Milliseconds on arrival, and within `schedule()` with similar segments and without."""
    idle = time.thread_time()
    prompt, stop = cache.arrive(tokens), len(tokens) - 1
    arrived_s = time.thread_time() - idle
    began = time.perf_counter()
    cache.content.find(prompt, 0, stop)
    between = time.perf_counter()
    matches = cache.finder.find(prompt, 0, stop)
    ended = time.perf_counter()
    if (matches.pieces.num_similar > 0.8 * len(tokens)) != is_hit:
        raise harness.BenchError(f"{matches.pieces.num_similar} similar tokens of {len(tokens)}")
    return {
        "arrival_ms": 1e3 * cache.searches_s[-1],
        "arrival_cpu_ms": 1e3 * arrived_s,
        "schedule_ms": 1e3 * (ended - between),
        "schedule_ms_equal_only": 1e3 * (between - began),
    }


def _random_tokens(count: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def _edited(document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Text of a document with other tokens, none of whose blocks is equal."""
    tokens = document[37 : 37 + PROMPT_TOKENS].copy()
    at = np.arange(0, tokens.size - 10, 20) + rng.integers(0, 10, (tokens.size - 10 + 19) // 20)
    tokens[at] = VOCABULARY + 1
    return tokens


def _datasketch_us(rng: np.random.Generator) -> float:
    """What a window would cost in datasketch's own MinHash and LSH."""
    from datasketch import MinHash, MinHashLSH

    options = SimilarityOptions()
    lsh = MinHashLSH(threshold=options.threshold, num_perm=options.permutations)
    taken = []
    for number in range(200):
        hashes = rng.integers(0, 2**32, options.window_tokens, dtype=np.uint64)
        shingles = [shingle.tobytes() for shingle in hashes]
        began = time.perf_counter()
        sketch = MinHash(num_perm=options.permutations)
        sketch.update_batch(shingles)
        lsh.insert(str(number), sketch)
        taken.append(1e6 * (time.perf_counter() - began))
    return harness.median(taken)


def measure_alignment(repeats: int) -> list[harness.Row]:
    """Time to align one candidate, a window and its margins on both sides: a row of ours and one of
    difflib."""
    rng, least = np.random.default_rng(SEED + 1), SimilarityOptions().min_run_tokens
    pairs = []
    for _ in range(repeats):
        donor = _random_tokens(160, rng)
        prompt = donor.copy()
        prompt[rng.integers(0, 160, 8)] = VOCABULARY + 1
        pairs.append((np.delete(prompt, rng.integers(0, 160, 3)), donor))
    ours, theirs = [], []
    tokens = [0, 0]
    for prompt, donor in pairs:
        began = time.perf_counter()
        tokens[0] += int(equal_runs(prompt, donor, least)[:, 2].sum())
        between = time.perf_counter()
        first, second = prompt.tolist(), donor.tolist()
        blocks = difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
        tokens[1] += sum(block.size for block in blocks if block.size >= least)
        ended = time.perf_counter()
        ours.append(1e6 * (between - began))
        theirs.append(1e6 * (ended - between))
    total = sum(len(prompt) for prompt, _ in pairs)
    return [
        {"alignment": name, "us": harness.median(us), "share_of_tokens": count / total}
        for name, us, count in (("ours", ours, tokens[0]), ("difflib", theirs, tokens[1]))
    ]


# How well pairs are found.


def measure_retrieval(passages: int) -> list[harness.Row]:
    """Precision and recall of so many passages: a row by the number of edits, and one of all."""
    dice, text = random.Random(SEED), Texts()
    cache = Cache(1 << 16, text.vocabulary)
    originals = [text.passage(number) for number in range(passages)]
    owner: dict[int, int] = {}  # block to passage
    for number, original in enumerate(originals):
        lead = text.tokens(text.filler(dice, 60, side=0))
        body = text.tokens(text.changed(original, 0, dice))
        tokens = np.concatenate((lead, body, text.tokens(text.filler(dice, 20, side=0))))
        for i, block in enumerate(cache.add(tokens)):
            middle = (i + 1) * BLOCK_SIZE - 48  # of a window that ends with the block
            owner[block] = number if len(lead) <= middle < len(lead) + len(body) else -1
    cache.store.catch_up()
    counts: dict[int, list[int]] = {}  # by edits: pairs, right ones, passages, found ones
    for number, original in enumerate(originals):
        edits = number % 7
        lead = text.tokens(text.filler(dice, 80, side=1))
        body = text.tokens(text.changed(original, edits, dice))
        tokens = np.concatenate((lead, body, text.tokens(text.filler(dice, 80, side=1))))
        found = set(_candidates(cache, text.vocabulary, tokens))
        mine = counts.setdefault(edits, [0, 0, 0, 0])
        for begin, end, block in found:
            within = max(0, min(end, len(lead) + len(body)) - max(begin, len(lead)))
            wanted = number if 2 * within >= end - begin else -2
            mine[0] += 1
            mine[1] += owner[block] == wanted
        mine[2] += 1
        mine[3] += any(owner[block] == number for *_, block in found)
    counts[-1] = [sum(column) for column in zip(*counts.values(), strict=True)]
    return [
        {
            "edited_words": "all" if edits < 0 else edits,
            "precision": right / max(1, pairs),
            "recall": hit / total,
            "pairs": pairs,
            "passages": total,
        }
        for edits, (pairs, right, total, hit) in sorted(counts.items(), key=lambda it: it[0] % 99)
    ]


def _candidates(
    cache: Cache, vocabulary: Vocabulary, tokens: np.ndarray
) -> Iterator[tuple[int, int, int]]:
    """Begin and end in the prompt, and the donor's block, of pairs that are similar enough."""
    store, options = cache.store, cache.options
    ids, first = vocabulary.canonical(tokens)
    ends = np.arange(options.window_tokens, ids.size + 1, 8, dtype=np.int32)
    units = store._with_segments(ids, ends, 0)
    digest = store._namespaces.digest(cache.namespace)
    bounds = np.append(first, tokens.size)
    for row, window, *_ in store.windows.look_up(digest, store._marks(ids, units), TAU):
        begin, end = bounds[units.begins[row]], bounds[units.ends[row]]
        yield int(begin), int(end), int(store.windows.block[window])


@dataclass
class Texts:
    """English with values in it, as tokens of the test models' tokenizer."""

    tokenizer: Any = field(init=False)
    vocabulary: Vocabulary = field(init=False)

    def __post_init__(self) -> None:
        from transformers import AutoTokenizer
        from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

        self.tokenizer = AutoTokenizer.from_pretrained(shapes.make_model("qwen3"))
        texts = convert_ids_list_to_tokens(self.tokenizer, list(range(len(self.tokenizer))))
        options = SimilarityOptions()
        found = Vocabulary.of_texts(
            ["" if "\ufffd" in it else it for it in texts], options.volatile
        )
        self.vocabulary = found.with_anchors([self.tokenizer.encode(it) for it in options.anchors])
        text = " ".join(shapes._training_text())
        self._words = text.split()

    def tokens(self, text: str) -> np.ndarray:
        """int32 `[n]`."""
        return np.array(self.tokenizer.encode(text), np.int32)

    def filler(self, dice: random.Random, words: int, side: int) -> str:
        """A stretch of the documentation behind all passages, of its first or its second half."""
        half = (len(self._words) - PASSAGES * PASSAGE_WORDS) // 2
        at = PASSAGES * PASSAGE_WORDS + side * half + dice.randrange(half - words)
        return " ".join(self._words[at : at + words])

    def passage(self, number: int) -> str:
        """Words, every ninth of which is a value that changes."""
        words = self._words[number * PASSAGE_WORDS : (number + 1) * PASSAGE_WORDS]
        words[::9] = ["{}"] * len(words[::9])
        return " ".join(words)

    def changed(self, passage: str, edits: int, dice: random.Random) -> str:
        """The same with values, and so many words replaced, inserted or omitted."""
        words = passage.split()
        for _ in range(edits):
            at = dice.randrange(len(words))
            words[at : at + dice.randrange(2)] = dice.sample(self._words, dice.randrange(2))
        return " ".join(_value(dice) if word == "{}" else word for word in words)


def _value(dice: random.Random) -> str:
    return dice.choice(
        (
            str(dice.randrange(10**5)),
            f"{dice.random() * 1000:.2f}",
            _moment(dice),
            f"{dice.getrandbits(32):08x}",
        )
    )


# What similar segments add.

_TOOLS = [
    {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in keys}},
    }
    for name, description, keys in (
        ("search", "Looks up orders and shipments in the warehouse by any words.", ("query",)),
        ("calculator", "Evaluates an arithmetic expression and returns a number.", ("expression",)),
    )
]
_FIELDS = ("order_id", "customer", "amount", "currency", "status", "updated_at", "items", "carrier")
_THOUGHTS = (
    "I should look up the orders of this customer to see what is late.",
    "I have the amounts now and should add them up before I answer.",
    "The last result does not name the carrier, so I search once more.",
)


def _trace(episodes: int, time_first: bool) -> list[harness.Row]:
    """Shares of the prompts' tokens by what finds them; blocks of 16 and 32 tokens."""
    return [measure_trace(episodes, time_first, size) for size in (16, BLOCK_SIZE)]


def measure_trace(episodes: int, time_first: bool, block_size: int) -> harness.Row:
    """Shares of the tokens of so many episodes that each way of reuse finds, in [0, 1]."""
    dice, text = random.Random(SEED + time_first), Texts()
    cache = Cache(1 << 16, text.vocabulary, block_size)
    prefixes: dict[bytes, list[int]] = {}  # what vLLM's prefix cache would know
    total, prefix, content, similar, searches = 0, 0, 0, 0, 0
    for number in range(episodes):
        for prompt_text in _episode(dice, time_first):
            tokens = text.tokens(prompt_text)
            known = prefix_hit(prefixes, tokens, block_size)
            start, stop = len(known) * block_size, len(tokens) - 1
            prompt = cache.arrive(tokens)
            equal = cache.content.find(prompt, min(start, stop), stop).num_tokens
            both = cache.finder.find(prompt, min(start, stop), stop)
            if number:  # the first episode finds an empty cache
                total, prefix = total + len(tokens), prefix + start
                content, similar = content + equal, similar + both.pieces.num_similar
                searches += 1
            blocks = cache.add(tokens, known)
            for i in range(len(known), len(blocks)):
                prefixes[tokens[: (i + 1) * block_size].tobytes()] = blocks[: i + 1]
    return {
        "prompts": "time first" if time_first else "history only",
        "block_size": block_size,
        "requests": searches,
        "tokens": total,
        "prefix": prefix / total,
        "content": content / total,
        "similar": similar / total,
        "new": 1 - (prefix + content + similar) / total,
        "similar_of_new": similar / max(1, total - prefix - content),
    }


def prefix_hit(prefixes: dict[bytes, list[int]], tokens: np.ndarray, block_size: int) -> list[int]:
    """Blocks that vLLM's prefix cache would have for these tokens.

    Args:
        prefixes: the blocks of each prefix that it holds, by the bytes of its tokens.
    """
    known: list[int] = []
    for i in range(1, (len(tokens) - 1) // block_size + 1):
        found = prefixes.get(tokens[: i * block_size].tobytes())
        if found is None:
            break
        known = found
    return known


def _episode(dice: random.Random, time_first: bool) -> Iterator[str]:
    """The prompts of one episode, each with one more thought, action and observation."""
    head = "You answer questions about orders with these tools, one at a time.\n"
    head += json.dumps(_TOOLS, indent=1)
    task = f"\nQuestion: What does customer {dice.randrange(10**4)} owe for order "
    history = f"{task}{dice.randrange(10**6)}?"
    for _ in range(dice.randrange(6, 11)):
        clock = f"Current time: {_moment(dice)}. Session {dice.getrandbits(64):016x}.\n"
        yield (clock if time_first else "") + head + history
        history += f"\nThought: {dice.choice(_THOUGHTS)}"
        if dice.random() < 0.7:
            history += f"\nAction: search\nAction Input: order {dice.randrange(10**6)}"
            records = [_record(dice) for _ in range(dice.randrange(2, 5))]
            history += "\nObservation: " + json.dumps({"results": records, "took_ms": 12})
        else:
            sums = " + ".join(f"{dice.random() * 100:.2f}" for _ in range(3))
            history += f"\nAction: calculator\nAction Input: {sums}"
            history += f"\nObservation: {dice.random() * 300:.2f}"


def _record(dice: random.Random) -> dict[str, Any]:
    values = (
        *(dice.getrandbits(32), f"customer-{dice.randrange(10**4)}", round(dice.random() * 500, 2)),
        *("EUR", dice.choice(("shipped", "late", "returned")), _moment(dice)),
        *(dice.randrange(1, 9), dice.choice(("post", "courier"))),
    )
    return dict(zip(_FIELDS, values, strict=True))


def _moment(dice: random.Random) -> str:
    day, hour, minute = dice.randrange(1, 29), dice.randrange(24), dice.randrange(60)
    return f"2026-{dice.randrange(1, 13):02}-{day:02}T{hour:02}:{minute:02}:00Z"
