# SPDX-License-Identifier: Apache-2.0
"""How modules are divided among processes with `--dist loadfile`: by file, but those that share a
server go to one process, which starts it once."""

from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

SHARED_SERVERS = "shared_server", "bound_server"
"""Fixtures (`e2e/conftest.py`)."""

_REPOSITORY = Path(__file__).parents[1]


class ByFileAndServer(LoadFileScheduling):
    """pytest-xdist's own `loadgroup` goes by a mark instead, which pytest 9.2 does not show it."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.split("::", 1)[0])


@cache
def group_of(file: str) -> str:
    """What a module is run together with.

    Args:
        file: of tests, from the repository's root.
    """
    text = (_REPOSITORY / file).read_text(encoding="utf-8")
    return next((server for server in SHARED_SERVERS if server in text), file)


def scheduler(config: Any, log: Any) -> ByFileAndServer | None:
    """As pytest-xdist's hook of this name; None: it takes one of its own."""
    return ByFileAndServer(config, log) if config.getvalue("dist") == "loadfile" else None
