# SPDX-License-Identifier: Apache-2.0
"""Options of a request about the turns of its conversation."""

from typing import Annotated

from pydantic import BeforeValidator

from vllm_segreuse.options.parts import RequestPart
from vllm_segreuse.options.values import flag


class ConversationOptions(RequestPart):
    """What earlier turns have moved, and what later ones lose."""

    recompute_once: Annotated[bool, BeforeValidator(flag)] = False
    """What an earlier turn of the same conversation has moved is kept as it was then: a policy does
    not choose of it anew for the new question. `exact` and prompts with images ignore it."""

    weigh_turns: Annotated[bool, BeforeValidator(flag)] = False
    """A prompt is reused only if that saves more than the later turns of its conversation are
    expected to lose, which do not find it in the prefix cache then (`turns.py`). Reused in any
    case are requests with a `recompute_ratio` of their own, and with `recompute_once`."""
