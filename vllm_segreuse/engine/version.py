# SPDX-License-Identifier: Apache-2.0
"""Which versions of vLLM the patches in `compat/` run on."""

import importlib.util
from pathlib import Path

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


def installed_vllm() -> str:
    """The version of the installed vLLM as it names it itself, or that there is none.

    Read from its file: importing vLLM takes seconds.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return "not installed"
    file = Path(package.submodule_search_locations[0]) / "_version.py"
    spec = importlib.util.spec_from_file_location("vllm_version", file)
    if not file.is_file() or spec is None or spec.loader is None:
        return "of an unknown version"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)
