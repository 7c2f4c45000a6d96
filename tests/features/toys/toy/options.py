# SPDX-License-Identifier: Apache-2.0
"""Options of greetings."""

from typing import Annotated

from pydantic import BeforeValidator

from vllm_segreuse.options.parts import RequestPart, ServerPart
from vllm_segreuse.options.values import count, flag


class ToyServer(ServerPart):
    """Of the server."""

    toy_greetings: Annotated[int, count(0, 100)] = 3
    """Most greetings of a server."""


class ToyRequest(RequestPart):
    """Of a request."""

    toy: Annotated[bool, BeforeValidator(flag)] = False
    """Whether the request is greeted."""
