# SPDX-License-Identifier: Apache-2.0
"""Answers are decoded behind the end of a prompt as behind all of it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from vllm_segreuse.compat import detokenizer
from vllm_segreuse.compat.detokenizer import MOST_PARTS, MOST_TOKENS, end_of

SAMPLE = "The quick brown fox, naïve and coöperative, jumps over 42 lazy dogs. " * 3
SPECIAL = ["<|start|>", "<|end|>"]
STOCK = FastIncrementalDetokenizer.__init__


def byte_level() -> Tokenizer:
    """As of Qwen and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As of Llama 2 and Gemma: pieces with their spaces, and bytes for what is no piece."""
    words = sorted({f"▁{word}" for word in SAMPLE.split()} | set(SAMPLE) | {"▁"})
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token=SPECIAL[0]))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback()),
            *(decoders.Fuse(), decoders.Strip(" ", 1, 0)),
        ]
    )
    return tokenizer


def word_pieces() -> Tokenizer:
    """As of BERT: a space in front of all pieces but those that continue a word."""
    pieces = [*SPECIAL, *sorted(set(SAMPLE.split())), *(f"##{letter}" for letter in "abcdefg.")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TOKENIZERS = {make.__name__: make() for make in (byte_level, byte_fallback, word_pieces)}


@pytest.fixture(autouse=True, scope="module")
def _restored() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastIncrementalDetokenizer, "__init__", STOCK)
        detokenizer.install()
        yield


def answer(
    tokenizer: Tokenizer, prompt: Sequence[int], said: Sequence[int], stock: bool, **params: Any
) -> list[str]:
    """Text after every token."""
    request = SimpleNamespace(
        request_id="0",
        prompt_token_ids=[*prompt],
        sampling_params=SamplingParams(detokenize=True, **params),
    )
    made = FastIncrementalDetokenizer.__new__(FastIncrementalDetokenizer)
    fast: Any = SimpleNamespace(_tokenizer=tokenizer)
    (STOCK if stock else FastIncrementalDetokenizer.__init__)(made, fast, request)
    assert request.prompt_token_ids == [*prompt], "others read the request, too"
    texts = []
    for token in said:
        made.update([token], False)
        texts.append(made.get_next_output_text(False, delta=True))
    return texts


some_tokens = st.lists(st.integers(0, 10**6), min_size=1, max_size=60)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    before=some_tokens,
    times=st.integers(1, 9),
    said=some_tokens,
    skips=st.booleans(),
    spaces=st.booleans(),
)
def test_answers_behind_any_tokens_are_those_behind_the_whole_prompt(
    name: str, before: list[int], times: int, said: list[int], skips: bool, spaces: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    prompt = [token % size for token in before] * times
    if tokenizer.decode(prompt, skip_special_tokens=skips).endswith("\ufffd"):
        prompt.append(tokenizer.token_to_id("The") or tokenizer.encode("The").ids[0])
    params = {"skip_special_tokens": skips, "spaces_between_special_tokens": spaces}
    tokens = [token % size for token in said]
    expected = answer(tokenizer, prompt, tokens, stock=True, **params)
    assert answer(tokenizer, prompt, tokens, stock=False, **params) == expected


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", ["日本語のテキスト", "🌶️🧑‍🚀", "naïve coöperative", "ab"])
@pytest.mark.parametrize("repeated", [1, 40])
def test_an_answer_behind_a_part_of_a_character_begins_with_it(
    name: str, text: str, repeated: int
) -> None:
    """Wherever the text is cut; with what else the tokens stand for that it is a part of."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text * repeated).ids
    for cut in range(max(1, len(ids) - 12), len(ids)):
        _, incomplete = end_of(ids[:cut], tokenizer.decode)
        whole = ids[: cut - len(incomplete)]
        assert not tokenizer.decode(whole).endswith("\ufffd")
        texts = answer(tokenizer, ids[:cut], ids[cut:], stock=False)
        assert tokenizer.decode(whole) + "".join(texts) == tokenizer.decode(ids)


def test_the_end_is_read_only() -> None:
    read: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        read.append(len(ids))
        return "x" * len(ids)

    assert end_of(range(16_384), decode) == ([*range(16_384 - MOST_TOKENS, 16_384)], [])
    assert sum(read) <= 2 * MOST_TOKENS
    assert end_of(range(3), decode) == ([0, 1, 2], [])


def test_it_begins_with_a_token_that_is_text_by_itself() -> None:
    """Here, the first one of the prompt: all others are special, or parts of characters."""

    def decode(ids: Sequence[int]) -> str:
        return "".join("x" if token == 0 else "\ufffd" if token % 2 else "" for token in ids)

    end, incomplete = end_of(range(99), decode)
    assert [*end, *incomplete] == [*range(99)]
    assert end == [0]


@pytest.mark.parametrize("text", [0, 1])
def test_an_end_that_is_no_part_of_a_character_is_not_read_again_and_again(text: int) -> None:
    """Such as bytes that are none, or a file that was decoded with errors replaced."""
    read: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        read.append(len(ids))
        return "".join("x" if token < text else "\ufffd" for token in ids)

    assert end_of(range(2000), decode) == ([*range(text)], [*range(text, 2000)])
    assert sum(read) < 10 * 2000


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("times", [1, 3, 4, 100])
def test_an_answer_begins_with_three_of_the_tokens_that_are_no_characters(
    name: str, times: int
) -> None:
    """vLLM reads them anew with each of them that is given to it."""
    tokenizer = TOKENIZERS[name]
    fox = tokenizer.encode(" fox").ids
    half = tokenizer.encode("日").ids[0]
    texts = answer(tokenizer, [*fox, *[half] * times], fox, stock=False)
    assert "".join(texts) == "\ufffd" * min(times, MOST_PARTS) + " fox"


def test_prompts_without_tokens_are_left_to_vllm() -> None:
    texts = answer(TOKENIZERS["byte_level"], [], TOKENIZERS["byte_level"].encode("fox").ids, False)
    assert "".join(texts) == "fox"


def test_it_is_installed_once() -> None:
    once = FastIncrementalDetokenizer.__init__
    detokenizer.install()
    assert FastIncrementalDetokenizer.__init__ is once
