# SPDX-License-Identifier: Apache-2.0
"""Case, white space and changing values do not count; words, and their order, do."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segreuse_extras.similar.canonical import Vocabulary, _value_end
from segreuse_extras.similar.options import SimilarityOptions

WORDS = ["price", "Price", " price", "cafe", "ab", " AB", "f", "T", "Z", "\u00e9t\u00e9"]
SIGNS = ['"', '":', " {", ",", "-", ":", ".", " -", "}", "\n", "  ", " \n"]
DIGITS = [*"0123456789", " 7", "2026", " 2026"]
TEXTS = [*WORDS, *SIGNS, *DIGITS, ""]
VOCABULARY = Vocabulary.of_texts(TEXTS, SimilarityOptions().volatile)


def tokens(*texts: str) -> np.ndarray:
    return np.array([TEXTS.index(text) for text in texts], np.int32)


def canonical(*texts: str) -> list[int]:
    return VOCABULARY.canonical(tokens(*texts))[0].tolist()


def test_case_and_white_space_do_not_count() -> None:
    assert canonical("price", "cafe") == canonical(" price", "\n", "  ", "cafe")
    assert canonical("price") == canonical("Price")
    assert canonical("price") != canonical("cafe")


def test_punctuation_is_one_class_and_a_run_counts_once() -> None:
    assert canonical('"', "price", '":') == canonical(" {", '"', "price", ",", "-", "}")
    assert len(canonical('"', '":', " {", "}")) == 1


@pytest.mark.parametrize(
    "value",
    [
        ("7",),
        ("1", "2", ".", "5"),
        ("2026", "-", "0", "1", "-", "0", "2", "T", "1", "7", ":", "0", "0", "Z"),
        ("ab", "-", "f", "0", "1", "-", "cafe", "3"),
        (" 2026", "-", "1", "1"),
        (" 7",),
    ],
)
def test_numbers_timestamps_and_ids_are_one_value(value: tuple[str, ...]) -> None:
    around = "price", '":'
    assert canonical(*around, *value, ",", "price") == canonical(*around, "0", ",", "price")


def test_a_value_ends_at_white_space_and_at_its_last_digit_or_letter() -> None:
    assert canonical("0", " 7") == canonical("0", "price", "1")[:1] * 2
    # The full stop behind a number is the sentence's.
    assert canonical("1", ".", "price") == [*canonical("1"), *canonical("."), *canonical("price")]
    assert canonical("-", "1") == [*canonical("-"), *canonical("1")]


def test_a_chain_without_a_value_is_read_once() -> None:
    """Whole pages of letters without white space, as of base64, are no values at all."""
    chain = tokens(*["cafe"] * 200_000)
    assert _value_end(chain, VOCABULARY.kinds, 0) == (0, 200_000)
    assert _value_end(chain, VOCABULARY.kinds, 7) == (7, 200_000)
    assert VOCABULARY.canonical(chain)[0].size == 200_000
    ending = tokens("cafe", "-", "cafe", "-", "price")
    assert _value_end(ending, VOCABULARY.kinds, 0) == (0, 4)
    joined = tokens("cafe", "-", "1", "-", " 7")
    assert _value_end(joined, VOCABULARY.kinds, 0) == (3, 3)


def test_letters_are_words_unless_digits_are_joined_to_them() -> None:
    assert canonical("ab", "-", "cafe") == [*canonical("ab"), *canonical("-"), *canonical("cafe")]
    assert canonical("cafe", " 7") == [*canonical("cafe"), *canonical("7")]


def test_tokens_without_a_text_and_unknown_ids_are_themselves() -> None:
    unknown = np.array([len(TEXTS) - 1, len(TEXTS) + 3, len(TEXTS) + 4], np.int32)
    found = VOCABULARY.canonical(unknown)[0].tolist()
    assert len(set(found)) == 3
    assert not set(found) & {*canonical(*TEXTS[:-1])}


def test_without_a_tokenizer_every_token_counts() -> None:
    text = np.array([5, 5, 0, 9, 7], np.int32)
    ids, first = Vocabulary.of_identity().canonical(text)
    assert len(set(ids.tolist())) == 4
    assert first.tolist() == [0, 1, 2, 3, 4]


def test_positions_are_those_of_the_first_token() -> None:
    _, first = VOCABULARY.canonical(tokens("price", " ".join(()) or "\n", "1", "2", '"', ",", "ab"))
    assert first.tolist() == [0, 2, 4, 6]


def test_further_patterns_are_the_users() -> None:
    found = Vocabulary.of_texts(TEXTS, [r"\d+", "price|cafe"])
    ids, _ = found.canonical(tokens(" price", '"', "cafe", '"', "7"))
    assert ids[0] == ids[2] == ids[4] != ids[1]


def test_anchors_are_compared_as_text_is() -> None:
    found = VOCABULARY.with_anchors([tokens("\n", "Price", ":"), tokens("\n")])
    assert [anchor.tolist() for anchor in found.anchors] == [canonical("price", ":")]


def letter(text: str) -> str:
    """What a token is, in small letters if nothing may be joined in front of it."""
    stripped = text.strip()
    if not stripped:
        return "." if text else "w"
    for name, pattern in (("v", r"\d+"), ("l", r"[0-9a-fA-F]{1,8}|[TZx]"), ("p", r"[\W_]+")):
        if re.fullmatch(pattern, stripped):
            if name == "p":
                return "J" if re.fullmatch(r"[-.,:/+_]{1,2}", text) else "p"
            return name if text[0].isspace() else name.upper()
    return "w"


def read(drawn: list[int]) -> list[tuple[str | int, int]]:
    """Each value (#), run of punctuation (p) and other token (its class), and where it begins."""
    letters = "".join(letter(TEXTS[token]) for token in drawn)
    found: list[tuple[str | int, int]] = []
    i = 0
    while i < len(drawn):
        chain = re.match(r"[VvLl][VLJ]*(?<!J)", letters[i:])
        if chain and re.search("[Vv]", chain.group()):
            found.append(("#", i))
            i += chain.end()
            continue
        if letters[i] in "pJ":
            if not found or found[-1][0] != "p":
                found.append(("p", i))
        elif letters[i] != ".":
            found.append((int(VOCABULARY.classes[drawn[i]]), i))
        i += 1
    return found


def test_it_is_read_as_regular_expressions_over_kinds_of_tokens_say() -> None:
    rng = np.random.default_rng(11)
    of_signs = {"#": canonical("7")[0], "p": canonical('"')[0]}
    values = 0
    for _ in range(600):
        drawn = rng.integers(0, len(TEXTS), rng.integers(0, 25)).tolist()
        expected = read(drawn)
        ids, first = VOCABULARY.canonical(np.array(drawn, np.int32))
        assert first.tolist() == [i for _, i in expected]
        assert ids.tolist() == [of_signs.get(it, it) for it, _ in expected]  # type: ignore[call-overload]
        values += sum(it == "#" for it, _ in expected)
    assert values > 500


@given(st.lists(st.sampled_from(range(len(TEXTS))), max_size=30))
def test_it_is_what_a_reader_of_the_text_would_make_of_it(drawn: list[int]) -> None:
    """Against regular expressions over the text itself, where token bounds cannot matter."""
    ids, first = VOCABULARY.canonical(np.array(drawn, np.int32))
    assert (np.diff(first) > 0).all()
    values = [i for i in ids.tolist() if i == canonical("7")[0]]
    digits = [TEXTS[i] for i in drawn if re.search(r"\d", TEXTS[i])]
    assert len(values) <= len(digits)
    assert bool(values) is bool(digits)
