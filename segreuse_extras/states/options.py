# SPDX-License-Identifier: Apache-2.0
"""Options of a server about layers that hand a state on."""

from typing import Annotated

from vllm_segreuse.options.parts import ServerPart
from vllm_segreuse.options.values import count

_MOST = 2**46


class StatesServer(ServerPart):
    """What is kept of such layers."""

    state_bytes: Annotated[int, count(1, _MOST)] = 1 << 30
    """Models whose states are composed (gated delta rule, Mamba-2, short convolutions): bytes of
    host memory for what segments change of a state, however long they are. For each segment that is
    about as much as the KV of some thousand tokens, and of short convolutions as that of ten. Those
    that were reused the longest ago go first; their segments are computed."""
