# SPDX-License-Identifier: Apache-2.0
"""Options of a server about conversations that are computed in full later."""

from typing import Annotated

from vllm_segreuse.options.parts import ServerPart
from vllm_segreuse.options.values import MAX_TOKENS, count, number


class HealingServer(ServerPart):
    """What an idle engine does."""

    heal_tokens: Annotated[int, count(0, MAX_TOKENS)] = 0
    """While no request runs or waits, prompts and answers that hold moved text are computed in
    full, so many tokens at a time, and a KV block at least: later turns find them in the prefix
    cache, exactly. A request that arrives meanwhile waits for no more than these. 0: never."""

    heal_after_s: Annotated[float, number(10**6)] = 5.0
    """Seconds for which no request ran or waited, before an engine computes turns in full. Requests
    that come more often than that wait for none of it."""
