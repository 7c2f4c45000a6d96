# SPDX-License-Identifier: Apache-2.0
"""vLLM's list of known environment variables.

vLLM warns of names beginning with `VLLM_` that it does not know, or refuses to start over them
(`--fail-on-environ-validation`); plugins have no hook to declare theirs. The values declared here
are constants on purpose: vLLM hashes all of them into its compile cache key and writes them beside
the cache, where a token does not belong.

Obsolete when plugins can declare environment variables of their own. None filed that we know of.
"""

import os

PREFIX = "VLLM_SEGREUSE_"


def install() -> None:
    """Declare those of our variables that are set; where none is set nothing changes."""
    import vllm.envs

    for name in os.environ:
        if name.startswith(PREFIX):
            vllm.envs.environment_variables.setdefault(name, lambda: None)
