# SPDX-License-Identifier: Apache-2.0
"""The language of the quality lab: a few hundred words, one token each.

A small model learns tasks rather than spelling, and every task's text is countable by hand. Words
of one class are interchangeable: a task draws names at random, so that nothing can be known from
training except how the language works.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
STRUCTURE = _words(
    """. , : ? = <doc> <user> <agent> let needle number of is lead place value now item common
    frequent vote unknown"""
)
INSTRUCTION = _words(
    """please read the following text carefully memorize each statement then answer questions
    about it some hidden facts are inside ignore noise find exact result return only short
    task begin document track assignments chain remember what was said in every part"""
)


def _names(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{i:02d}" for i in range(count))


VARIABLES = _names("v", 64)
KEYS = _names("k", 64)
NUMBERS = _names("n", 64)
CODES = _names("c", 32)
NOISE = tuple(f"w{i:03d}" for i in range(128))
WORDS = SPECIAL + STRUCTURE + INSTRUCTION + VARIABLES + KEYS + NUMBERS + CODES + NOISE
TOKEN_OF = {word: token for token, word in enumerate(WORDS)}
# Padded, so that the embedding's rows divide among ranks and vector lanes.
VOCABULARY_SIZE = -(-len(WORDS) // 64) * 64


def encode(words: Iterable[str]) -> list[int]:
    """Token ids of words.

    Raises:
        KeyError: for a word the language does not have.
    """
    return [TOKEN_OF[word] for word in words]


def decode(tokens: Iterable[int]) -> list[str]:
    """Words of token ids; an id that pads the vocabulary reads `<unk>`."""
    return [WORDS[token] if token < len(WORDS) else "<unk>" for token in tokens]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """The same mapping as `encode`, as the tokenizer that transformers and vLLM load."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = dict(TOKEN_OF)
    for token in range(len(WORDS), VOCABULARY_SIZE):
        vocabulary[f"<reserved{token}>"] = token
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
    )


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files beside a model."""
    tokenizer().save_pretrained(folder)
