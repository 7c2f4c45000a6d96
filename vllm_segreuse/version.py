# SPDX-License-Identifier: Apache-2.0
"""Which vLLM the patches in `compat/` were written for."""

import os

SUPPORTED = (0, 32)
"""Major and minor version; every patch release of it is supported."""

CHECKED = ((0, 33),)
"""Versions in which nothing that we use is missing or takes other parameters
(`scripts/check_vllm.py`), and which have never run: accepted where `UNTESTED_ENV` is 1."""

UNTESTED_ENV = "VLLM_SEGREUSE_UNTESTED_VLLM"
"""A variable and no option: engine and worker processes ask before they have a configuration."""


class UnsupportedVersionError(RuntimeError):
    """This vLLM is not one that segment reuse supports."""


def require_supported_vllm() -> None:
    """Refuses any vLLM other than `SUPPORTED`, and, where that is wanted, `CHECKED`.

    The version is vLLM's own word: its CPU and CUDA builds are distributions of different names.

    Raises:
        UnsupportedVersionError: names the version found and the one to install.
    """
    import vllm

    found = vllm.__version__.split(".")[:2]
    if _is(SUPPORTED, found):
        return
    why, way_out = "", ""
    if any(_is(version, found) for version in CHECKED):
        if os.environ.get(UNTESTED_ENV) == "1":
            return
        why = ", whose sources were compared and which has never run"
        way_out = f"set {UNTESTED_ENV}=1 to try it, "
    wanted = ".".join(map(str, SUPPORTED))
    raise UnsupportedVersionError(
        f"vllm-segreuse supports vLLM {wanted}.x and found {vllm.__version__}{why}: install vLLM "
        f"{wanted}.x, {way_out}or start without segment reuse"
    )


def _is(version: tuple[int, int], found: list[str]) -> bool:
    return found == list(map(str, version))
