# SPDX-License-Identifier: Apache-2.0
"""Near-duplicate documents: contracts, product sheets and log records that differ in a few fields.

All documents of an example are the same text but for their fields; what is asked is the field of
one that another field names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from bench.english import text
from bench.english.tasks.base import Example, Layout, split
from bench.english.text import Measure

_CLAUSES = (
    "The tenant shall keep the rooms clean and shall report damage without delay.",
    "Pets may be kept only with the written consent of the landlord.",
    "The landlord pays for repairs of the roof, of the walls and of the heating.",
    "The tenant may not sublet the rooms without the written consent of the landlord.",
    "Keys are handed over on the first day and returned on the last.",
    "Changes of this contract have to be made in writing and signed by both parties.",
    "The deposit is returned within sixty days after the rooms were handed back.",
    "Water, heating and the cleaning of the stairs are charged once a year.",
    "Should a clause of this contract be void, the others remain in force.",
    "The tenant allows visits of the landlord after notice of at least two days.",
    "Bicycles are kept in the cellar, and nothing may stand in the stairs.",
    "Between ten in the evening and six in the morning the house is to be quiet.",
)
_FEATURES = (
    "The case is made of aluminium and protected against dust and rain.",
    "It starts within five seconds and keeps its settings when the power fails.",
    "Spare parts can be ordered for ten years after the last sale.",
    "The device must not be opened while it is connected to the mains.",
    "Clean it with a dry cloth; do not use any solvent.",
    "It meets the limits for radio interference of class B.",
    "The package contains the device, a cable, four screws and this sheet.",
    "It can be mounted on a wall, on a rail or on the floor.",
    "Temperatures between minus ten and forty degrees are allowed.",
    "The warranty covers faults of material and of manufacture, but not wear.",
    "Firmware is updated through the service port, with the tool of the manufacturer.",
    "Used devices are taken back by every dealer without charge.",
)
_LINES = (
    "level=INFO component=gateway event=connect result=ok",
    "level=INFO component=auth event=token.refresh result=ok",
    "level=DEBUG component=cache event=lookup result=miss",
    "level=INFO component=storage event=read result=ok",
    "level=WARN component=queue event=backlog threshold=reached",
    "level=INFO component=worker event=job.start result=ok",
    "level=DEBUG component=scheduler event=tick result=ok",
    "level=INFO component=worker event=job.end result=ok",
    "level=INFO component=gateway event=disconnect result=ok",
    "level=DEBUG component=metrics event=flush result=ok",
)
_UNREASONABLY_MANY = 100


def contracts(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """Leases: the rent that one tenant pays."""
    tenants = [name for name, _ in text.people(rng, layout.total)]
    rents = text.numbers(rng, layout.total)
    cities = rng.choices(text.CITIES, k=layout.total)
    months = [str(rng.randint(2, 9)) for _ in tenants]

    def write(i: int, clauses: Sequence[str]) -> str:
        head = (
            f"This contract is made between Northgate Housing and {tenants[i]} about rooms in "
            f"{cities[i]}. The monthly rent is {rents[i]} euros. "
            f"Either party may give notice of {months[i]} months."
        )
        return text.close(" ".join([head, *clauses]), "LEASE CONTRACT")

    return _example(
        "contracts",
        kind,
        _alike(rng, layout, measure, write, _CLAUSES),
        rng.randrange(layout.count),
        lambda i: f"what is the monthly rent in euros under the contract with {tenants[i]}?",
        rents,
    )


def products(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """Product sheets: the weight of one model."""
    models = [f"PX-{n}" for n in text.numbers(rng, layout.total, 3)]
    weights = text.numbers(rng, layout.total)
    volts = [rng.choice(("110", "230", "400")) for _ in models]

    def write(i: int, features: Sequence[str]) -> str:
        head = (
            f"Model: {models[i]}. Voltage: {volts[i]} V. Weight: {weights[i]} grams. "
            f"Order code: {text.numbers(rng, 1, 5)[0]}."
        )
        return text.close(" ".join([head, *features]), "PRODUCT SHEET")

    return _example(
        "products",
        kind,
        _alike(rng, layout, measure, write, _FEATURES),
        rng.randrange(layout.count),
        lambda i: f"what is the weight in grams of the model {models[i]}?",
        weights,
    )


def logs(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """Log records: how long the job of one host took."""
    hosts = [f"host-{n}" for n in text.numbers(rng, layout.total, 3)]
    times = text.numbers(rng, layout.total)

    def write(i: int, lines: Sequence[str]) -> str:
        head = [f"host={hosts[i]} date=2026-03-{i % 28 + 1:02}", f"job.duration_ms={times[i]}"]
        return text.close("\n".join([*head, *lines]), "LOG RECORD")

    return _example(
        "logs",
        kind,
        _alike(rng, layout, measure, write, _LINES),
        rng.randrange(layout.count),
        lambda i: f"what is job.duration_ms in the record of {hosts[i]}?",
        times,
    )


def _alike(
    rng: Random,
    layout: Layout,
    measure: Measure,
    write: Callable[[int, Sequence[str]], str],
    lines: Sequence[str],
) -> list[str]:
    """Documents with as many of the same further lines as their length has room for."""
    further: list[str] = []
    while len(further) < _UNREASONABLY_MANY:
        if not len(further) % len(lines):
            rest = rng.sample(lines, len(lines))
        line = rest.pop()
        if measure(write(0, [*further, line])) > layout.tokens:
            break
        further.append(line)
    return [write(i, further) for i in range(layout.total)]


def _example(
    task: str,
    kind: str,
    written: list[str],
    asked: int,
    question: Callable[[int], str],
    values: Sequence[str],
) -> Example:
    documents, others = split(written)
    return Example(
        task,
        kind,
        documents,
        others,
        f"Using only the text above: {question(asked)} Answer with the number only.",
        (values[asked],),
        tuple(value for i, value in enumerate(values) if i != asked),
    )
