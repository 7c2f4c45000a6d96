# SPDX-License-Identifier: Apache-2.0
"""`make demo`: questions over the same passages in changing order, without and with reuse.

The real server is started on a small model, real text (Python's own reference documentation) is
ingested once, and the official `openai` client asks. Every question is asked twice, in prompts that
the prefix cache cannot know: without extra keys (vLLM as it is) and with them (segment reuse).

With `--model DIR`, a model of your own answers questions instead: see `bench/english/demo.py`.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench import harness, shapes
from bench.server import Server, ServerError
from examples.rag.chat import Answer, EmptyStreamError, ask

SHAPE = "bench8"
TOPICS = ("assignment", "comparisons", "execmodel", "try")
QUESTIONS = (
    "How are names bound by an assignment to a tuple?",
    "When are two values of different types equal?",
    "Which block does a free variable belong to?",
    "What happens to an exception raised in a finally clause?",
    "How do chained comparisons evaluate their operands?",
    "What does the except* clause match?",
)
EXTRA_KEYS = ["demo-library"]
SERVER_ARGS = (
    *("--max-model-len", "16384"),
    *("--block-size", "32"),
    "--enforce-eager",  # compiling the model would take longer than the whole demo
)
MAX_TOKENS = 4


class DemoError(RuntimeError):
    """Something that the demo promises did not happen."""


class Asked(NamedTuple):
    """One question, asked both ways; both prompts have the same length but for a token or two."""

    question: str
    order: tuple[int, ...]
    plain: Answer
    reused: Answer

    @property
    def speedup(self) -> float:
        return self.plain.ttft_s / self.reused.ttft_s


class Library:
    """The passages, and a client that asks about them."""

    def __init__(self, client: Any, model: str, policy: str | None) -> None:
        self._client = client
        self._model = model
        self._with_reuse: dict[str, Any] = {"extra_keys": EXTRA_KEYS}
        if policy is not None:
            self._with_reuse["vllm_xargs"] = {"segreuse_policy": policy}
        texts = dict(shapes.passages())
        self.passages = [texts[topic].strip() for topic in TOPICS]
        self._conversations = itertools.count(1)

    def ingest(self, passage: str) -> int:
        """Compute one passage once, in the namespace of the library; returns its tokens."""
        done = self._client.completions.create(
            model=self._model,
            prompt=passage,
            max_tokens=1,
            extra_body={"extra_keys": EXTRA_KEYS},
        )
        return int(done.usage.prompt_tokens)

    def ask(self, question: str, order: Sequence[int], reuse: bool) -> Answer:
        """Ask in a conversation of its own, whose number is the first thing in the prompt."""
        system = f"Conversation {next(self._conversations)}. Answer from the passages."
        body = "\n\n".join(self.passages[index] for index in order)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"{body}\n\nQuestion: {question}"},
        ]
        return ask(
            self._client,
            self._model,
            messages,
            max_tokens=MAX_TOKENS,
            extra_body=self._with_reuse if reuse else None,
        )


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make demo", description="Segment reuse on real text.")
    parser.add_argument("--policy", help="instead of the server's default: shift or sparsex")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="show answers of this model: a Hugging Face folder",
    )
    parser.add_argument(
        "--questions", type=int, default=6, metavar="N", help="with --model: how many (%(default)s)"
    )
    args = parser.parse_args(argv)
    if args.model:
        if args.policy or args.json:
            parser.error("--policy and --json are for the demo without --model")
        if args.questions < 1:
            parser.error(f"--questions {args.questions}: at least 1 is needed")
    try:
        if args.model:
            from bench.english import demo as english

            english.show(args.model, args.questions)
        else:
            _time(args.policy, args.json)
    except (DemoError, ServerError, harness.BenchError) as error:
        print(f"segreuse demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("segreuse demo: interrupted", file=sys.stderr)
        return 130
    return 0


def _time(policy: str | None, json_file: Path | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    where = harness.environment() | {"quick": False}
    asked = converse(console, policy)
    show(console, asked)
    if json_file:
        harness.write_json(json_file, "demo", where, result(asked))


def converse(console: Console, policy: str | None = None) -> list[Asked]:
    """Start the server, ingest the passages, and ask all questions both ways.

    Raises:
        DemoError: nothing was reused, or a request failed.
        ServerError: the server did not start.
    """
    console.print("Making a small model with random weights (nothing is downloaded) ...")
    model = shapes.make_model(SHAPE)
    server = Server(model, SERVER_ARGS)
    console.print(f"Starting the server, about half a minute; its log is {server.log} ...")
    with server:
        import openai

        try:
            return ask_all(console, Library(server.client(), server.model_name, policy))
        except openai.OpenAIError as error:
            tail = server.log_tail()
            raise DemoError(f"{error}; the end of the log {server.log}:\n{tail}") from error
        except (DemoError, EmptyStreamError) as error:
            raise DemoError(f"{error} (server log: {server.log})") from error


def result(asked: list[Asked]) -> harness.SuiteResult:
    """What was seen, as a benchmark's result: eager, on random weights."""
    rows: list[harness.Row] = [
        {
            "shape": SHAPE,
            "execution": "eager",
            "question": row.question,
            "prompt_tokens": row.reused.prompt_tokens,
            **{
                name: (row.reused.report or {})[name]
                for name in ("policy", "reused_tokens", "recomputed_tokens")
            },
            "full_ms": row.plain.ttft_s * 1e3,
            "reuse_ms": row.reused.ttft_s * 1e3,
            "speedup": row.speedup,
        }
        for row in asked
    ]
    speedups = [row.speedup for row in asked]
    low, high = harness.median_interval(speedups)
    return {
        "rows": rows,
        "summary": {
            "speedup": harness.median(speedups),
            "speedup_low": low,
            "speedup_high": high,
            "reused_share": sum(row["reused_tokens"] for row in rows)
            / sum(row["prompt_tokens"] for row in rows),
            "questions": len(rows),
        },
    }


def ask_all(console: Console, library: Library) -> list[Asked]:
    """Ingest the passages, and ask each question without and with reuse."""
    sizes = [library.ingest(passage) for passage in library.passages]
    listed = ", ".join(f"{topic} ({size})" for topic, size in zip(TOPICS, sizes, strict=True))
    console.print(f"Ingested {len(sizes)} passages of Python's reference (tokens): {listed}")
    console.print(f"Asking {len(QUESTIONS)} questions, each without and with reuse ...")
    orders = list(itertools.permutations(range(len(sizes))))
    asked = []
    for number, question in enumerate(QUESTIONS):
        order = orders[(number + 1) * 7 % len(orders)]
        # Taking turns at going first, so that neither way profits from a warm machine.
        first, second = (number % 2 == 1), (number % 2 == 0)
        answers = {
            first: library.ask(question, order, reuse=first),
            second: library.ask(question, order, reuse=second),
        }
        pair = Asked(question, order, answers[False], answers[True])
        asked.append(_checked(pair, sum(sizes)))
    return asked


def _checked(asked: Asked, library_tokens: int) -> Asked:
    """Fail unless nearly all of the passages was reused, and nothing in the plain prompt."""
    if asked.plain.report is not None:
        raise DemoError(f"a request without extra keys was reported as {asked.plain.report}")
    if asked.reused.report is None:
        raise DemoError("segment reuse is off: a request with extra keys carries no report")
    if asked.reused.report["reused_tokens"] < 0.9 * library_tokens:
        raise DemoError(
            f"of {library_tokens} tokens of known passages too few were reused; the report says "
            f"{asked.reused.report}"
        )
    return asked


def show(console: Console, asked: list[Asked]) -> None:
    """Print a row per question, and a last line that sums them up."""
    table = Table(
        "question", "passages", "prompt\ntokens", "reused", "of these\nrecomputed",
        "TTFT without\nreuse", "TTFT with\nreuse", "speed-up",
    )  # fmt: skip
    for column in table.columns[2:]:
        column.justify = "right"
    for row in asked:
        report = row.reused.report or {}
        table.add_row(
            row.question,
            " ".join("ABCDEFGH"[index] for index in row.order),
            f"{row.reused.prompt_tokens}",
            f"{report['reused_tokens']}",
            f"{report['recomputed_tokens']}",
            f"{row.plain.ttft_s * 1e3:.0f} ms",
            f"{row.reused.ttft_s * 1e3:.0f} ms",
            f"{row.speedup:.1f}x",
        )
    console.print(table)
    policy = (asked[0].reused.report or {})["policy"]
    console.print(
        f"TTFT is the time to the first token; the policy was {policy}. Reused tokens kept the KV "
        "they had, moved to their new position, except for those recomputed. The model's weights "
        "are random: its answers would be noise and are not shown. The times are real."
    )
    reused = sum((row.reused.report or {})["reused_tokens"] for row in asked)
    total = sum(row.reused.prompt_tokens for row in asked)
    speedup = harness.median([row.speedup for row in asked])
    print(f"segreuse demo ok: speedup={speedup:.1f}x reused={reused} of {total} prompt tokens")


if __name__ == "__main__":
    harness.exit_on_signals()
    sys.exit(main())
