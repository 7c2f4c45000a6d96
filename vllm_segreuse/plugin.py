# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""


def register() -> None:
    """Make the `--segreuse` flags known and, in children of an enabled engine, patch the engine.

    May be called any number of times. In a process whose engine does not use segment reuse nothing
    else of vLLM changes.

    Raises:
        RuntimeError: something that has to be patched is not where this vLLM should have it.
    """
    from vllm_segreuse import compat

    compat.install_flags()
    if compat.enabled_by_parent():
        compat.install_engine()
