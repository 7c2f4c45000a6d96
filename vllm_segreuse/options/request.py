# SPDX-License-Identifier: Apache-2.0
"""Options of one request."""

import math
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

from vllm_segreuse.options.parts import RequestPart
from vllm_segreuse.options.values import MAX_TOKENS, count, flag, is_int, number, tokens_or_null
from vllm_segreuse.policies import POLICIES

AUTO = "auto"
RECOMMENDED = "focus"
"""What `auto`, the default, stands for: what lost least on a pretrained model (docs/quality.md)."""

_MAX_LAYERS = 4096


def _policy(value: Any) -> Any:
    if value == AUTO:
        return RECOMMENDED
    if not isinstance(value, str) or value not in POLICIES:
        raise ValueError(f"must be one of {', '.join((AUTO, *POLICIES))}")
    return value


def _layers(value: Any) -> Any:
    is_count = is_int(value) and 0 <= value <= _MAX_LAYERS
    is_share = isinstance(value, float) and 0 < value < 1
    if not (is_count or is_share):
        raise ValueError(
            f"must be a number of layers (an integer from 0 to {_MAX_LAYERS}) "
            "or a share of the layers (a float above 0 and below 1)"
        )
    return value


class PolicyOptions(BaseModel):
    """How one request is reused, but for what features add. All values are resolved: nothing is
    left to default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parts: ClassVar[tuple[type[RequestPart], ...]] = ()
    """What features add."""

    policy: Annotated[str, BeforeValidator(_policy)] = RECOMMENDED
    """What is reused, and which of it is computed again; `auto` stands for the recommended one."""

    recompute_ratio: Annotated[float | None, number(1, "the policy's own")] = None
    """Share of the reused tokens that is chosen to be computed again, 0..1; None: the policy's own,
    which is 0.1, and for `focus` depends on how the reused text was computed (`policies/focus.py`).
    For `peaks` it is the most; for `sparsex`, overflow and tail are added to it."""

    dense_layers: Annotated[int | float, BeforeValidator(_layers)] = 0.15
    """`sparsex`: leading layers that compute every token: a number of layers, or a share s of them,
    which means max(1, round(s * layers)). As many layers as the model has, or more: everything is
    computed. `cacheblend` takes a number of layers, too, 1 at least; a share means 1 there."""

    overflow_tokens: Annotated[int | None, tokens_or_null(0, "one KV block")] = None
    """`sparsex`: reused tokens computed again on both sides of new text; None: as many as a KV
    block holds."""

    max_drift: Annotated[float | None, number(math.inf, "no bound")] = None
    """`focus`, `prophet`: a request whose `drift` is above this is computed in full after all;
    None: none is. Other policies do not measure it. docs/quality.md says what drift means."""

    min_reused_tokens: Annotated[int, count(1, MAX_TOKENS)] = 128
    """Fewer reusable tokens than this, and the request runs without reuse."""

    observe: Annotated[bool, BeforeValidator(flag)] = False
    """The request is matched and planned, and runs without reuse; its report says what would have
    been reused (`observed`)."""
