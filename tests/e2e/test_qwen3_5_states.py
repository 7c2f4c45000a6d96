# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5: its states are composed as those of Qwen3-Next are, also beside images.

vLLM imports torchvision for all of these models, and transformers looks for it once: the tests of
Qwen3-Next run once more on each of them, in a process with a stand-in for torchvision on its path.
As a script, this file is the engine that is given images:
    python -m tests.e2e.test_qwen3_5_states SHAPE
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.shapes import COMPOSED, SHAPES, VISION_TOKENS, make_model
from tests.e2e.engine import NAMESPACE, Prompts, engine
from tests.e2e.test_composed_states import LENGTHS, NOISE, World, check, texts
from tests.e2e.test_equality import assert_same
from tests.e2e.test_vision import STAND_INS, with_image

pytestmark = pytest.mark.patches("gdn_attention")

MORE_SHAPES = pytest.mark.slow("another shape", instead="e2e/test_qwen3_5_states")
MODULES = "composed_states", "composed_states_start", "states_read_again"


def run(shape: str, *command: str) -> None:
    assert shape in COMPOSED
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | {"PYTHONPATH": path, "SEGREUSE_TEST_STATES": shape},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-4000:]


def run_tests(shape: str) -> None:
    """All tests of Qwen3-Next, in one process."""
    run(shape, "pytest", "-q", *(f"tests/e2e/test_{name}.py" for name in MODULES))


@pytest.mark.slow(
    "other shapes; that of Qwen3.5 starts, composes and equals full prefill below",
    instead="e2e/test_composed_states e2e/test_composed_states_start e2e/test_states_read_again",
)
@pytest.mark.timeout(1800)
@pytest.mark.shows("states")
@pytest.mark.parametrize("shape", ["qwen3_5_text", "qwen3_5", "qwen3_5_moe"])
def test_what_holds_of_qwen3_next_holds_of_others_of_the_delta_rule(shape: str) -> None:
    run_tests(shape)


@pytest.mark.parametrize("shape", ["qwen3_5", pytest.param("qwen3_5_moe", marks=MORE_SHAPES)])
def test_prompts_with_images_are_computed_in_full_beside_others(shape: str) -> None:
    run(shape, "tests.e2e.test_qwen3_5_states", shape)


def check_verdict(shape: str) -> None:
    """The doctor says what start-up does: an image is no reason to refuse the model."""
    from vllm.engine.arg_utils import EngineArgs

    from segreuse_tools.doctor.diagnosis import diagnose
    from vllm_segreuse.config import SegReuseConfig

    arguments = SHAPES[shape].arguments | {"enforce_eager": True, "max_model_len": 4096}
    args = EngineArgs(model=str(make_model(shape)), dtype="bfloat16", **arguments)
    found = diagnose(args, SegReuseConfig())
    assert (found.works, found.reasons) == (True, ())
    [note] = found.notes
    assert "its states are composed, which start-up proves on the loaded model" in note


def check_images(shape: str) -> None:
    """A prompt with an image has the text of others in it: it reuses nothing of theirs, no map is
    noted while it is computed, and it donates nothing."""
    with engine(shape, segreuse=False) as plain:
        words = plain.vocab_size - len(VISION_TOKENS)
        documents, _, prompt, _ = texts(words)
        other = Prompts(words, seed=5).tokens(900)
        behind = Prompts(words, seed=6).around(other, documents[0], gaps=(310, 20, 75))
        pictured = with_image(behind, "red", words)
        expected, full, otherwise = plain.ask(pictured, prompt, with_image(behind, "blue", words))
    assert expected.logprobs != otherwise.logprobs
    with engine(shape, segreuse={"policy": "shift"}) as running:
        world = World([], running)
        world.documents, world.first, world.prompt, world.again = texts(words)
        world.read()
        known = len(running.index)
        [image] = running.ask(pictured, options=NAMESPACE)
        assert (image.report["bypass_reason"], image.cached_tokens) == ("multimodal", 0)
        assert_same(image, expected, NOISE)
        assert len(world.feature.catalogue) == 2
        assert len(running.index) == known
        world.forget_prefix(len(prompt))
        image, text = running.ask(with_image(behind, "blue", words), prompt, options=NAMESPACE)
        assert_same(image, otherwise, NOISE)
        assert text.report["reused_tokens"] == sum(LENGTHS)
        assert_same(text, full, NOISE)
        check(running)


if __name__ == "__main__":
    check_verdict(sys.argv[1])
    check_images(sys.argv[1])
