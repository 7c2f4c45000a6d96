# SPDX-License-Identifier: Apache-2.0
"""What is installed is what lies in the repository."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parent.parent
PACKAGES = {"vllm_segreuse", "segreuse_extras", "segreuse_store", "segreuse_tools"}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
REQUIREMENTS = (REPOSITORY / "requirements" / "cpu.txt").read_text()


def test_every_package_has_an_init() -> None:
    folders = {path.parent for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_kernels_are_importable_from_anywhere(tmp_path: Path) -> None:
    code = "import vllm_segreuse.kernels as k; print(k.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (
        Path(done.stdout.strip()).resolve()
        == REPOSITORY / "vllm_segreuse" / "kernels" / "__init__.py"
    )


def test_pages_are_installed_with_all_that_they_need(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    for name in ("kernels", "csrc"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignored)
    built = tmp_path / "built"
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=tmp_path, check=True)
    wanted = {
        path.relative_to(tmp_path)
        for name in PACKAGES
        for folder in ("static", "templates")
        for path in tmp_path.glob(f"{name}/**/{folder}/*")
    }
    assert {path.parts[0] for path in wanted} == {"segreuse_extras", "segreuse_tools"}
    modules = {
        path.relative_to(tmp_path) for name in PACKAGES for path in tmp_path.glob(f"{name}/**/*.py")
    }
    assert [path for path in modules if not (built / path).is_file()] == []
    assert [path for path in wanted if not (built / path).is_file()] == []


def test_plugin_is_registered_with_vllm() -> None:
    [entry] = importlib.metadata.entry_points(group="vllm.general_plugins", name="segreuse")
    assert callable(entry.load())


def test_command_is_registered() -> None:
    [entry] = importlib.metadata.entry_points(group="console_scripts", name="vllm-segreuse")
    assert callable(entry.load())


def test_importing_the_package_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vllm_segreuse, vllm_segreuse.config, vllm_segreuse.plugin\n"
        "print([name for name in ('torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_vllm_is_no_hard_dependency() -> None:
    assert not [name for name in PROJECT["project"]["dependencies"] if "vllm" in name]


def test_every_dependency_is_imported() -> None:
    """What only vLLM or the tests need is none of ours."""
    imported: set[str] = set()
    for file in (it for name in PACKAGES for it in (REPOSITORY / name).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    extras = PROJECT["project"]["optional-dependencies"]
    packages = [*PROJECT["project"]["dependencies"], *extras["tier"], *extras["kb"]]
    modules = {"beautifulsoup4": "bs4", "pyyaml": "yaml"}
    names = [re.split(r"[<>=\[]", package)[0] for package in packages]
    assert [name for name in names if modules.get(name, name) not in imported] == []


def test_pdfs_that_may_be_read_but_not_changed_can_be_read() -> None:
    """Most are encrypted by AES with an empty password, which pypdf leaves to another library."""
    kb = map(Requirement, PROJECT["project"]["optional-dependencies"]["kb"])
    assert [it.extras for it in kb if it.name == "pypdf"] == [{"crypto"}]


def test_every_requirement_is_pinned() -> None:
    lines = [line for line in REQUIREMENTS.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 100
    assert [line for line in lines if "==" not in line] == []


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_what_breaks_vllm_on_cpu_is_not_installed(name: str) -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(name)
