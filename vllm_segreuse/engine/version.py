# SPDX-License-Identifier: Apache-2.0
"""Which versions of vLLM the patches in `compat/` run on."""

SUPPORTED = ((0, 32), (0, 33))
"""Major and minor versions; every patch release of these is supported. `docs/support.json` has what
was run on each."""


class UnsupportedVersionError(RuntimeError):
    """This vLLM is not one that segment reuse supports."""


def require_supported_vllm() -> None:
    """Refuses any vLLM that is not in `SUPPORTED`.

    The version is vLLM's own word: its CPU and CUDA builds are distributions of different names.

    Raises:
        UnsupportedVersionError: names the version found and those to install.
    """
    import vllm

    names = [".".join(map(str, version)) for version in SUPPORTED]
    if ".".join(vllm.__version__.split(".")[:2]) not in names:
        wanted = " or ".join(f"{name}.x" for name in names)
        raise UnsupportedVersionError(
            f"vllm-segreuse supports vLLM {wanted} and found {vllm.__version__}: install vLLM "
            f"{wanted}, or start without segment reuse"
        )
