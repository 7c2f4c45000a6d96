# SPDX-License-Identifier: Apache-2.0
"""Options of the viewer."""

from typing import Annotated

from pydantic import BeforeValidator

from vllm_segreuse.options.parts import ServerPart
from vllm_segreuse.options.values import count, switch


class ViewerOptions(ServerPart):
    """What an API server remembers of requests."""

    viewer_requests: Annotated[int, count(0, 100_000)] = 200
    """So many requests an API server remembers, without their text, for the viewer's page; 0:
    none."""

    viewer_text: Annotated[bool, BeforeValidator(switch)] = False
    """Whether it remembers the tokens of explained prompts, too, to show their text."""
