# SPDX-License-Identifier: Apache-2.0
"""`python -m bench edits --model DIR`: what edits of a conversation's context cost.

Conversations with a tool loop are edited (`edits`) and asked on, over HTTP, under several arms
(`arms`). An interrupt (Ctrl-C, or a SIGTERM) ends it early, with figures of what was measured.
Beside the file of `--json` each conversation is kept in a file of lines: a second start goes on
where the first stopped. `BENCH_QUALITY_SEEDS=tuning` draws the conversations on which options are
chosen.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai

from bench import harness, records
from bench.agents.arms import Arm
from bench.edits import resting, serving
from bench.edits.arms import ARMS, DEFAULT, ONCE, PREFIX, SERVER, SHIFT
from bench.edits.conversations import Conversation, draw
from bench.edits.edits import EDITS, Edit
from bench.edits.figures import result_of
from bench.edits.kept import Kept
from bench.edits.serving import Asked
from bench.edits.writing import Writer
from bench.english.command import UsageError, require_model
from bench.english.records import model_digest
from bench.quality import seeds
from bench.records import RecordsError
from bench.server import ServerError

T = TypeVar("T")

COLUMNS = (
    *("edit", "arm", "conversations", "at_prompt", "at_prefix_share", "at_known_share", "at_work"),
    *("at_ttft_s", "at_ttft_over_prefix", "at_kl_p90", "later_work", "later_ttft_over_prefix"),
    *("later_kl_p90", "later_right", "right_over_full"),
)
"""Of a row, what is printed; its file has more."""


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status: 2 for bad input, 130 if it was interrupted."""
    args = _parser().parse_args(argv)
    try:
        require_model(args.model)
        return run(args)
    except (UsageError, RecordsError) as error:
        print(f"bench edits: {error}", file=sys.stderr)
        return 2
    except (harness.BenchError, ServerError, openai.OpenAIError, httpx.HTTPError) as error:
        print(f"bench edits: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    """Measure, and report on what was measured.

    Raises:
        BenchError: nothing can be measured.
        RecordsError: what is kept beside `--json` is of another run.
    """
    from transformers import AutoTokenizer

    chosen = seeds.chosen()
    setting = {
        "model": args.model.resolve().name,
        "model_digest": model_digest(args.model),
        "steps": args.steps,
        "seeds": chosen,
        "seed": seeds.SETS[chosen],
    }
    where = harness.environment() | setting
    writer = Writer(AutoTokenizer.from_pretrained(args.model))
    conversations = [
        draw(seeds.rng(chosen, "edits", number), number, args.steps, writer.measure)
        for number in range(args.conversations)
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.heal_tokens:
        return _heal(args, where, writer, conversations)
    setting |= {"edits": args.edits, "arms": args.arms}
    file = records.beside(args.json) if args.json else None
    kept = Kept(file, setting, harness.commit())
    left = {n: one for n, one in enumerate(conversations) if n not in kept.conversations}
    edits = [EDITS[name] for name in args.edits]
    arms = [ARMS[name] for name in args.arms]
    asked = _asked(args.model, writer, left, edits, arms) if left else iter(())
    done = _unless_interrupted(asked, lambda one: kept.add(*one))
    if not kept.asked:
        raise harness.BenchError("nothing was measured")
    result = result_of(kept.asked, args.best)
    shown = [{name: row[name] for name in COLUMNS if name in row} for row in result["rows"]]
    result["rows"] += map(_plain, kept.asked)
    return _reported(args, where | {"interrupted": not done}, shown, result)


def _heal(
    args: argparse.Namespace,
    where: dict[str, Any],
    writer: Writer,
    conversations: Sequence[Conversation],
) -> int:
    """With and without healing, behind the first edit and under the best arm."""
    rested: list[resting.Rested] = []
    edit, arm = EDITS[args.edits[0]], ARMS[args.best]
    measured = resting.measure(
        args.model, SERVER, args.heal_tokens, writer, conversations, edit, arm
    )
    done = _unless_interrupted(measured, rested.extend)
    where |= {"edit": edit.name, "heal_tokens": args.heal_tokens, "interrupted": not done}
    result = resting.result_of(rested)
    return _reported(args, where, result["rows"][:2], result)


def _reported(
    args: argparse.Namespace,
    where: dict[str, Any],
    shown: list[dict[str, Any]],
    result: harness.SuiteResult,
) -> int:
    """Print some of the rows, and write all of them if that was asked for; the exit status."""
    harness.report("edits", where, {"rows": shown, "summary": result["summary"]})
    if args.json:
        harness.write_json(args.json, "edits", where, result)
    return 130 if where["interrupted"] else 0


def _plain(one: Asked) -> dict[str, Any]:
    told = {name: value for name, value in vars(one).items() if name != "likeliest"}
    return {**told, "ttft_s": round(one.ttft_s, 4), "tokens": vars(one.tokens)}


def _unless_interrupted(found: Iterator[T], take: Callable[[T], None]) -> bool:
    """Take what comes; returns whether all came."""
    try:
        for some in found:
            take(some)
    except KeyboardInterrupt:
        print("interrupted: figures are of what was measured", file=sys.stderr)
        return False
    return True


def _asked(
    model: Path,
    writer: Writer,
    conversations: Mapping[int, Conversation],
    edits: Sequence[Edit],
    arms: Sequence[Arm],
) -> Iterator[tuple[int, list[Asked]]]:
    """Of each conversation, all arms of an edit one after the other, each of them first in turn."""
    with serving.asking(model, SERVER, writer) as client:
        first = next(iter(conversations.values()))
        client.conversation(first, edits[0], arms[0])  # the first requests are slow
        for number, before in harness.progress([*conversations.items()], "edits"):
            client.reset()
            yield (
                number,
                [
                    one
                    for place, edit in enumerate(edits)
                    for arm in harness.rotated(arms, number + place)
                    for one in client.conversation(before, edit, arm)
                ],
            )


def _some(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {wrong[0]!r}; there are {', '.join(known)}")
        return names

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench edits", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a chat model")
    parser.add_argument("--steps", type=int, default=8, help="of the tool loop (%(default)s)")
    parser.add_argument("--conversations", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--edits", type=_some([*EDITS]), default=[*EDITS], help=", ".join(EDITS))
    parser.add_argument(
        "--arms",
        type=_some([*ARMS]),
        default=[PREFIX, SHIFT, DEFAULT, ONCE],
        help=", ".join(ARMS),
    )
    parser.add_argument("--best", choices=ARMS, default=ONCE, help="arm of the summary")
    parser.add_argument(
        "--heal-tokens",
        type=int,
        default=0,
        help="measure healing in parts of so many tokens instead, behind the first of the edits",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it here")
    return parser
