# SPDX-License-Identifier: Apache-2.0
"""A policy and its settings, chosen by prompts that are divided into what is reused."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segreuse_tools.calibrate import drift_limits, loaded_model
from segreuse_tools.calibrate.search import CANDIDATES, Found, Setting, too_few
from segreuse_tools.calibrate.segmented_prompts import SegmentedPrompt, Texts, read_texts, tokenised
from segreuse_tools.calibrate.trials import try_all
from segreuse_tools.calibrate.verdict_table import about_drift
from segreuse_tools.terminal import complain


def measure(given: argparse.Namespace, engine_arguments: Sequence[str]) -> Found:
    """Try every candidate.

    Raises:
        ConfigError: options of segment reuse are given.
        InputError: vLLM finds no device.
        PromptFileError: the file holds no prompts, or one that is too long.
    """
    texts = read_texts(given.prompts)  # before the engine starts, which takes long
    if note := too_few(len(texts), given.min_agreement):
        complain("calibrate", note)
    llm = _start(given.model, engine_arguments)
    prompts = _prompts(given.prompts, texts, llm)
    measured = list(map(Setting, CANDIDATES, try_all(llm, prompts)))
    settings = measured
    if given.max_drift:
        settings = [drift_limits.with_max_drift(setting, given.target_kl) for setting in measured]

    def about(index: int) -> str:
        return about_drift(measured[index].trials, given.target_kl)

    return Found(settings, about)


def _start(model: str, arguments: Sequence[str]) -> Any:
    return loaded_model.start(loaded_model.arguments_of(model, arguments))


def _prompts(file: Path, texts: Sequence[Texts], llm: Any) -> list[SegmentedPrompt]:
    tokenizer = llm.get_tokenizer()
    start = tokenizer("", add_special_tokens=True)["input_ids"][:1]
    return tokenised(
        file,
        texts,
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        start[0] if start else None,
        llm.llm_engine.model_config.max_model_len,
    )
