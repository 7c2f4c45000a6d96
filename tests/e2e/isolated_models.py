# SPDX-License-Identifier: Apache-2.0
"""Small models that say they were trained on documents computed alone, and what they answer."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.shapes import _write_tokenizer, make_model
from segreuse_extras.trained.anchors import AnchorNames
from segreuse_extras.trained.layout import Layout, Names

MAX_DOCUMENTS = 4
TEMPLATE = Path(__file__).parents[2] / "recipes/kvlink/chat_template.jinja"


def names(link_tokens: int, anchors: tuple[int, int] | None = None) -> dict[str, Any]:
    """What config.json says.

    Args:
        anchors: tokens and anchors of a chunk; None: documents are not compressed.
    """
    found = {
        "isolated_documents": True,
        "link_tokens": link_tokens,
        "max_documents": MAX_DOCUMENTS,
        "document_start": "<|kv_start|>",
        "document_end": "<|kv_end|>",
        "link_token": "<|link_{document}_{index}|>",
    }
    if anchors is not None:
        found["anchors"] = AnchorNames(*anchors)._asdict()
    return found


@functools.cache
def make_isolated(
    link_tokens: int, shape: str = "qwen3", anchors: tuple[int, int] | None = None
) -> Path:
    """A copy of a test model whose last tokens are those of the layout."""
    folder = Path(tempfile.mkdtemp(prefix=f"isolated{link_tokens}-")) / "model"
    shutil.copytree(make_model(shape), folder)
    block = names(link_tokens, anchors)
    said = Names.of_config(block)
    assert said is not None
    _write_tokenizer(folder, said.texts)
    config = json.loads((folder / "config.json").read_text()) | {"segreuse": block}
    (folder / "config.json").write_text(json.dumps(config))
    template = TEMPLATE.read_text().replace("LINK_TOKENS", str(link_tokens))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def layout_of(folder: Path) -> Layout:
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(folder).get_vocab()
    config = json.loads((folder / "config.json").read_text())
    said = Names.of_config(config["segreuse"])
    assert said is not None
    return said.layout(known.get)


def prompt_of(layout: Layout, head: list[int], documents: list[list[int]], question: list[int]):
    """Tokens of a prompt."""
    tokens = list(head)
    for number, document in enumerate(documents):
        tokens += [layout.start, *document, layout.end, *layout.links[number]]
    return tokens + question


class Reference:
    """The model in plain torch (transformers), in full, with the mask."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.layout = layout_of(folder)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()

    def logprobs(self, prompt: list[int], answer: list[int], isolated: bool = True) -> list[float]:
        """Of each token of the answer."""
        import torch

        tokens = torch.tensor([prompt + answer])
        sees = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        for start, stop in self.layout.spans(prompt) if isolated else ():
            sees[start:stop, :start] = False
        mask = torch.zeros(sees.shape, dtype=self._model.dtype)
        mask.masked_fill_(~sees, torch.finfo(mask.dtype).min)
        with torch.no_grad():
            logits = self._model(tokens, attention_mask=mask[None, None]).logits[0].float()
        found = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        return found[torch.arange(len(answer)), torch.tensor(answer)].tolist()
