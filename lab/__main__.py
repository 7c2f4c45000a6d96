# SPDX-License-Identifier: Apache-2.0
"""`python -m lab OUT`: train the lab's model, or go on where that stopped.

A curriculum of lessons, each left once its tasks are solved or its steps are used up. Nothing
depends on the time it takes: a run that was stopped and called again ends with the same weights as
one that was not. One CPU core takes about two hours; a GPU minutes. `--kind hybrid` trains a
sibling with linear attention, which `lab.hybrids` asks, in less; so does `--kind mamba2`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from bench.quality import language
from lab import mixture
from lab.curriculum import CURRICULUM, HYBRID_CURRICULUM, Lesson
from lab.hybrid import Hybrid, HybridShape
from lab.model import Qwen3, Shape
from lab.optimizer import Optimizer

COUNTING = ("common", "frequent")
WINDOW = 100
WARM_UP = 100
MEAN_DECAY = 0.995
MATRIX_RATE = 0.02
OTHER_RATE = 0.004
FULL_STOP = language.TOKEN_OF["."]


@dataclass(frozen=True)
class Kind:
    """A kind of model, and how it is taught."""

    make: Callable[[], Qwen3 | Hybrid]
    curriculum: Sequence[Lesson]


KINDS = {
    "qwen3": Kind(lambda: Qwen3(Shape(language.VOCABULARY_SIZE)), CURRICULUM),
    "hybrid": Kind(lambda: Hybrid(HybridShape(language.VOCABULARY_SIZE)), HYBRID_CURRICULUM),
    "mamba2": Kind(
        lambda: Hybrid(HybridShape(language.VOCABULARY_SIZE, fades=True)), HYBRID_CURRICULUM
    ),
}


def compiled(model: Qwen3 | Hybrid) -> nn.Module:
    """A model whose code is made when it is first called with rows of some shape.

    Layers of a hybrid that are alike share theirs: scans are much code, which takes long to make.
    """
    if isinstance(model, Hybrid):
        for layer in model.layers:
            layer.compile(dynamic=False)
        return model
    return torch.compile(model, dynamic=False)


class Figures:
    """Loss, and share of right words per kind of question, over the steps that were added."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.right: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()

    def add(self, loss: Tensor, right: Tensor, labels: Tensor, batch: mixture.Batch) -> None:
        """Count one batch; full stops are left out, since everybody gets those right."""
        kinds = torch.from_numpy(batch.kinds)
        counted = labels != FULL_STOP
        asked = torch.bincount(kinds[counted], minlength=len(batch.names)).tolist()
        hits = torch.bincount(kinds[counted & right], minlength=len(batch.names)).tolist()
        self.losses.append(loss.item())
        self.asked.update(dict(zip(batch.names, asked, strict=True)))
        self.right.update(dict(zip(batch.names, hits, strict=True)))

    def loss(self) -> float:
        """Mean loss."""
        return sum(self.losses) / len(self.losses)

    def by_kind(self) -> dict[str, float]:
        """Accuracy of every kind that was asked."""
        return {kind: self.right[kind] / n for kind, n in sorted(self.asked.items()) if n}

    def worst(self) -> float:
        """Accuracy of the worst kind, counting aside."""
        shares = (share for kind, share in self.by_kind().items() if kind not in COUNTING)
        return min(shares, default=1.0)


class Training:
    """One training: its model, where it is in the curriculum, and what it has drawn so far."""

    def __init__(
        self,
        out: Path,
        seed: int,
        device: str,
        curriculum: Sequence[Lesson] | None = None,
        kind: str = "qwen3",
    ) -> None:
        """Begin, or go on with what `out` holds.

        Args:
            out: folder of `model.pt`, `curve.jsonl` and `state.pt`; made if missing.
            seed: of weights and data.
            device: torch device.
            curriculum: lessons, in order; None: those of the kind.
            kind: of model, a name of `KINDS`.

        Raises:
            ValueError: `out` holds a training of another seed or kind.
        """
        self.out, self.seed, self.device, self.kind = out, seed, device, kind
        self.curriculum = KINDS[kind].curriculum if curriculum is None else curriculum
        out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(seed)
        self.rng = Random(seed)
        self.model = KINDS[kind].make().to(device)
        self.trunk = compiled(self.model)
        self.optimizer = Optimizer(self.model, MATRIX_RATE, OTHER_RATE)
        self.lesson, self.lesson_step, self.step, self.tokens, self.seconds = 0, 0, 0, 0, 0.0
        self.mean: dict[str, Tensor] | None = None
        if self._state_file.exists():
            self._restore()
        else:
            self._curve_file.unlink(missing_ok=True)

    @property
    def _state_file(self) -> Path:
        return self.out / "state.pt"

    @property
    def _curve_file(self) -> Path:
        return self.out / "curve.jsonl"

    def run(self) -> None:
        """Learn all lessons that are left."""
        while self.lesson < len(self.curriculum):
            self._learn(self.curriculum[self.lesson])
            self.lesson, self.lesson_step = self.lesson + 1, 0
            self._save()

    def _learn(self, lesson: Lesson) -> None:
        figures = Figures()
        before = time.monotonic()
        while self.lesson_step < lesson.steps:
            batch = mixture.batch(self.rng, lesson.stage)
            figures.add(*self._learn_batch(batch), batch)
            self.lesson_step += 1
            self.step += 1
            self.tokens += batch.tokens.size
            # A new lesson is entered gently: its gradients are of another size.
            share = lesson.rate * min(1.0, self.lesson_step / WARM_UP)
            if lesson.falling:
                share *= 1 - self.lesson_step / lesson.steps
            self.optimizer.step(share)
            if lesson.falling:
                self._take_mean()
            if self.lesson_step % WINDOW == 0:
                now = time.monotonic()
                self.seconds, before = self.seconds + now - before, now
                self._report(lesson, figures)
                if figures.worst() >= lesson.enough:
                    return
                self._save()
                figures = Figures()

    def _learn_batch(self, batch: mixture.Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The batch's loss, which of the words to learn were right, and these words."""
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        where = torch.from_numpy(batch.where).to(self.device)
        labels = tokens.flatten()[where + 1]
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            hidden = self.trunk(tokens).flatten(0, 1)
            logits = self.model.head(hidden[where]).float()
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        return loss, (logits.argmax(-1) == labels).cpu(), labels.cpu()

    @torch.no_grad()
    def _take_mean(self) -> None:
        weights = self.model.state_dict()
        if self.mean is None:
            self.mean = {name: value.clone() for name, value in weights.items()}
        for name, value in weights.items():
            self.mean[name].lerp_(value, 1 - MEAN_DECAY)

    def _report(self, lesson: Lesson, figures: Figures) -> None:
        entry = {
            "stage": self.lesson,
            "length": lesson.stage.length,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "loss": round(figures.loss(), 4),
            "accuracy": {kind: round(share, 4) for kind, share in figures.by_kind().items()},
        }
        with self._curve_file.open("a") as curve:
            curve.write(json.dumps(entry) + "\n")
        print(json.dumps(entry), flush=True)

    def _save(self) -> None:
        """Write the model, and all that going on takes; a crash in between loses neither."""
        weights = self.model.state_dict()
        _write({"shape": asdict(self.model.shape), "model": self.mean or weights}, self._model_file)
        state = {
            "seed": self.seed,
            "kind": self.kind,
            "rng": self.rng.getstate(),
            "model": weights,
            "mean": self.mean,
            "optimizer": self.optimizer.state(),
        }
        _write(state | {name: getattr(self, name) for name in COUNTERS}, self._state_file)

    @property
    def _model_file(self) -> Path:
        return self.out / "model.pt"

    def _restore(self) -> None:
        state = torch.load(self._state_file, map_location=self.device, weights_only=True)
        if state["seed"] != self.seed:
            raise ValueError(
                f"{self.out} holds a training of seed {state['seed']}, not {self.seed}: "
                f"go on with --seed {state['seed']}, or name another folder"
            )
        if state.get("kind", "qwen3") != self.kind:
            raise ValueError(
                f"{self.out} holds a training of kind {state['kind']}, not {self.kind}: "
                f"go on with --kind {state['kind']}, or name another folder"
            )
        self.rng.setstate(state["rng"])
        self.model.load_state_dict(state["model"])
        self.mean = state["mean"]
        self.optimizer.restore(state["optimizer"])
        for name in COUNTERS:
            setattr(self, name, state[name])
        lines = self._curve_file.read_text().splitlines(keepends=True)
        self._curve_file.write_text(
            "".join(ln for ln in lines if json.loads(ln)["step"] <= self.step)
        )


COUNTERS = ("lesson", "lesson_step", "step", "tokens", "seconds")


def _write(saved: dict[str, Any], path: Path) -> None:
    beside = path.with_suffix(".new")
    torch.save(saved, beside)
    beside.replace(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for model.pt and curve.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default="qwen3", help="of model (qwen3)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    try:
        training = Training(given.out, given.seed, given.device, kind=given.kind)
    except ValueError as error:
        parser.error(str(error))
    training.run()


if __name__ == "__main__":
    main()
