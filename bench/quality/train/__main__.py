# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.quality.train OUT`: train the bundled model from nothing.

A curriculum of stages, each left once its tasks are solved or its steps are used up. On two CPU
cores it takes about an hour; on a GPU minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, deque
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F  # noqa: N812

from bench.quality import language
from bench.quality.train import mixture
from bench.quality.train.mixture import Stage
from bench.quality.train.model import Qwen3, Shape
from bench.quality.train.optimizer import Optimizer

# Stage, most steps, accuracy of the worst kind of question (counting aside, which is learnt from
# the first stage to the last) at which the stage is left.
CURRICULUM = [
    (Stage(48, 96, max_hops=0, recall=1.0), 1500, 0.98),
    (Stage(96, 48, max_hops=1, recall=0.3), 1500, 0.93),
    (Stage(128, 36, max_hops=2, recall=0.1), 1200, 0.94),
    (Stage(192, 24, max_hops=3, recall=0.05), 1200, 0.95),
    (Stage(320, 14, max_hops=4, recall=0.05), 800, 0.96),
    (Stage(640, 7, max_hops=4, recall=0.02), 800, 0.97),
    (Stage(1280, 4, max_hops=4), 800, 0.98),
    # Counting is learnt last: it needs many examples at little else to learn.
    (Stage(128, 36, max_hops=3, counting=0.9, frequent=0.8), 1200, 1.01),
    (Stage(512, 9, max_hops=4, counting=0.8, frequent=0.8), 500, 1.01),
    (Stage(2304, 2, max_hops=4, counting=0.7, frequent=0.7), 6000, 1.01),
]
COUNTING = ("common", "frequent")
WINDOW = 100
WARM_UP = 100
MATRIX_RATE = 0.02
OTHER_RATE = 0.004
FULL_STOP = language.TOKEN_OF["."]


class Accuracy:
    """Share of right words per kind of question, over the last `WINDOW` batches."""

    def __init__(self) -> None:
        self.right: deque[Counter[str]] = deque(maxlen=WINDOW)
        self.asked: deque[Counter[str]] = deque(maxlen=WINDOW)

    def add(self, right: torch.Tensor, labels: torch.Tensor, batch: mixture.Batch) -> None:
        """Count one batch; full stops are left out, since everybody gets those right."""
        kinds = torch.from_numpy(batch.kinds)
        counted = labels != FULL_STOP
        asked = torch.bincount(kinds[counted], minlength=len(batch.names)).tolist()
        hits = torch.bincount(kinds[counted & right], minlength=len(batch.names)).tolist()
        self.asked.append(Counter(dict(zip(batch.names, asked, strict=True))))
        self.right.append(Counter(dict(zip(batch.names, hits, strict=True))))

    def by_kind(self) -> dict[str, float]:
        """Accuracy of every kind that was asked."""
        asked, right = sum(self.asked, Counter()), sum(self.right, Counter())
        return {kind: right[kind] / count for kind, count in sorted(asked.items())}

    def worst(self) -> float:
        """Accuracy of the worst kind, counting aside."""
        return min(share for kind, share in self.by_kind().items() if kind not in COUNTING)


def train(
    out: Path,
    seed: int,
    device: str,
    minutes: float | None,
    start: Path | None = None,
    first_stage: int = 0,
    rate: float = 1.0,
) -> None:
    """Train, and write `model.pt` and `curve.jsonl` into `out`.

    Args:
        out: folder, made if missing.
        seed: of weights and data.
        device: torch device.
        start: a `model.pt` to go on from.
        first_stage: stage of the curriculum to begin with.
        rate: factor of all learning rates.
        minutes: bound of the whole; rates then fall over the last third of it.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    shape = Shape(language.VOCABULARY_SIZE)
    model = Qwen3(shape).to(device)
    if start is not None:
        model.load_state_dict(torch.load(start, weights_only=True)["model"])
    trunk = torch.compile(model, dynamic=False)
    optimizer = Optimizer(model, rate * MATRIX_RATE, rate * OTHER_RATE)
    rng = Random(seed)
    started, tokens, step = time.monotonic(), 0, 0
    with (out / "curve.jsonl").open("w") as curve:
        for number, (stage, most, enough) in enumerate(CURRICULUM):
            if number < first_stage:
                continue
            last = number == len(CURRICULUM) - 1
            accuracy = Accuracy()
            losses: deque[float] = deque(maxlen=WINDOW)
            for stage_step in range(1, most + 1):
                left = 1 - stage_step / most if last else 1.0
                if minutes is not None:
                    left = min(left, 1.5 * (1 - (time.monotonic() - started) / 60 / minutes))
                if left <= 0:
                    break
                step += 1
                batch = mixture.batch(rng, stage)
                loss, right, labels = _learn(model, trunk, batch, device)
                loss.backward()
                # A new stage is entered gently: its gradients are of another size.
                warm = min(1.0, stage_step / WARM_UP)
                optimizer.step(min(1.0, left / 0.7) * warm)
                tokens += batch.tokens.size
                losses.append(loss.item())
                accuracy.add(right, labels, batch)
                if stage_step % WINDOW == 0:
                    entry = {
                        "stage": number,
                        "length": stage.length,
                        "step": step,
                        "tokens": tokens,
                        "seconds": round(time.monotonic() - started, 1),
                        "loss": round(sum(losses) / len(losses), 4),
                        "accuracy": {k: round(v, 4) for k, v in accuracy.by_kind().items()},
                    }
                    curve.write(json.dumps(entry) + "\n")
                    curve.flush()
                    print(json.dumps(entry), flush=True)
                    _save(model, out)
                    if accuracy.worst() >= enough:
                        break
    _save(model, out)


def _save(model: Qwen3, out: Path) -> None:
    torch.save({"shape": asdict(model.shape), "model": model.state_dict()}, out / "model.pt")


def _learn(
    model: Qwen3, trunk: torch.nn.Module, batch: mixture.Batch, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The batch's loss, which of the words to learn were right, and these words."""
    tokens = torch.from_numpy(batch.tokens).to(device)
    where = torch.from_numpy(batch.where).to(device)
    labels = tokens.flatten()[where + 1]
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        hidden = trunk(tokens).flatten(0, 1)
        logits = model.head(hidden[where]).float()
    right = (logits.argmax(-1) == labels).cpu()
    return F.cross_entropy(logits, labels), right, labels.cpu()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for model.pt and curve.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--start", type=Path, metavar="MODEL.pt", help="go on from this model")
    parser.add_argument(
        "--first-stage", type=int, default=0, help="stage of the curriculum to begin with"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="factor of all learning rates")
    arguments = parser.parse_args()
    train(**vars(arguments))


if __name__ == "__main__":
    main()
