# SPDX-License-Identifier: Apache-2.0
"""What `test_vision` asks of prompts with images, in the process of its script."""

from __future__ import annotations

import random
from typing import Any

import torch

from bench.shapes import VISION_TOKENS
from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Answer, Engine, Prompts
from tests.e2e.test_equality import EVERYTHING, assert_same

ARGUMENTS = {
    "limit_mm_per_prompt": {"image": 3, "video": 0},
    "mm_processor_kwargs": {"max_pixels": 448 * 448},
}
"""Of engines: images of hundreds of tokens, and several in a prompt."""

LAYOUT_NOISE = 1e-4
SHIFT = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 16}
FULL = EVERYTHING | {"segreuse_explain": True, "segreuse_dense_layers": 0}


def picture(seed: int, width: int = 448, height: int = 336) -> Any:
    """Noise, which no other seed gives."""
    from PIL import Image

    size = (width // 14, height // 14)
    noise = random.Random(seed).randbytes(size[0] * size[1] * 3)
    return Image.frombytes("RGB", size, noise).resize((width, height), Image.Resampling.NEAREST)


class Pictured:
    """Prompts of text and images, in order.

    Args:
        words: text tokens of the vocabulary; behind them are those of vision models.
    """

    def __init__(self, words: int) -> None:
        self._start, self._end, self._image, _ = range(words, words + len(VISION_TOKENS))

    def prompt(self, *parts: Any) -> dict[str, Any]:
        """Lists of tokens, and pictures."""
        tokens: list[int] = []
        images = [part for part in parts if not isinstance(part, list)]
        for part in parts:
            tokens += part if isinstance(part, list) else [self._start, self._image, self._end]
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        return prompt | ({"multi_modal_data": {"image": images}} if images else {})


class Watched:
    """An engine that notes the blocks of each request, so that its KV can be read afterwards.

    Args:
        engine: with segment reuse.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        side = engine.scheduler.connector.scheduler_side
        self.blocks: list[int] = []
        allocated = side.allocated

        def note(request: Any, block_ids: list[int]) -> None:
            self.blocks = block_ids
            allocated(request, block_ids)

        side.allocated = note

    def ask(self, prompt: dict[str, Any], options: Any) -> tuple[Answer, torch.Tensor]:
        """The answer, and keys and values `[tokens, heads, 2 * channels]` of the first layer, which
        depend on a token and its place alone."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from vllm_segreuse.model.kv_format import typed_pages

        [answer] = self.engine.ask(prompt, options=options, max_tokens=4)
        prefill = get_kv_transfer_group().worker_side.backlog.prefill
        pages = typed_pages(prefill.runner.stack.attention[0])[self.blocks]
        layout = prefill.runner.layouts[0]
        halves = [part.tokens(pages).clone() for part in (layout.keys, layout.values)]
        return answer, torch.cat(halves, -1)


def check_images(reusing: Engine, words: int, noise: float) -> None:
    """Everything that is promised of prompts with images; references are computed by the same
    engine without extra keys, in an empty cache."""
    text, pictured, watched = Prompts(words, seed=3), Pictured(words), Watched(reusing)
    one, other, unseen = picture(1), picture(2), picture(3)
    around = [text.tokens(n) for n in (41, 130, 75)]
    donor = pictured.prompt(around[0], one, around[1], other, around[2])
    new, image_tokens = text.tokens(19), 0
    cases = {
        "moved": (pictured.prompt(new, *_parts(around, one, other)), 2),
        "swapped": (pictured.prompt(around[2], other, new, one, around[1]), 2),
        "text behind an image, alone": (pictured.prompt(new, around[1], around[2], new), 0),
        "one of two": (pictured.prompt(new, one, around[1], unseen, around[2]), 1),
        "in front": (pictured.prompt(one, around[1], around[0]), 1),
    }
    for name, (prompt, images) in cases.items():
        reusing.reset()
        _, expected = watched.ask(prompt, None)
        reusing.reset()
        reusing.ask(donor, options=NAMESPACE, max_tokens=1)
        answer, found = watched.ask(prompt, SHIFT | {"segreuse_explain": True})
        report = answer.report
        assert report["bypass_reason"] is None, name
        assert report["reused_tokens"] > 100, name
        count = report["prompt_tokens"]
        assert (report["image_tokens"] > 0) == (images > 0), name
        error = (found[:count] - expected[:count]).abs().max()
        assert error < LAYOUT_NOISE, f"{name}: first layer off by {error}"
        reasons = [it.get("reason") for it in report["explain"]]
        assert ("new_image" in reasons) == (name == "one of two"), reasons
        if name == "in front":
            image_tokens = report["image_tokens"]
    _check_misses(reusing, pictured, donor, around)
    _check_whole_context(reusing, pictured, text, one, noise)
    middle = len(around[0]) + image_tokens + len(around[1]) // 2
    _check_exact(watched, pictured.prompt(*_parts(around, one, other)), middle, noise)
    reusing.check_idle()


def _parts(around: list[list[int]], *images: Any) -> list[Any]:
    parts: list[Any] = [around[0]]
    for image, behind in zip(images, around[1:], strict=True):
        parts += [image, behind]
    return parts


def _check_misses(
    reusing: Engine, pictured: Pictured, donor: dict[str, Any], around: list[list[int]]
) -> None:
    """Another image of the same size, another resolution, another namespace; and what says so."""
    reusing.reset()
    reusing.ask(donor, options=NAMESPACE, max_tokens=1)
    prompts = [
        pictured.prompt([7], around[0], picture(4), around[1]),
        pictured.prompt([8], around[0], picture(1, width=336), around[1]),
        pictured.prompt([9], around[0], picture(1), around[1]),
    ]
    options = [SHIFT, SHIFT, SHIFT | {"extra_keys": ["others"]}]
    for answer in reusing.ask(*prompts[:2], options=options[:2]):
        assert answer.report["image_tokens"] == 0
        assert answer.report["reused_tokens"] <= len(around[0])
    [answer] = reusing.ask(prompts[2], options=options[2:])
    assert answer.report["reused_tokens"] == 0
    dense = NAMESPACE | {"segreuse_policy": "cacheblend"}
    known = pictured.prompt([6], *_parts(around, picture(1), picture(2)))
    [answer] = reusing.ask(known, options=dense)
    assert answer.report["bypass_reason"] == "images_in_dense_layers"


def _check_whole_context(
    reusing: Engine, pictured: Pictured, text: Prompts, image: Any, noise: float
) -> None:
    """An image in the context that it was computed in: with all text recomputed, nothing differs.

    A first request has the text elsewhere, so that the second one's blocks are no exact prefix.
    """
    front, behind, tail = text.tokens(200), text.tokens(90), text.tokens(33)
    prompt = pictured.prompt(front, image, behind, tail)
    reusing.reset()
    [reference] = reusing.ask(prompt)
    reusing.reset()
    reusing.ask([3, 4, 5, *front], options=NAMESPACE, max_tokens=1)
    [first] = reusing.ask(pictured.prompt(front, image, behind), options=FULL)
    assert 150 < first.report["reused_tokens"] < len(front)
    assert first.report["image_tokens"] == 0
    answers = [
        reusing.ask(prompt, options=FULL | {"segreuse_policy": policy})[0]
        for policy in ("sparsex", "prophet")
    ]
    for answer in answers:
        report = answer.report
        assert report["image_tokens"] > 100
        assert report["recomputed_tokens"] == report["reused_tokens"] - report["image_tokens"]
        assert_same(answer, reference, noise)


def _check_exact(watched: Watched, prompt: dict[str, Any], middle: int, noise: float) -> None:
    """The exact tier, with a hole in the text between two images."""
    exact = NAMESPACE | {"segreuse_policy": "exact", "segreuse_min_reused_tokens": 16}
    watched.engine.reset()
    reference, _ = watched.ask(prompt, None)
    watched.engine.pool.evict_blocks({watched.blocks[middle // BLOCK_SIZE]})
    answer, _ = watched.ask(prompt, exact)
    assert answer.report["exact_tokens"] > answer.report["image_tokens"] > 100, answer.report
    assert_same(answer, reference, noise)
