# SPDX-License-Identifier: Apache-2.0
"""Models of text and images (M-RoPE): text is reused, and images that were seen before.

vLLM imports torchvision for them, and transformers looks for it once. As a script, this file is the
engine, with a stand-in for torchvision on its path:
    python -m tests.e2e.test_vision SHAPE
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import VISION, VISION_TOKENS
from tests.e2e.engine import NAMESPACE, Engine, diagnosed, engine
from tests.e2e.test_equality import EVERYTHING, assert_same, check_every_way, prompts_for
from tests.e2e.vision_images import ARGUMENTS, check_images

STAND_INS = Path(__file__).parent / "stand_ins"
NOISE = 2e-3  # of float32
MORE_SHAPES = pytest.mark.slow("another shape", instead="e2e/test_vision")


@pytest.mark.shows("recompute", "partial", "images")
@pytest.mark.parametrize(
    "shape",
    [pytest.param("qwen2_5_vl", marks=MORE_SHAPES), "qwen3_vl"],
)
def test_35_text_and_images_are_reused(shape: str) -> None:
    assert shape in VISION
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-m", "tests.e2e.test_vision", shape],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]


def with_image(text: list[int], color: str, first_special: int) -> dict[str, Any]:
    """A prompt with a picture of one color behind its first tokens."""
    from PIL import Image

    start, end, image, _ = range(first_special, first_special + len(VISION_TOKENS))
    tokens = [*text[:300], start, image, end, *text[300:]]
    picture = Image.new("RGB", (112, 112), color)
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": picture}}


def check(shape: str) -> None:
    """All of it, in one engine beside plain vLLM; and what the doctor says without one."""
    found = diagnosed(shape, dtype="float32")
    assert (found.works, found.reasons, found.notes) == (True, (), ())
    with engine(shape, segreuse=False, dtype="float32") as plain:
        words = plain.vocab_size - len(VISION_TOKENS)
        documents, prompts = prompts_for(words)
        pictures = [with_image(prompts[0], color, words) for color in ("red", "blue")]
        expected, pictured = plain.ask(*prompts), plain.ask(*pictures)
    with pytest.raises(AssertionError, match="log-probabilities differ"):
        assert_same(pictured[0], pictured[1], 5 * NOISE)
    with engine(shape, dtype="float32", **ARGUMENTS) as reusing:
        check_every_way(reusing, documents, prompts, expected, NOISE)
        check_part(reusing, documents, prompts, expected)
        check_new_images(reusing, documents, prompts, expected, pictures, pictured)
        check_images(reusing, words, NOISE)


def check_part(reusing: Engine, documents: Any, prompts: Any, expected: Any) -> None:
    """Nothing is recomputed: the answers are others, and their reports say what was saved."""
    reusing.reset()
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    answers = reusing.ask(*prompts, options=NAMESPACE | {"segreuse_policy": "shift"})
    for ours in answers:
        assert ours.report["recomputed_tokens"] == 0
        assert ours.cached_tokens == ours.report["reused_tokens"] > 200
    with pytest.raises(AssertionError, match="log-probabilities differ"):
        assert_same(answers[0], expected[0], 5 * NOISE)


def check_new_images(
    reusing: Engine, documents: Any, prompts: Any, expected: Any, pictures: Any, pictured: Any
) -> None:
    """Text in front of a new image is reused; beside a prompt of text, in one step."""
    reusing.reset()
    reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
    *images, text = reusing.ask(*pictures, prompts[1], options=EVERYTHING)
    assert text.report["reused_tokens"] > 200
    assert_same(text, expected[1], NOISE)
    for ours, theirs in zip(images, pictured, strict=True):
        assert (ours.report["bypass_reason"], ours.report["image_tokens"]) == (None, 0)
        assert 200 < ours.report["reused_tokens"] < 300
        assert_same(ours, theirs, NOISE)


if __name__ == "__main__":
    check(sys.argv[1])
