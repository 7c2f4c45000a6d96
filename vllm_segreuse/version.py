# SPDX-License-Identifier: Apache-2.0
"""Which vLLM the patches beside this file were written for."""

SUPPORTED = (0, 32)
"""Major and minor version; every patch release of it is supported."""


class UnsupportedVersionError(RuntimeError):
    """This vLLM is not one that segment reuse supports."""


def require_supported_vllm() -> None:
    """Refuses any vLLM other than `SUPPORTED`.

    The version is vLLM's own word: its CPU and CUDA builds are distributions of different names.

    Raises:
        UnsupportedVersionError: names the version found and the one to install.
    """
    import vllm

    if tuple(vllm.__version__.split(".")[:2]) != tuple(map(str, SUPPORTED)):
        wanted = ".".join(map(str, SUPPORTED))
        raise UnsupportedVersionError(
            f"vllm-segreuse supports vLLM {wanted}.x and found {vllm.__version__}: install vLLM "
            f"{wanted}.x, or start without segment reuse"
        )
