#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A compiler for setup.py that does not compile again what it has compiled: `CXX` of a build.

What goes into an object is the command, the source, and the headers of ours that it includes. The
objects lie in the folder that `CXX_CACHE` names.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def included(source: Path, folders: list[Path]) -> list[Path]:
    """The source, and the headers of ours that it includes, theirs too.

    Args:
        folders: where headers are looked for that do not lie beside the file that includes them.
    """
    found = [source.resolve()]
    for path in found:
        for name in re.findall(r'#include "(.+)"', path.read_text()):
            places = [folder / name for folder in (path.parent, *folders)]
            header = next(place for place in places if place.is_file()).resolve()
            if header not in found:
                found.append(header)
    return found


def main(arguments: list[str]) -> int:
    """Compile, or take what is there; links are always made."""
    command = ["c++", *arguments]
    if "-c" not in arguments:
        return subprocess.run(command).returncode
    source, target = arguments[arguments.index("-c") + 1], arguments[arguments.index("-o") + 1]
    content = hashlib.sha256(repr([word for word in arguments if word != target]).encode())
    folders = [Path(word[2:]) for word in arguments if word.startswith("-I")]
    for path in included(Path(source), folders):
        content.update(path.read_bytes())
    cached = Path(os.environ["CXX_CACHE"]) / content.hexdigest()
    if not cached.exists():
        unfinished = cached.with_suffix(f".{os.getpid()}")
        done = subprocess.run([str(unfinished) if word == target else word for word in command])
        if done.returncode:
            return done.returncode
        unfinished.replace(cached)
    shutil.copyfile(cached, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
