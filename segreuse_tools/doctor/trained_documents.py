# SPDX-License-Identifier: Apache-2.0
"""The layout of documents that a model was trained for, as start-up checks it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segreuse_extras.trained.folder import layout_with, names_of
from segreuse_extras.trained.layout import LayoutError
from segreuse_extras.trained.refusals import check_options
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.engine.supported import RefusedError

if TYPE_CHECKING:
    from vllm.config import ModelConfig


@dataclass(frozen=True)
class TrainedDocuments:
    """Of a model that was trained on documents computed alone.

    Attributes:
        link_tokens: behind each document.
        max_documents: of a prompt.
        tokens: special tokens: start, end, the links of each document, then the anchors.
        anchors: what `config.json` says of compressed documents; None: they are whole.
        tokenizer: None: it has all of them; else why that is checked at start-up only.
    """

    link_tokens: int
    max_documents: int
    tokens: tuple[str, ...]
    anchors: dict[str, Any] | None
    tokenizer: str | None


def documents_of(
    model_config: ModelConfig, folder: Path, options: SegReuseConfig
) -> TrainedDocuments | None:
    """What `config.json` says of documents; None: an ordinary model.

    Args:
        folder: of the model, with its tokenizer if there is one.

    Raises:
        RefusedError: it contradicts itself, the tokenizer, or the options.
    """
    try:
        names = names_of(model_config)
        if names is None:
            return None
        check_options(options)
        tokenizer, unread = _tokenizer(folder)
        if tokenizer is not None:
            layout_with(names, tokenizer)
    except LayoutError as error:
        raise RefusedError(str(error)) from None
    anchors = None if names.anchors is None else names.anchors._asdict()
    return TrainedDocuments(names.link_tokens, names.max_documents, names.texts, anchors, unread)


def _tokenizer(folder: Path) -> tuple[Any, str | None]:
    """The tokenizer of a folder, or why there is none."""
    from transformers import AutoTokenizer

    if not any(folder.glob("tokenizer*")):
        return None, "the folder has no tokenizer"
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True), None
    except Exception as error:
        return None, f"the tokenizer cannot be read here ({type(error).__name__})"
