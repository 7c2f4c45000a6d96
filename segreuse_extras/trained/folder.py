# SPDX-License-Identifier: Apache-2.0
"""The layout that a model's folder says, as vLLM has loaded it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segreuse_extras.trained.layout import Layout, LayoutError, Names
from vllm_segreuse.model.documents import KEY

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def names_of(model_config: ModelConfig) -> Names | None:
    """What `config.json` says; None: an ordinary model.

    Raises:
        LayoutError: it contradicts itself.
    """
    return Names.of_config(getattr(model_config.hf_config, KEY, None))


def layout_of(model_config: ModelConfig) -> Layout | None:
    """The layout in ids of the model's tokenizer; None: an ordinary model.

    Raises:
        LayoutError: config.json contradicts itself or the tokenizer, or there is no tokenizer.
    """
    names = names_of(model_config)
    if names is None:
        return None
    if model_config.skip_tokenizer_init:
        raise LayoutError("documents are found by special tokens: remove --skip-tokenizer-init")
    from vllm.tokenizers import cached_tokenizer_from_config

    return layout_with(names, cached_tokenizer_from_config(model_config))


def layout_with(names: Names, tokenizer: Any) -> Layout:
    """The layout in ids of a tokenizer.

    Raises:
        LayoutError: see `Names.layout`.
    """
    known = tokenizer.get_vocab()

    def token_id(text: str) -> int | None:
        found = known.get(text)
        is_single = tokenizer.encode(text, add_special_tokens=False) == [found]
        return found if is_single else None

    return names.layout(token_id)
