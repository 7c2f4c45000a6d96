# SPDX-License-Identifier: Apache-2.0
"""Whether an answer is right: normalised containment.

Case, punctuation and separators of thousands do not count, words do: `4,210 EUR.` has `4210`, and
`42101` has not. Where an answer has several parts, the score is the share of them that was given,
as in RULER. An answer that also gives a value known to be wrong is wrong: listing everything that
the documents say earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def normalised(text: str) -> str:
    """Lower case words and numbers, one space between them and at both ends."""
    joined = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.lower())
    return f" {' '.join(re.findall(r'[a-z0-9]+', joined))} "


def score(said: str, answers: Sequence[str], wrong: Sequence[str] = ()) -> float:
    """Share of `answers` that are said, 0 if one of `wrong` is, too.

    Args:
        said: what the model wrote.
        answers: parts of the right answer; one that is part of another counts where either is.
        wrong: what the right answer does not contain.

    Raises:
        ValueError: there is no answer to look for.
    """
    if not answers:
        raise ValueError("a question without an answer cannot be graded")
    text = normalised(said)
    if any(normalised(value) in text for value in wrong):
        return 0.0
    return sum(normalised(answer) in text for answer in answers) / len(answers)
