# SPDX-License-Identifier: Apache-2.0
"""`scripts/next_vllm.py` lays a wheel's sources over the installed libraries, all or none."""

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "next_vllm.py"
SOURCES = {"vllm/__init__.py": "__version__ = '9.9'\n", "vllm/v1/core.py": "x = 1\n"}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with a folder of its own and one installed library."""
    spec = importlib.util.spec_from_file_location("next_vllm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "next_vllm", module)
    spec.loader.exec_module(module)
    library = tmp_path / "site-packages" / "vllm" / "_C.abi3.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"compiled for this machine")
    monkeypatch.setattr(module, "ROOT", tmp_path / "next")
    monkeypatch.setattr(module, "libraries", lambda: [library])
    return module


def wheel(file: Path, version: str = "9.9") -> Path:
    """One of vLLM, with a library that this machine cannot use."""
    content = SOURCES | {"vllm/_C.abi3.so": "compiled for another machine"}
    rows = [f"{name},sha256=,{len(text)}" for name, text in content.items()]
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
        archive.writestr("vllm/other.txt/", "")
        archive.writestr(f"vllm-{version}.dist-info/RECORD", "\n".join(rows))
    return file


def test_sources_are_the_wheels_and_libraries_the_installed_ones(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["9.9", "--wheel", str(wheel(tmp_path / "vllm.whl"))]
    assert script.main(given) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert {name: (folder / name).read_text() for name in SOURCES} == SOURCES
    assert (folder / "vllm" / "_C.abi3.so").read_bytes() == b"compiled for this machine"
    assert not list(folder.glob("*.dist-info")), "tools would find two distributions"
    assert [it.name for it in folder.parent.iterdir()] == ["9.9"]
    (tmp_path / "vllm.whl").unlink()
    assert script.main(given) == 0, "it is there already"


@pytest.mark.parametrize("name", ["vllm/v1/core.py", "vllm/_C.abi3.so", "RECORD"])
def test_what_an_overlay_lacks_is_named(
    name: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["9.9", "--wheel", str(wheel(tmp_path / "vllm.whl"))]
    script.main(given)
    (tmp_path / "next" / "9.9" / name).unlink()
    capsys.readouterr()
    assert script.main(given) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"9.9 is not whole: {name} is missing or has another size (1 files in all)" in err


def test_a_file_that_was_cut_short_is_named(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["9.9", "--wheel", str(wheel(tmp_path / "vllm.whl"))]
    script.main(given)
    (tmp_path / "next" / "9.9" / "vllm" / "v1" / "core.py").write_text("x")
    assert script.main(given) == 1
    assert "vllm/v1/core.py is missing or has another size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda it: wheel(it, "9.8"), "is no wheel of vLLM 9.9"),
        (lambda it: it.write_text("no") and it, "cannot be read as a wheel"),
        (lambda it: it, "cannot be read as a wheel"),
    ],
)
def test_another_file_leaves_nothing_behind(
    make: Any, sentence: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["9.9", "--wheel", str(make(tmp_path / "vllm.whl"))]) == 1
    assert sentence in capsys.readouterr().err
    assert not list((tmp_path / "next").iterdir())


def test_a_wheel_that_cannot_be_had_is_told_apart(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert script.main(["9.9"]) == script.UNAVAILABLE
    err = capsys.readouterr().err
    assert "pip cannot download vllm==9.9 (" in err
    assert "--wheel FILE" in err
