# SPDX-License-Identifier: Apache-2.0
"""The lab's model with the layout's tokens, untrained, and a line of data about it."""

import json
from pathlib import Path
from typing import Any

import torch

from bench.harness import REPOSITORY
from recipes.kvlink import folder
from recipes.kvlink.examples import Example, parse
from recipes.kvlink.rows import Writer

MODEL = REPOSITORY / "models" / "lab"
TEMPLATE = REPOSITORY / "lab" / "chat_template.jinja"
DOCUMENTS = (
    "<doc> let v25 = n56 . w109 let v23 = n23 . w013 w014 w015 w016 w017 w018 w019 let v48 = n19 .",
    "<doc> let v51 = v23 . w003 w041",
    "<doc> w035 let v57 = v51 . w062 w119 w120 w121 w122 w123 let v20 = v25 .",
)
QUESTIONS = (("? value v57 : v57", "n23 ."), ("answer ? value v20 : v20", "n56 ."))


def line(**more: Any) -> str:
    asked = [{"question": question, "answer": answer} for question, answer in QUESTIONS]
    given = {"system": "<bos> please read", "documents": DOCUMENTS, "questions": asked}
    return json.dumps(given | {"ordered": True} | more)


def example(kind: str = "qa", **more: Any) -> Example:
    return parse(line(**more), kind, "data.jsonl:1")


def model_and_writer(
    link_tokens: int = 2, anchor_tokens: int = 0, max_tokens: int = 400, max_documents: int = 4
) -> tuple[Any, Writer]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    names = folder.names_for(link_tokens, max_documents, 8, anchor_tokens)
    folder.add_tokens(model, tokenizer, names)
    tokenizer.chat_template = folder.template_of(tokenizer, names, Path(TEMPLATE))
    return model, folder.writer(tokenizer, names, max_tokens)
