# SPDX-License-Identifier: Apache-2.0
"""ReAct (Yao et al. 2023) as text: what the agent is told, and what of its text is an action.

Question / Thought / Action / Action Input / Observation / ... / Final Answer
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from examples.agents.tools import SCHEMAS

STOP = ("\nObservation", "\nQuestion")
"""Where the agent's turn ends."""

_ACTION = re.compile(r"Action:\s*(\w+)\s*\n+Action Input:\s*(.+)")
_ANSWER = re.compile(r"Final Answer:\s*(.+)")

_FORMAT = """Use this format:
Question: what you are asked
Thought: what to do next
Action: search or calculator
Action Input: the query, or the expression
Observation: what the tool answers
(these four lines are repeated)
Thought: I know the answer.
Final Answer: the answer

Example:
Question: What do 2 red chairs cost?
Thought: I need the price of the red chair.
Action: search
Action Input: red chair
Observation: {"results": [{"title": "red chair", "text": "The red chair costs 15 euros"}]}
Thought: I multiply the price of the red chair by 2.
Action: calculator
Action Input: 15 * 2
Observation: {"result": 30}
Thought: I know the answer.
Final Answer: 30
"""


class Action(NamedTuple):
    """A tool, and what it is given."""

    tool: str
    given: str


def instructions(schemas: Sequence[Mapping[str, Any]] = SCHEMAS) -> str:
    """The system prompt."""
    tools = "\n".join(json.dumps(schema) for schema in schemas)
    return (
        "You answer questions about the articles of a shop, one step at a time, with these tools:"
        f"\n{tools}\n\n{_FORMAT}"
    )


def action(text: str) -> Action | None:
    """The first action of a text."""
    found = _ACTION.search(text)
    return Action(found[1].lower(), found[2].strip().strip('"')) if found else None


def turn(text: str) -> str:
    """A text up to the end of its first action, or up to what is not the agent's to write."""
    found = _ACTION.search(text)
    ends = [found.end()] if found else []
    ends += [at for stop in STOP if (at := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))].rstrip()


def answer(text: str) -> str | None:
    """The final answer of a text, if it comes before any action."""
    found = _ANSWER.search(text)
    first = _ACTION.search(text)
    if not found or (first and first.start() < found.start()):
        return None
    return found[1].strip()
