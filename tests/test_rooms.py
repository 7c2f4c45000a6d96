# SPDX-License-Identifier: Apache-2.0
"""Imports among the package's modules and folders go one way: from the later to the earlier."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "vllm_segreuse"

ORDER = (
    *("compat", "version", "discovery", "keys", "routing", "values", "json_lines", "documents"),
    *("supported", "kernels", "plan"),
    *("kv_group", "kv_slots", "policies", "audit_options", "tier_options", "config"),
    *("metrics", "memory", "launch", "cache", "audit"),
    *("knowledge", "explain", "viewer", "serve", "model", "tier", "prefill"),
    *("accounts", "arrival", "cold_documents", "compression"),
    *("isolated_options", "isolated"),
    *("similarity", "methods", "tracing", "scheduling", "features", "scheduler", "worker"),
    *("connector", "plugin", "doctor", "estimate", "calibrate", "cli"),
)
"""Modules and folders directly below the package; each imports from those before it only."""

ROOT = "the package itself"
"""`vllm_segreuse/__init__.py`: imports `launch`, which everybody may call through it."""


def room(module: str) -> str:
    _, *path = module.split(".")
    return path[0] if path else ROOT


def imports() -> Iterator[tuple[str, str, str]]:
    """(where, importing room, imported room), those inside functions and for types included."""
    for path in sorted(PACKAGE.rglob("*.py")):
        here = path.relative_to(PACKAGE.parent)
        importing = room(".".join(here.with_suffix("").parts).removesuffix(".__init__"))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "vllm_segreuse":
                found = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{here}:{node.lineno} imports relatively"
                found = [node.module or ""]
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            else:
                continue
            for module in found:
                if module.split(".")[0] == "vllm_segreuse":
                    target = room(module)
                    # Names that `__init__` itself defines are no rooms.
                    if target not in ORDER and target != ROOT:
                        assert target in ("__version__", "kv_transfer_config"), (here, module)
                        target = ROOT
                    yield f"{here}:{node.lineno}", importing, target


def test_every_module_has_a_place_in_the_order() -> None:
    rooms = {
        path.name.removesuffix(".py")
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    assert rooms - {"__init__"} == set(ORDER)


def test_imports_go_one_way() -> None:
    wrong = [
        f"{where}: {importing} imports {imported}"
        for where, importing, imported in imports()
        if importing != imported
        and ROOT not in (importing, imported)
        and ORDER.index(imported) >= ORDER.index(importing)
    ]
    assert wrong == []


def test_the_package_itself_imports_only_how_it_is_turned_on() -> None:
    found = {imported for _, importing, imported in imports() if importing == ROOT}
    assert found <= {"launch", ROOT}


def test_patches_of_vllm_import_nothing_of_ours() -> None:
    """They are given what they call; see `plugin.py`."""
    assert {imported for _, importing, imported in imports() if importing == "compat"} == {"compat"}
