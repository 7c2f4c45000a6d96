# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse calibrate --similarity` on the real engine, as a program of its own."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.shapes import make_model
from tests.estimate.logs import words
from vllm_segreuse.config import SegReuseConfig

pytestmark = pytest.mark.slow(
    "a program and its engine", instead="calibrate/test_by_similarity e2e/test_similar"
)

REQUESTS = 8


def log(file: Path) -> Path:
    """Forms of the same wording, filled in anew every dozen words, behind text of their own."""
    rng = random.Random(5)
    parts = [words(rng, 14) for _ in range(9)]
    with file.open("w", encoding="utf-8") as lines:
        for number in range(REQUESTS):
            form = " ".join(f"{part} {rng.randrange(10**6)}" for part in parts)
            body = {"prompt": f"{words(rng, 20)}\n{form}\n{words(rng, 6)}", "max_tokens": 4}
            lines.write(json.dumps(body | {"extra_keys": [f"half {number % 2}"]}) + "\n")
    return file


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The file that was written, and what was printed."""
    folder = tmp_path_factory.mktemp("calibrate")
    out = folder / "segreuse.yaml"
    command = [sys.executable, "-m", "segreuse_tools", "calibrate", str(make_model("llama"))]
    command += ["--similarity", "--prompts", str(log(folder / "log.jsonl")), "--out", str(out)]
    # Weights are random: any divergence will do.
    command += ["--max-kl", "100", "--min-agreement", "0"]
    command += ["--enforce-eager", "--dtype", "float32", "--block-size", "32"]
    command += ["--max-model-len", "2048", "--num-gpu-blocks-override", "300"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return out, done.stdout


def rows(printed: str) -> dict[str, float]:
    """Work by setting; the other columns are what it does to answers."""
    _, _, table = printed.partition("  setting ")
    settings, _, _ = table.partition("  on the prompts it was not chosen by")
    cells = [line[2:].rsplit(maxsplit=8) for line in settings.splitlines()[1:]]
    return {name.strip(): float(work) for name, work, *_ in cells}


def test_options_that_save_work_are_written(calibrated: tuple[Path, str]) -> None:
    out, printed = calibrated
    similarity = SegReuseConfig.from_yaml(out).similarity
    assert similarity is not None
    assert not similarity.halo_tokens, "bounds are wide, so that nothing is computed for them"
    assert similarity.w_exact, "nor are upper layers that shift would move"
    work = rows(printed)
    (chosen,) = [name for name in work if f"* {name} " in printed]
    assert work[chosen] < 0.8 * work["without similar text"]


def test_every_option_changes_what_is_computed(calibrated: tuple[Path, str]) -> None:
    work = rows(calibrated[1])
    loosest = work["threshold=0.5"]
    assert loosest < work["without similar text"]
    halos = [it for name, it in work.items() if "halo_tokens" in name]
    assert len(halos) == 3
    assert loosest < halos[0] < halos[1] < halos[2]
    cuts = [it for name, it in work.items() if name.endswith(": 0}")]
    assert cuts == sorted(cuts, reverse=True), "fewer layers are computed above higher cuts"
    assert len(set(cuts)) == len(cuts)
    half = "the half it was chosen by"
    assert half in calibrated[0].read_text(encoding="utf-8")
