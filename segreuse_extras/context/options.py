# SPDX-License-Identifier: Apache-2.0
"""Options of a request about what its reused KV was computed behind."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from vllm_segreuse.options.parts import RequestPart

ANY, SAME = "any", "same"


def _context(value: Any) -> Any:
    if value not in (ANY, SAME):
        raise ValueError(f"must be {ANY} or {SAME}")
    return value


class ContextOptions(RequestPart):
    """What reused tokens may carry."""

    context: Annotated[Literal["any", "same"], BeforeValidator(_context)] = "any"
    """`same`: tokens are reused only if all text that their KV was computed behind is still in
    front of them in this prompt, so that they carry nothing of what was taken out; other text may
    stand between. `any`: wherever they were computed. Models trained on documents computed alone,
    and compressed documents, ignore it: a request names what they are computed behind."""
