# SPDX-License-Identifier: Apache-2.0
"""Prompts to calibrate on: a JSONL file, one prompt per line, divided into what is reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from segreuse_tools.json_lines import json_lines

SAME_TOKENS = 15
"""Of two texts that may begin alike: fewer than a block, which the prefix cache finds."""


class PromptFileError(ValueError):
    """A line of the file is no prompt; the text names the line and what is expected."""


@dataclass(frozen=True)
class Texts:
    """A prompt as it is in the file.

    Attributes:
        where: file and number of the line, for messages.
        prefix, segments, suffix: as of a `SegmentedPrompt`.
    """

    where: str
    prefix: str
    segments: list[str]
    suffix: str


@dataclass(frozen=True)
class SegmentedPrompt:
    """Token ids of a prompt, in parts.

    Attributes:
        prefix: in front of the segments.
        segments: what is reused, each computed elsewhere before.
        suffix: behind them, at least one token.
    """

    prefix: list[int]
    segments: list[list[int]]
    suffix: list[int]

    @property
    def token_ids(self) -> list[int]:
        """The whole prompt."""
        return [*self.prefix, *(t for segment in self.segments for t in segment), *self.suffix]


def read_texts(file: Path) -> list[Texts]:
    """Read a file of lines `{"prefix": TEXT, "segments": [TEXT, ...], "suffix": TEXT}`.

    Blank lines are skipped.

    Raises:
        PromptFileError: the file cannot be read, holds fewer than two prompts, or a line is none.
    """
    found = [_texts(where, given) for where, given in json_lines(file, PromptFileError)]
    _check_count(file, len(found))
    return found


def tokenised(
    file: Path,
    texts: Sequence[Texts],
    encode: Callable[[str], list[int]],
    bos: int | None,
    max_model_len: int,
) -> list[SegmentedPrompt]:
    """The prompts of a file. What is there twice counts once: else one half could choose and the
    other check by the same prompt.

    Args:
        file: for messages.
        texts: of the file.
        encode: text to token ids, without special tokens.
        bos: token that a sequence starts with, if the tokenizer adds one.
        max_model_len: of the engine: tokens of a prompt and an answer.

    Raises:
        PromptFileError: a prompt is too long, or fewer than two differ.
    """
    distinct: dict[tuple[int, ...], SegmentedPrompt] = {}
    for it in texts:
        prompt = SegmentedPrompt(
            [*([] if bos is None else [bos]), *encode(it.prefix)],
            [encode(segment) for segment in it.segments],
            encode(it.suffix),
        )
        if len(prompt.token_ids) >= max_model_len:
            raise PromptFileError(
                f"{it.where} has {len(prompt.token_ids)} tokens: max_model_len {max_model_len} "
                "leaves no room for an answer; make the prompt shorter or --max-model-len larger"
            )
        distinct.setdefault(tuple(prompt.token_ids), prompt)
    _check_count(file, len(distinct))
    return list(distinct.values())


def _check_count(file: Path, count: int) -> None:
    if count < 2:
        raise PromptFileError(
            f"{file} holds {count} prompts: at least 2 are needed, one half to choose a "
            "setting by and one to check it; some hundred give a useful bound"
        )


def _texts(where: str, given: Any) -> Texts:
    expected = '{"prefix": TEXT, "segments": [TEXT, ...], "suffix": TEXT}'
    if not isinstance(given, dict) or set(given) - {"prefix", "segments", "suffix"}:
        raise PromptFileError(f"{where} must be {expected}")
    prefix: Any = given.get("prefix", "")
    segments: Any = given.get("segments")
    suffix: Any = given.get("suffix")
    if not isinstance(prefix, str) or not _is_text(suffix) or not _are_texts(segments):
        raise PromptFileError(
            f"{where}: segments must be a list of non-empty texts, suffix a text that is not "
            f"empty, prefix a text if given; expected {expected}"
        )
    return Texts(where, prefix, segments, suffix)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def contexts(prompts: Sequence[SegmentedPrompt], index: int, max_model_len: int) -> list[list[int]]:
    """Prompts in which the segments of one prompt are computed before it is asked.

    Every other segment, in reverse, behind the beginning of another prompt: none of them is
    preceded by what precedes it in its own prompt, and the prompt's own beginning is not computed.
    Where that would not fit `max_model_len`, the beginning is shorter.
    """
    prompt = prompts[index]
    found = []
    for start in (0, 1):
        part = [token for segment in prompt.segments[start::2][::-1] for token in segment]
        if part:
            room = max_model_len - 1 - len(part)
            pairs = _in_front(prompts, index, start)
            whole = ([*_head(prefix, text, room), *part] for prefix, text in pairs)
            made_up = [*_head([], prompt.segments[0][::-1], room), *part]
            found.append(next((it for it in whole if not _begins(prompt, it)), made_up))
    return found


def _in_front(
    prompts: Sequence[SegmentedPrompt], index: int, start: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Prefix and segment of other prompts, the nearest one's first (but for so many, which come
    last); then prefix and suffix."""
    own = prompts[index].segments
    others = [prompts[index - back] for back in range(1, len(prompts))]
    segments = ((it.prefix, text) for it in others for text in it.segments if text not in own)
    suffixes = ((it.prefix, it.suffix) for it in others if it.suffix not in own)
    late = [*islice(segments, start)]
    yield from chain(segments, late, suffixes)


def _head(prefix: list[int], text: list[int], room: int) -> list[int]:
    """Both, in at most `room` tokens: the end of `text`, one token at least, and then `prefix`."""
    text = text[-max(1, room - len(prefix)) :]
    return [*prefix[: room - len(text)], *text]


def _begins(prompt: SegmentedPrompt, tokens: list[int]) -> bool:
    """Whether vLLM's prefix cache would find these tokens at the prompt's beginning."""
    enough = len(prompt.prefix) + SAME_TOKENS + 1
    return tokens[:enough] == prompt.token_ids[:enough]
