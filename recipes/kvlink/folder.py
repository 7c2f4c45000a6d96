# SPDX-License-Identifier: Apache-2.0
"""A model's folder with the tokens of the layout: what is added before training, and written after.

What is written serves: `config.json` names the layout (key `segreuse`), the tokenizer has its
tokens, and the chat template lays prompts out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recipes.kvlink.rows import Writer
from segreuse_extras.trained.anchors import AnchorNames
from segreuse_extras.trained.folder import layout_with
from segreuse_extras.trained.layout import LayoutError, Names
from vllm_segreuse.model.documents import KEY

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
MESSAGES = "{%- for message in messages -%}"
"""Where the template's part for documents ends."""

EMBEDDING_MULTIPLE = 64
"""Rows of the embedding, so that they divide among ranks and vector lanes."""

SAME = 1e-3
"""Log-probabilities of one text at two places differ by less if the model knows distances only."""


class ModelError(ValueError):
    """A model that this recipe cannot train; says why."""


def names_for(
    link_tokens: int, max_documents: int, chunk_tokens: int = 0, anchor_tokens: int = 0
) -> Names:
    """The layout of a model that has none yet, with the usual names.

    Args:
        chunk_tokens, anchor_tokens: of compressed documents; no anchors: documents stay whole.

    Raises:
        LayoutError: a number is out of range.
    """
    anchors = AnchorNames(chunk_tokens, anchor_tokens)._asdict() if anchor_tokens else None
    names = Names.of_config(
        {
            "anchors": anchors,
            "isolated_documents": True,
            "link_tokens": link_tokens,
            "max_documents": max_documents,
            "document_start": "<|kv_start|>",
            "document_end": "<|kv_end|>",
            "link_token": "<|link_{document}_{index}|>",
        }
    )
    assert names is not None
    return names


def known(config: Any) -> Names | None:
    """What the configuration of a loaded model says; None: it is an ordinary model.

    Raises:
        ModelError: it contradicts itself.
    """
    try:
        return Names.of_config(getattr(config, KEY, None))
    except LayoutError as error:
        raise ModelError(str(error)) from None


def add_tokens(model: Any, tokenizer: Any, names: Names) -> None:
    """Give tokenizer and model the tokens of the layout that they lack."""
    have, known = tokenizer.get_vocab(), len(tokenizer)
    tokenizer.add_tokens([text for text in names.texts if text not in have], special_tokens=True)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=EMBEDDING_MULTIPLE)
    _tell_apart(model.get_input_embeddings().weight, known, len(tokenizer))
    setattr(model.config, KEY, names.block())


@torch.no_grad()
def _tell_apart(rows: torch.Tensor, known: int, count: int) -> None:
    """Begin each new row near that of some known token: near the mean of all, where transformers
    puts them, the model cannot tell one from another."""
    like = torch.randperm(known)[torch.arange(count - known) % known]
    noise = torch.randn(count - known, rows.shape[1]) * rows[:known].std().cpu()
    rows[known:count] = 0.7 * rows[like] + 0.5 * noise.to(rows)


def template_of(tokenizer: Any, names: Names, file: Path | None) -> str:
    """The chat template: documents first, then messages as the model's own template has them.

    Args:
        file: a template instead, `LINK_TOKENS` in it standing for their number.
    """
    if file is None and KEY_TEXT in (tokenizer.chat_template or ""):
        return str(tokenizer.chat_template)  # of a folder that this recipe wrote
    text = (file or TEMPLATE).read_text()
    if file is None and tokenizer.chat_template:
        text = text[: text.index(MESSAGES)] + tokenizer.chat_template
    return text.replace("LINK_TOKENS", str(names.link_tokens))


KEY_TEXT = "<|kv_start|>"


def writer(tokenizer: Any, names: Names, max_tokens: int) -> Writer:
    """Lays out rows for the folder.

    Raises:
        ModelError: the tokenizer lacks a token of the layout.
    """
    try:
        layout = layout_with(names, tokenizer)
    except LayoutError as error:
        raise ModelError(str(error)) from None
    # Rows are made of texts, which the writer itself cuts into chunks.
    return Writer(tokenizer, replace(layout, anchors=None), max_tokens, layout.anchors)


@torch.no_grad()
def require_rotary(model: Any) -> None:
    """Raises ModelError unless a text means the same wherever it stands, as with RoPE."""
    if getattr(model.get_decoder(), "rotary_emb", None) is None:
        raise ModelError(
            f"{type(model).__name__} has no rotary position embedding (RoPE): documents that were "
            "computed alone cannot be moved to their place"
        )
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        raise ModelError(f"layers of {sorted(kinds)} are not supported: full attention only")
    size = model.config.vocab_size
    tokens = torch.arange(1, 17, device=model.device)[None] % size
    place = torch.arange(16, device=model.device)[None]
    near, far = (
        model(tokens, position_ids=place + start).logits.float().log_softmax(-1)
        for start in (0, 32)
    )
    if (near - far).abs().max() > SAME * (1 if model.dtype == torch.float32 else 100):
        raise ModelError(
            "the model answers otherwise when its text moves: its positions are not relative, and "
            "documents that were computed alone cannot be moved to their place"
        )
