# SPDX-License-Identifier: Apache-2.0
"""Imports among the package's modules and folders go one way: from the later to the earlier."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "vllm_segreuse"
TOOLS = REPOSITORY / "segreuse_tools"
STORE = REPOSITORY / "segreuse_store"
EXTRAS = REPOSITORY / "segreuse_extras"

ORDER = (
    *("compat", "kernels", "engine", "plan", "policies", "options", "model"),
    *("cache", "scheduling", "prefill", "features", "config", "serve"),
    *("connector", "plugin"),
)
"""Modules and folders directly below the package; each imports from those before it only."""

ROOT = "the package itself"
"""`vllm_segreuse/__init__.py`: imports `launch`, which everybody may call through it."""


def room(module: str) -> str:
    _, *path = module.split(".")
    return path[0] if path else ROOT


def imported(package: Path) -> Iterator[tuple[Path, int, str]]:
    """(file, line, module) of every import, those inside functions and for types included."""
    for path in sorted(package.rglob("*.py")):
        here = path.relative_to(REPOSITORY)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{here}:{node.lineno} imports relatively"
                module = node.module or ""
                of_root = module == PACKAGE.name
                names = [f"{module}.{alias.name}" for alias in node.names] if of_root else [module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            yield from ((here, node.lineno, name) for name in names)


def imports() -> Iterator[tuple[str, str, str]]:
    """(where, importing room, imported room)."""
    for here, line, module in imported(PACKAGE):
        if module.split(".")[0] != PACKAGE.name:
            continue
        target = room(module)
        # Names that `__init__` itself defines are no rooms.
        if target not in ORDER and target != ROOT:
            assert target in ("__version__", "kv_transfer_config"), (here, module)
            target = ROOT
        importing = room(".".join(here.with_suffix("").parts).removesuffix(".__init__"))
        yield f"{here}:{line}", importing, target


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
    assert found <= {"config", "features", "serve", ROOT}


def test_patches_of_vllm_import_nothing_of_ours() -> None:
    """They are given what they call; see `plugin.py`."""
    assert {imported for _, importing, imported in imports() if importing == "compat"} == {"compat"}


def test_packages_import_those_before_them_only() -> None:
    """The list of features names the extras, and imports none of them by itself."""
    order = [STORE, PACKAGE, EXTRAS, TOOLS]
    names = [package.name for package in order]
    for number, package in enumerate(order):
        used = {module.split(".")[0] for _, _, module in imported(package)}
        assert not used.intersection(names[number + 1 :]), package.name
        assert number == 0 or used.intersection(names[:number]), package.name


def test_the_package_imports_the_store_which_imports_neither_it_nor_torch_nor_vllm() -> None:
    """Not inside functions or for types either."""
    used = {module.split(".")[0] for _, _, module in imported(STORE)}
    assert STORE.name in used
    assert not used & {PACKAGE.name, TOOLS.name, "torch", "vllm"}
    assert STORE.name in {module.split(".")[0] for _, _, module in imported(PACKAGE)}
