# SPDX-License-Identifier: Apache-2.0
"""A model's folder with the tokens of the layout: what is added before training, and written after.

What is written serves: `config.json` names the layout (key `segreuse`), the tokenizer has its
tokens, and the chat template lays prompts out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.kvlink.rows import Anchors, Writer
from vllm_segreuse.documents.layout import KEY, LayoutError, Names

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
MESSAGES = "{%- for message in messages -%}"
"""Where the template's part for documents ends."""

EMBEDDING_MULTIPLE = 64
"""Rows of the embedding, so that they divide among ranks and vector lanes."""

SAME = 1e-3
"""Log-probabilities of one text at two places differ by less if the model knows distances only."""


class ModelError(ValueError):
    """A model that this recipe cannot train; says why."""


@dataclass(frozen=True)
class Compression:
    """Of documents: `anchor_tokens` for each chunk of `chunk_tokens`."""

    chunk_tokens: int
    anchor_tokens: int
    anchor_token: str = "<|anchor_{index}|>"

    @property
    def texts(self) -> list[str]:
        """All anchor tokens."""
        count = range(1, self.anchor_tokens + 1)
        return [self.anchor_token.replace("{index}", str(index)) for index in count]


@dataclass(frozen=True)
class Trained:
    """What a folder says it is trained for."""

    names: Names
    compression: Compression | None

    def block(self) -> dict[str, Any]:
        """The key `segreuse` of config.json."""
        block = {"isolated_documents": True, **asdict(self.names)}
        block.pop("anchors", None)
        if self.compression is not None:
            block["anchors"] = asdict(self.compression)
        return block


def names_for(link_tokens: int, max_documents: int) -> Names:
    """The layout of a model that has none yet, with the usual names.

    Raises:
        LayoutError: a number is out of range.
    """
    names = Names.of_config(
        {
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


def known(config: Any) -> Trained | None:
    """What the configuration of a loaded model says; None: it is an ordinary model.

    Raises:
        ModelError: it contradicts itself.
    """
    block = getattr(config, KEY, None)
    if block is None:
        return None
    given = dict(block)
    anchors = given.pop("anchors", None)
    try:
        names = Names.of_config(given)
        assert names is not None
        return Trained(names, Compression(**anchors) if anchors else None)
    except (LayoutError, TypeError) as error:
        raise ModelError(str(error)) from None


def add_tokens(model: Any, tokenizer: Any, trained: Trained) -> None:
    """Give tokenizer and model the tokens of the layout that they lack."""
    names = trained.names
    texts = [names.document_start, names.document_end]
    for document in range(1, names.max_documents + 1):
        texts += [names.link(document, index) for index in range(1, names.link_tokens + 1)]
    if trained.compression is not None:
        texts += trained.compression.texts
    have = tokenizer.get_vocab()
    tokenizer.add_tokens([text for text in texts if text not in have], special_tokens=True)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=EMBEDDING_MULTIPLE)
    setattr(model.config, KEY, trained.block())


def template_of(tokenizer: Any, trained: Trained, file: Path | None) -> str:
    """The chat template: documents first, then messages as the model's own template has them.

    Args:
        file: a template instead, `LINK_TOKENS` in it standing for their number.
    """
    if file is None and KEY_TEXT in (tokenizer.chat_template or ""):
        return str(tokenizer.chat_template)  # of a folder that this recipe wrote
    text = (file or TEMPLATE).read_text()
    if file is None and tokenizer.chat_template:
        text = text[: text.index(MESSAGES)] + tokenizer.chat_template
    return text.replace("LINK_TOKENS", str(trained.names.link_tokens))


KEY_TEXT = "<|kv_start|>"


def writer(tokenizer: Any, trained: Trained, max_tokens: int) -> Writer:
    """Lays out rows for the folder.

    Raises:
        ModelError: the tokenizer lacks a token of the layout.
    """

    def token_id(text: str) -> int | None:
        found: int | None = tokenizer.get_vocab().get(text)
        is_single = tokenizer.encode(text, add_special_tokens=False) == [found]
        return found if is_single else None

    try:
        layout = trained.names.layout(token_id)
    except LayoutError as error:
        raise ModelError(str(error)) from None
    anchors = None
    if trained.compression is not None:
        ids = [token_id(text) for text in trained.compression.texts]
        if None in ids:
            raise ModelError("the tokenizer lacks an anchor token that config.json promises")
        anchors = Anchors(trained.compression.chunk_tokens, tuple(i for i in ids if i is not None))
    return Writer(tokenizer, layout, max_tokens, anchors)


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
