# SPDX-License-Identifier: Apache-2.0
"""Options of a server about layers that hand a state on."""

from typing import Annotated

from vllm_segreuse.options.parts import ServerPart
from vllm_segreuse.options.values import count

_MOST = 2**46


class StatesServer(ServerPart):
    """What is kept of such layers."""

    state_bytes: Annotated[int, count(1, _MOST)] = 1 << 30
    """Models with linear attention (gated delta rule, Mamba-2): bytes of host memory for what
    segments change of a state, about as much for each segment as the KV of some thousand tokens,
    however long it is. Those that were reused the longest ago go first; their segments are
    computed."""
