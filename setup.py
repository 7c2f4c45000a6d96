# SPDX-License-Identifier: Apache-2.0
"""Builds the native kernels beside their Python bindings; everything else is in pyproject.toml.

What the machine can compile is built: C++ where there is a compiler, CUDA where there is nvcc too.
A build that fails is reported and left out, never the installation: torch or Triton then does the
same work, and the server says so when it starts.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
KERNELS = Path("kernels")
# One library per instruction set: linked into one, the linker would merge inline functions that
# were compiled for another machine.
CPU_LEVELS = {
    "baseline": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "amx": [
        *("-march=x86-64-v4", "-mprefer-vector-width=512"),
        *("-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ],
}
EXACT = ("align", "carry", "codecs")
# The newest architecture also as PTX, for what comes after it. The tests compile with these, too.
NVCC_FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-cudart=static"),
    *("-Xcompiler=-fPIC,-fvisibility=hidden", "-Xlinker=--exclude-libs=ALL"),
    *(f"-gencode=arch=compute_{n},code=sm_{n}" for n in ("80", "89", "90")),
    "-gencode=arch=compute_90,code=compute_90",
)


class NativeKernel(Extension):
    """A shared library with a C interface; `commands(output, temporary)` make it."""

    def __init__(self, name: str, sources: list[Path], headers: list[Path]) -> None:
        super().__init__(
            f"vllm_segreuse.kernels.{name}",
            [str(path) for path in sources],
            depends=[str(path) for path in headers],
            optional=True,
        )

    def commands(self, output: Path, temporary: Path) -> list[list[str]]:
        raise NotImplementedError


class CpuKernels(NativeKernel):
    """kernels/cpu for one instruction set."""

    def __init__(self, level: str) -> None:
        headers = [*CSRC.glob("cpu/*.h"), *CSRC.glob("segreuse/*.h")]
        super().__init__(f"_cpu_{level}", sorted(KERNELS.glob("cpu/*.cpp")), headers)
        self._flags = CPU_LEVELS[level]

    def commands(self, output: Path, temporary: Path) -> list[list[str]]:
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        common = [
            *("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden"),
            *("-fno-math-errno", "-Wall", "-Wextra", f"-I{CSRC}"),
            # GCC 12 takes its own intrinsics' undefined operands for uninitialised variables.
            "-Wno-maybe-uninitialized",
            *self._flags,
        ]
        made, objects = [], []
        for source in self.sources:
            target = str(temporary / f"{self.name}.{Path(source).stem}.o")
            # Rotations agree with plain torch bit for bit; sums of products may be fused.
            exact = ["-ffp-contract=off"] if Path(source).stem in EXACT else []
            made.append([*compiler, *common, *exact, "-c", source, "-o", target])
            objects.append(target)
        return [*made, [*compiler, "-shared", "-fopenmp", *objects, "-o", str(output)]]


class CudaKernels(NativeKernel):
    """kernels/cuda for every architecture; the runtime is linked in."""

    def __init__(self) -> None:
        super().__init__("_cuda", [KERNELS / "cuda" / "align.cu"], [*CSRC.glob("segreuse/*.h")])

    def commands(self, output: Path, temporary: Path) -> list[list[str]]:
        return [["nvcc", *NVCC_FLAGS, f"-I{CSRC}", *self.sources, "-o", str(output)]]


class KernelBuilder(build_ext):
    """Runs the kernels' own commands, and carries on without a kernel that does not build."""

    def get_ext_filename(self, fullname: str) -> str:
        # No Python module: loaded by name, for any Python version.
        return str(Path(*fullname.split("."))) + ".so"

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:  # nobody has said how many at once
            self.parallel = os.cpu_count()

    def run(self) -> None:
        remove_libraries(Path(self.build_lib))
        super().run()

    def copy_extensions_to_source(self) -> None:
        remove_libraries(Path())
        super().copy_extensions_to_source()

    def build_extension(self, extension: NativeKernel) -> None:
        output = Path(self.get_ext_fullpath(extension.name))
        temporary = Path(self.build_temp)
        for folder in (output.parent, temporary):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            for command in extension.commands(output, temporary):
                subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or str(error)
            print(f"vllm-segreuse: {extension.name} is left out: {why[-2000:]}", file=sys.stderr)


def remove_libraries(root: Path) -> None:
    """Those of an earlier build would stay where now none is made, and be loaded."""
    for library in root.joinpath("vllm_segreuse", "kernels").glob("_c*.so"):
        library.unlink()


def wants_cuda() -> bool:
    """With nvcc, unless the torch that is installed is known to have no use for it."""
    if shutil.which("nvcc") is None:
        return False
    try:
        import torch
    except ImportError:  # an isolated build does not see it
        return True
    return torch.version.cuda is not None


def kernels() -> list[NativeKernel]:
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    levels = [level for level in CPU_LEVELS if on_x86 or level == "baseline"]
    return [*map(CpuKernels, levels), *([CudaKernels()] if wants_cuda() else [])]


if __name__ == "__main__":
    setup(ext_modules=kernels(), cmdclass={"build_ext": KernelBuilder})
