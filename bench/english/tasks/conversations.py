# SPDX-License-Identifier: Apache-2.0
"""What was said before: chat memory, agents quoting each other, a ReAct trace."""

from __future__ import annotations

from random import Random

from bench.english import text
from bench.english.tasks.base import OTHERS, Example, Layout, split
from bench.english.text import Measure

_ONLY_NUMBER = "Answer with the number only."
_SUBJECTS = ("locker", "parking space", "room", "extension", "desk", "badge")


def chat(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """Sessions of a long chat: a number that a later session changed."""
    subjects = rng.sample(_SUBJECTS, 4)
    asked = subjects[0]
    first, last = sorted(rng.sample(range(layout.count), 2))
    codes = text.numbers(rng, layout.total + 1)
    written = []
    for i in range(layout.total):
        subject = asked if i in (first, last) else rng.choice(subjects[1:])
        verb = "has changed to" if i == last else "is"
        turn = f"User: Please remember that the number of my {subject} {verb} {codes[i]}."
        reply = f"Assistant: I will remember {codes[i]} for your {subject}."
        written.append(_session(rng, i, f"{turn}\n{reply}", layout, measure))
    documents, others = split(written)
    return Example(
        "chat",
        kind,
        documents,
        others,
        f"What is the number of my {asked} now, after all sessions above? {_ONLY_NUMBER}",
        (codes[last],),
        tuple(code for i, code in enumerate(codes) if i != last),
    )


def _session(rng: Random, number: int, turns: str, layout: Layout, measure: Measure) -> str:
    opening = "User: What does the manual say?\nAssistant:"
    room = layout.tokens - measure(f"Session {number + 1}\n{turns}\n{opening}\n\n")
    said = " ".join(text.filler(rng, room, measure))
    parts = [turns, f"{opening} {said}"] if said else [turns]
    if rng.random() < 0.5:
        parts.reverse()
    return text.close("\n".join(parts), f"Session {number + 1}")


def agents(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """Agents who quote the message before theirs and report a measurement of their own."""
    names = [name.split()[0] for name, _ in text.people(rng, layout.total)]
    values = text.numbers(rng, layout.total)
    site = rng.choice(text.CITIES)
    written = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        own = f"My own measurement at {site} gave {value} units."
        quoted = (
            f'{names[i - 1]} wrote: "My own measurement at {site} gave {values[i - 1]} units." '
        )
        # The agents are a ring, but others are quoted by others only.
        if i == 0 or i == layout.count:
            quoted = ""
        title = f"Message of agent {name}"
        written.append(text.document(rng, [f"{quoted}{own}"], layout.tokens, measure, title))
    documents, others = split(written)
    asked = rng.randrange(layout.count)
    return Example(
        "agents",
        kind,
        documents,
        others,
        f"How many units did agent {names[asked]} measure at {site}, according to the messages "
        f"above? {_ONLY_NUMBER}",
        (values[asked],),
        tuple(value for i, value in enumerate(values) if i != asked),
    )


def react(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """A trace of thoughts, actions and observations: who delivers the part that failed."""
    pairs = layout.total // 2
    machines = [f"M{n}" for n in text.numbers(rng, pairs, 3)]
    parts = [f"P-{n}" for n in text.numbers(rng, pairs)]
    suppliers = rng.sample(text.FAMILIES, pairs)
    steps = []
    for machine, part, supplier in zip(machines, parts, suppliers, strict=True):
        steps.append(
            (
                f"I need to know which part of machine {machine} failed.",
                f"read_report[{machine}]",
                f"The part of machine {machine} that failed is {part}.",
            )
        )
        steps.append(
            (
                f"I need to know who delivers part {part}.",
                f"search_suppliers[{part}]",
                f"Part {part} is delivered by the company {supplier}.",
            )
        )
    written = [
        _step(rng, i, step, layout, measure) for i, step in enumerate(steps[: layout.total], 1)
    ]
    asked = rng.randrange((layout.total - OTHERS) // 2)
    documents, others = split(written)
    return Example(
        "react",
        kind,
        documents,
        others,
        f"Finish the trace. Question: which company delivers the part of machine {machines[asked]} "
        "that failed? Answer with the company's name only.",
        (suppliers[asked],),
        tuple(supplier for i, supplier in enumerate(suppliers) if i != asked),
    )


def _step(
    rng: Random, number: int, step: tuple[str, str, str], layout: Layout, measure: Measure
) -> str:
    thought, action, seen = step
    head = f"Thought {number}: {thought}\nAction {number}: {action}\nObservation {number}:"
    # The observation's text is what a document has room for beside thought and action.
    observed = text.document(rng, [seen], layout.tokens - measure(head), measure)
    return f"{head} {observed}"
