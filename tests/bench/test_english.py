# SPDX-License-Identifier: Apache-2.0
"""Examples of `bench english` have the answers that their text has; answers are graded by words."""

import re
from collections import Counter
from functools import cache
from itertools import combinations
from random import Random

import pytest

from bench import shapes
from bench.english import arms, donors, grading, text
from bench.english.prompts import Prompts
from bench.english.tasks import LENGTHS, LONG, LONG_LENGTHS, RULER, TASKS, base, draw
from bench.quality import seeds

NEAR_DUPLICATES = ("contracts", "products", "logs")
DRAWS = [(task, number) for task in TASKS for number in range(6)]


@cache
def measure(passage: str) -> int:
    """Words and signs: about as many as tokens."""
    return len(re.findall(r"\w+|[^\w\s]", passage))


def example(task: str, number: int, which: str = "tuning") -> base.Example:
    return draw(task, number, seeds.rng(which, task, number), measure)


def solve(drawn: base.Example) -> set[str]:
    """The answer, found by reading the documents as a person would."""
    whole = " ".join(drawn.documents)
    question = drawn.question
    match drawn.task:
        case "needles" | "multi-query" | "multi-value":
            facts = re.findall(r"numbers for (\S+) is: (\d+)\.", whole)
            return {value for name, value in facts if name in question}
        case "variables" | "tracking":
            (value,) = re.findall(r"\d{5}", question)
            held: dict[str, str] = {}
            for name, given in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)\.", whole):
                held[name] = held.get(given, given)
            return {name for name, given in held.items() if given == value}
        case "common":
            return {word for word, _ in Counter(re.findall(r"\d+\. (\w+)", whole)).most_common(4)}
        case "frequent":
            words = re.findall(r"\b[a-z]{3}\b", whole)
            return {word for word, _ in Counter(words).most_common(3)}
        case "one-hop":
            return {dict(_cities(whole))[_between(question, "does ", " work")]}
        case "two-hop":
            leaders = dict(re.findall(r"Project (\w+) is led by (\w+ \w+)\.", whole))
            return {dict(_cities(whole))[leaders[_between(question, "of Project ", " work")]]}
        case "pronoun":
            name = _between(question, "in which ", " keeps")
            (note,) = [one for one in drawn.documents if f"about {name}," in one]
            return set(re.findall(r"locker that (?:she|he) keeps .*? is (\d+)\.", note))
        case "contracts":
            rents = re.findall(r"Housing and (\w+ \w+) about .*? rent is (\d+) euros", whole)
            return {dict(rents)[_between(question, "with ", "?")]}
        case "products":
            weights = re.findall(r"Model: (\S+)\. .*?Weight: (\d+) grams", whole)
            return {dict(weights)[_between(question, "model ", "?")]}
        case "logs":
            times = re.findall(r"host=(\S+) .*?job\.duration_ms=(\d+)", whole, re.DOTALL)
            return {dict(times)[_between(question, "record of ", "?")]}
        case "chat":
            subject = _between(question, "number of my ", " now")
            (first,) = re.findall(rf"of my {subject} is (\d+)\.", whole)
            (last,) = re.findall(rf"of my {subject} has changed to (\d+)\.", whole)
            assert whole.index(first) < whole.index(last)
            return {last}
        case "agents":
            name = _between(question, "did agent ", " measure")
            (message,) = [one for one in drawn.documents if f"agent {name}\n" in one]
            return {re.findall(r"(?<!\")My own measurement at \w+ gave (\d+) units", message)[-1]}
        case "react":
            machine = _between(question, "of machine ", " that")
            part = _between(whole, f"The part of machine {machine} that failed is ", ".")
            return {_between(whole, f"Part {part} is delivered by the company ", ".")}
    raise AssertionError(drawn.task)


def _cities(whole: str) -> list[tuple[str, str]]:
    return re.findall(r"(\w+ \w+) works in (\w+)\.", whole)


def _between(whole: str, before: str, behind: str) -> str:
    return whole.partition(before)[2].partition(behind)[0]


@pytest.mark.parametrize(("task", "number"), DRAWS)
def test_the_answer_is_what_the_documents_say(task: str, number: int) -> None:
    drawn = example(task, number)
    assert set(drawn.answers) == solve(drawn)
    assert grading.score(", ".join(drawn.answers), drawn.answers, drawn.wrong) == 1


@pytest.mark.parametrize(("task", "number"), DRAWS)
def test_documents_are_as_many_and_as_long_as_asked(task: str, number: int) -> None:
    drawn = example(task, number)
    lengths = [measure(document) for document in drawn.documents]
    assert len(lengths) in base.COUNTS
    assert len(drawn.others) == base.OTHERS
    assert min(lengths) >= 0.8 * text.SHORTEST_TOKENS
    assert max(lengths) <= 1.1 * text.LONGEST_TOKENS
    if task in RULER or task in LONG:
        assert 0.8 < sum(lengths) / (LENGTHS | LONG_LENGTHS)[drawn.kind] < 1.1
    else:
        assert sum(lengths) <= 1.05 * base.MOST_TOKENS


def test_documents_come_in_all_sizes() -> None:
    drawn = [example(task, number) for task in ("variables", "logs") for number in range(45)]
    assert {len(one.documents) for one in drawn} == set(base.COUNTS)
    lengths = [measure(document) for one in drawn for document in one.documents]
    assert min(lengths) < 80
    assert max(lengths) > 900
    assert {one.kind for one in drawn} == {"", *LENGTHS}


@pytest.mark.parametrize("task", TASKS)
def test_an_example_is_drawn_again_and_differs_from_all_others(task: str) -> None:
    assert example(task, 3) == example(task, 3)
    drawn = [example(task, n, which) for which in seeds.SETS for n in range(3)]
    assert all(one.documents != other.documents for one, other in combinations(drawn, 2))


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("common", "frequent")])
@pytest.mark.parametrize("number", range(6))
def test_others_do_not_have_the_answer(task: str, number: int) -> None:
    drawn = example(task, number)
    assert grading.score(" ".join(drawn.others), drawn.answers) == 0
    assert not set(drawn.others) & set(drawn.documents)


@pytest.mark.parametrize("task", NEAR_DUPLICATES)
def test_near_duplicates_differ_in_few_words_and_in_the_one_asked_for(task: str) -> None:
    for number in range(6):
        drawn = example(task, number)
        words = [re.findall(r"[\w.-]+", document) for document in drawn.documents]
        assert len({len(one) for one in words}) == 1
        for one, other in combinations(words, 2):
            differing = sum(a != b for a, b in zip(one, other, strict=True))
            assert 2 <= differing <= 8
        assert len({*drawn.answers, *drawn.wrong}) == len(drawn.documents) + base.OTHERS


def test_a_pronoun_stands_apart_from_its_name() -> None:
    drawn = example("pronoun", 1)
    for document in drawn.documents:
        name = _between(document, "about ", ",")
        first, *between = re.split(r"\. ", document.partition(" The number of the locker")[0])
        assert name in first
        assert between
        assert document.count(name.split()[0]) == 1


def test_hops_stand_in_either_order() -> None:
    orders = set()
    for number in range(12):
        drawn = example("two-hop", number)
        project = _between(drawn.question, "of Project ", " work")
        (city,) = drawn.answers
        whole = " ".join(drawn.documents)
        orders.add(whole.index(f"Project {project} is") < whole.index(f"works in {city}."))
    assert orders == {True, False}


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("4821", 1),
        ("It is 4,821 euros.", 1),
        ("THE NUMBER: 4821!", 1),
        ("48210", 0),
        ("14821", 0),
        ("4821 or 9999", 0),
        ("", 0),
    ],
)
def test_an_answer_is_graded_by_its_words(said: str, score: float) -> None:
    assert grading.score(said, ["4821"], ["9999"]) == score


def test_parts_of_an_answer_count_as_shares() -> None:
    assert grading.score("oyster, quilt", ["oyster", "quilt", "lemon", "spoon"]) == 0.5
    assert grading.score("new york times", ["York"]) == 1
    with pytest.raises(ValueError, match="without an answer"):
        grading.score("anything", [])


class Letters:
    """A tokenizer whose tokens are characters."""

    bos_token_id = 2
    chat_template: str | None = None

    def __call__(self, passage: str, add_special_tokens: bool) -> "Letters":
        assert not add_special_tokens
        self.input_ids = [ord(char) for char in passage]
        return self

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(self, messages: list[dict[str, str]], **_: bool) -> str:
        return f"<user>{messages[0]['content']}</user><assistant>"


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(Letters())


def shown(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_a_prompt_has_the_format_of_its_model(prompts: Prompts) -> None:
    assert prompts.prompt(["a", "b"], "c?", "d") == [2, *map(ord, "dabc?\nAnswer:")]
    assert prompts.answer([*map(ord, " 12\nQuestion: 13")]) == "12"
    chat = Letters()
    chat.chat_template = "there is one"
    written = Prompts(chat)
    assert shown(written.prompt(["a"], "c?", "d")) == "<user>dac?</user><assistant>"
    assert written.answer([*map(ord, "12\n13")]) == "12\n13"


@pytest.mark.parametrize("kind", donors.PROMPTS)
@pytest.mark.parametrize("number", range(4))
def test_every_document_was_computed_elsewhere(prompts: Prompts, kind: str, number: int) -> None:
    drawn = example("one-hop", number)
    written = [shown(one) for one in donors.PROMPTS[kind](drawn, prompts, Random(number))]
    for document in drawn.documents:
        assert any(document in one for one in written)
    asked = shown(prompts.prompt(drawn.documents, drawn.question))
    # Prompts of a stream may begin alike, as those of users do.
    assert kind == "stream" or not any(one.startswith(asked[:200]) for one in written)
    assert all(drawn.question not in one for one in written)


def test_donors_are_what_their_names_say(prompts: Prompts) -> None:
    drawn = example("pronoun", 2)
    documents, others = drawn.documents, "".join(drawn.others)

    def write(kind: str) -> list[str]:
        return [shown(one) for one in donors.PROMPTS[kind](drawn, prompts, Random(0))]

    assert [one.partition(" " + donors.END)[0] for one in write("alone")] == [*documents]
    for document, one in zip(documents, write("siblings"), strict=True):
        assert f"{others}{document}{donors.END}" in one
        assert sum(each in one for each in documents) == 1
    (one,) = write("reversed")
    assert "".join(reversed(documents)) in one
    stream = write("stream")
    orders = [
        sorted((one.find(each), i) for i, each in enumerate(documents) if each in one)
        for one in stream
    ]
    assert len(stream) == donors.STREAM_PROMPTS
    assert all(2 * len(order) >= len(documents) for order in orders)
    assert any([i for _, i in order] != sorted(i for _, i in order) for order in orders)
    assert write("stream") == stream


def test_the_end_of_a_donor_fills_a_block() -> None:
    """So that the document's last token is in a complete block, which can be reused."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shapes.make_model("llama"))
    assert len(tokenizer(donors.END).input_ids) >= 32


def test_policies_are_named_or_written_out() -> None:
    assert arms.arm("default").extra_args == {}
    assert arms.arm("shift").extra_args == {"segreuse_policy": "shift"}
    written = arms.arm("focus:recompute_ratio=0.3:dense_layers=2")
    assert written.name == "focus:recompute_ratio=0.3:dense_layers=2"
    assert written.options == {"policy": "focus", "recompute_ratio": 0.3, "dense_layers": 2}
    assert arms.arm("default:recompute_ratio=0.3").options == {"recompute_ratio": 0.3}
    for wrong in ("luck", "focus:luck=1", "focus:recompute_ratio=2", ""):
        with pytest.raises(ValueError, match="no policy"):
            arms.arm(wrong)
    assert set(arms.PUBLISHED) <= set(arms.NAMED)


def test_the_text_is_prose_and_has_a_digest() -> None:
    assert len(text.paragraphs()) > 150
    assert all("\n" not in one and one[-1] in ".:" for few in text.paragraphs() for one in few)
    assert re.fullmatch("[0-9a-f]{12}", text.digest())
