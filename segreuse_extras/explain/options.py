# SPDX-License-Identifier: Apache-2.0
"""The option of a request that asks for an explanation."""

from typing import Annotated

from pydantic import BeforeValidator

from vllm_segreuse.options.parts import RequestPart
from vllm_segreuse.options.values import flag


class ExplainOptions(RequestPart):
    """Whether the report explains."""

    explain: Annotated[bool, BeforeValidator(flag)] = False
    """The report says of each stretch of the prompt where it comes from, or why it was not found
    (`explain`)."""
