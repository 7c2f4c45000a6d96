# SPDX-License-Identifier: Apache-2.0
"""Gather what a GPU machine without a network needs of vLLM, in archives below a given size.

    python -m bench.gpu.pack build/gpu --vllm vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl

The parts, each an archive of its own, so that each can travel by itself:

    python.tar.xz    vLLM's Python, and what it imports that the machine is not known to have
    core.tar.xz      its operators (`_C_stable_libtorch`)
    flash3.tar.xz    FlashAttention 3
    experts.tar.xz   operators of mixtures of experts (`_moe_C_stable_libtorch`)

vLLM's libraries are built on torch's stable ABI: they need its symbols, not its version. With
`--torch-lib` every symbol they need is looked up in the libraries of the torch that will load them.
With `--arch` they keep the code of one GPU: all four archives then take 50 MiB, not 130.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.gpu import fatbin

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
PARTS = {
    "python": ("vllm/*.py", "vllm/*.json", "vllm-*.dist-info/*"),
    "core": ("vllm/_C_stable_libtorch.abi3.so",),
    "flash3": ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",),
    "experts": ("vllm/_moe_C_stable_libtorch.abi3.so",),
}
# Kernels of other machines, front ends and compilers; each is imported only where it is used.
LEFT_OUT = (
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/tml_fa4/*",
    "vllm/entrypoints/serve/instrumentator/static/*",
)
# pip takes platforms literally: a newer one does not stand for the older ones.
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17)),
    *("manylinux2014_x86_64", "manylinux1_x86_64"),
)
# Resolved by the loader from what every process has.
_OF_THE_SYSTEM = ("cuda", "cu", "cublas", "Py", "_Py", "_ITM", "__gmon", "__cxa", "pthread")


class PackError(RuntimeError):
    """The archives would not do; the text says why."""


def main(argv: list[str] | None = None) -> int:
    """Write the archives, and what is in them to `manifest.json`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.pack", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, help="folder for the archives")
    parser.add_argument("--vllm", type=Path, required=True, help="vLLM's wheel for CUDA")
    parser.add_argument("--python", default="3.12", help="of the other machine (default: 3.12)")
    parser.add_argument("--torch", default="2.11.0", help="of the other machine (default: 2.11.0)")
    parser.add_argument("--torch-lib", type=Path, help="its torch/lib: look every symbol up there")
    parser.add_argument("--arch", type=int, help="code of this architecture only (90 for sm_90)")
    parser.add_argument("--limit-mib", type=float, default=63, help="largest archive (default: 63)")
    parser.add_argument("--wheels", type=Path, help="wheels at hand; others are downloaded there")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args(argv)
    try:
        pack(args)
    except (PackError, OSError, subprocess.CalledProcessError) as error:
        print(f"bench.gpu.pack: {error}", file=sys.stderr)
        return 1
    return 0


def pack(args: argparse.Namespace) -> None:
    """Carry the arguments out; raises PackError where something does not fit."""
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        with zipfile.ZipFile(args.vllm) as wheel:
            wheel.extractall(root / "vllm", list(wanted(wheel.namelist(), args.parts)))
        if args.torch_lib:
            for library in sorted((root / "vllm").rglob("*.so")):
                require_symbols(library, args.torch_lib)
        if args.arch:
            for library in sorted((root / "vllm").rglob("*.so")):
                library.write_bytes(fatbin.only(library.read_bytes(), args.arch))
        if "python" in args.parts:
            for wheel_file in dependencies(args.wheels or root / "wheels", args.python):
                with zipfile.ZipFile(wheel_file) as wheel:
                    wheel.extractall(root / "vllm", installed(wheel.namelist()))
            register_plugin(root / "vllm")
        sizes = {}
        for part in args.parts:
            archive = args.out / f"{part}.tar.xz"
            write(archive, root / "vllm", belonging(root / "vllm", part))
            sizes[archive.name] = size = archive.stat().st_size
            print(f"{archive}: {size / 2**20:.1f} MiB", flush=True)
            if size > args.limit_mib * 2**20:
                raise PackError(f"{archive} is larger than {args.limit_mib} MiB")
    manifest = {"vllm": args.vllm.name, "python": args.python, "torch": args.torch, "bytes": sizes}
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def wanted(names: Iterable[str], parts: Iterable[str]) -> Iterator[str]:
    """Members of vLLM's wheel that belong to some of the parts."""
    patterns = [pattern for part in parts for pattern in PARTS[part]]
    for name in names:
        if any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT):
            continue
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            yield name


def installed(names: Iterable[str]) -> list[str]:
    """Members of a wheel that go to site-packages; scripts and headers do not."""
    return [name for name in names if ".data/" not in name]


def register_plugin(site: Path) -> None:
    """vLLM finds this package by its entry points, which a tree that is not installed lacks."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    name, version = project["name"], project["version"]
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata)
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def belonging(root: Path, part: str) -> list[Path]:
    """Files of a part; the first one has all that is no library of another."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    others = [pattern for name in PARTS if name != "python" for pattern in PARTS[name]]

    def matches(path: Path, patterns: Iterable[str]) -> bool:
        name = path.relative_to(root).as_posix()
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    if part == "python":
        return [path for path in files if not matches(path, others)]
    return [path for path in files if matches(path, PARTS[part])]


def dependencies(folder: Path, python: str) -> list[Path]:
    """Wheels of `requirements.txt` for that Python, downloaded where they are not at hand."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [option for name in _PLATFORMS for option in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder), "--find-links", str(folder)]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    command += [*platforms, "--requirement", str(REQUIREMENTS)]
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))


def write(archive: Path, root: Path, files: list[Path]) -> None:
    """Files below `root`, compressed."""
    with (
        lzma.open(archive, "wb", preset=6) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in files:
            tar.add(path, path.relative_to(root).as_posix(), recursive=False)


def require_symbols(library: Path, torch_lib: Path) -> None:
    """Raises PackError unless torch's libraries define every symbol of torch's that one needs."""
    defined = set[str]()
    for path in sorted(torch_lib.glob("lib*.so")):
        defined |= symbols(path, "--defined-only")
    missing = {
        name
        for name in symbols(library, "--undefined-only") - defined
        if not name.startswith(_OF_THE_SYSTEM) and "@" not in name
    }
    known = {name for name in missing if name.startswith(("aoti_torch", "torch_", "_ZN"))}
    if known:
        raise PackError(
            f"{library.name} needs {len(known)} symbols that the torch in {torch_lib} does not "
            f"have: {', '.join(sorted(known)[:3])}"
        )


def symbols(library: Path, which: str) -> set[str]:
    """Dynamic symbols of a library; those of versions other than torch's keep them (`name@V`)."""
    listed = subprocess.run(
        ["nm", "-D", which, str(library)], check=True, capture_output=True, text=True
    )
    names = (line.split()[-1] for line in listed.stdout.splitlines() if line.strip())
    return set(names)


if __name__ == "__main__":
    sys.exit(main())
