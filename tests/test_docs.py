# SPDX-License-Identifier: Apache-2.0
"""The documentation: what its tables say is what the code says, and its links lead somewhere.

`make docs` builds the site and checks links between its pages; these tests need no Sphinx.
"""

import ast
import importlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from segreuse_extras.audit.options import AuditOptions
from segreuse_extras.similar.options import SimilarityOptions
from segreuse_extras.transfer.options import BesideOptions
from vllm_segreuse.config import RequestOptions, SegReuseConfig
from vllm_segreuse.config.metrics import METRICS
from vllm_segreuse.features.tier.options import TierOptions
from vllm_segreuse.scheduling.tracked import Report

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
BESIDE = ("csrc", "examples", "kernels", "models")
PACKAGES = ("segreuse_extras", "segreuse_store", "segreuse_tools", "vllm_segreuse")
OURS = ("bench", "examples", "lab", "recipes", "scripts", "tests", *PACKAGES)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """The cells of every generated table, without its head."""
    folder = tmp_path_factory.mktemp("generated")
    subprocess.run([sys.executable, DOCS / "generate.py", folder], check=True, cwd=folder)
    return {
        file.stem: [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in file.read_text().splitlines()[2:]
        ]
        for file in folder.glob("*.md")
    }


def unescaped(text: str) -> str:
    return text.replace("\\", "")


def test_every_option_is_in_the_table_of_its_kind(tables: dict[str, list[list[str]]]) -> None:
    request = [row[0].strip("`") for row in tables["request_options"]]
    server = [row[0].strip("`") for row in tables["server_options"]]
    similarity = [row[0].strip("`") for row in tables["similarity_options"]]
    assert request == list(RequestOptions.model_fields)
    assert {*request, *server} == {*SegReuseConfig.model_fields}
    assert {*request} & {*server} == {"similarity"}  # what it is to the server, and to a request
    assert similarity == list(SimilarityOptions.model_fields)
    assert [row[0].strip("`") for row in tables["audit_options"]] == list(AuditOptions.model_fields)
    assert [row[0].strip("`") for row in tables["tier_options"]] == list(TierOptions.model_fields)
    beside = [row[0].strip("`") for row in tables["beside_options"]]
    assert beside == list(BesideOptions.model_fields)


def test_an_option_has_its_range_default_and_meaning(tables: dict[str, list[list[str]]]) -> None:
    kinds = "request_options", "server_options", "similarity_options"
    rows = {row[0]: row[1:] for kind in kinds for row in tables[kind]}
    own = "a number from 0 to 1, or null for the policy's own"
    assert rows["`recompute_ratio`"][:2] == [own, "`null`"]
    assert rows["`max_drift`"][:2] == ["a number from 0 on, or null for no bound", "`null`"]
    assert rows["`enabled`"][:2] == ['true, false or "observe"', "`true`"]
    assert rows["`knowledge_path`"][:2] == ["a path, or null", "`null`"]
    assert rows["`audit`"][:2] == ["a mapping of options", "`{}`"]
    assert all(len(meaning) > 20 for _, _, meaning in rows.values())
    audit = {row[0]: row[1:] for row in tables["audit_options"]}
    assert audit["`share`"][:2] == ["a number from 0 to 1", "`0.0`"]
    assert audit["`on_drift`"][:2] == ["report or fallback", "`report`"]
    assert all(len(meaning) > 20 for _, _, meaning in audit.values())


def test_metrics_are_those_of_the_server(tables: dict[str, list[list[str]]]) -> None:
    names = [row[0].strip("`") for row in tables["metrics"]]
    assert names == [f"vllm:segreuse_{row.name}" for row in METRICS]
    assert ["`vllm:segreuse_tokens_total`", "counter", "`kind`"] in [
        row[:3] for row in tables["metrics"]
    ]


def test_reading_metrics_leaves_the_real_modules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    generate = importlib.import_module("generate")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    before = dict(sys.modules)
    assert "vllm:segreuse_tokens_total" in generate.metrics()
    assert sys.modules == before


def test_what_refuses_a_start_is_listed(tables: dict[str, list[list[str]]]) -> None:
    messages = {unescaped(row[0]) for row in tables["start_up_errors"]}
    assert "prefix caching is off; remove --no-enable-prefix-caching" in messages
    assert any("beside similar segments; remove similarity" in it for it in messages)
    assert any("for which vLLM has no prefix cache on CPUs without AMX" in it for it in messages)
    assert any("unset VLLM_USE_RUST_FRONTEND" in it for it in messages)
    assert any(it.startswith("vllm-segreuse supports vLLM") for it in messages)
    assert any("remove tier, or give it to the prefill engines" in it for it in messages)


def test_every_status_of_the_administrators_routes_is_listed(
    tables: dict[str, list[list[str]]],
) -> None:
    kinds = {(row[0], row[1].strip("`")) for row in tables["admin_errors"]}
    errors = ast.parse(
        (REPOSITORY / "vllm_segreuse" / "features" / "knowledge" / "errors.py").read_text()
    )
    own = {
        (str(status), kind)
        for node in ast.walk(errors)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for status, kind in [ast.literal_eval(node.value)]
    }
    assert own | {("401", "unauthorized"), ("403", "forbidden"), ("413", "too_large")} == kinds
    assert all(row[3] for row in tables["admin_errors"])


def test_every_policy_and_every_patch_has_a_line(tables: dict[str, list[list[str]]]) -> None:
    package = REPOSITORY / "vllm_segreuse"
    for table, folder, others in (
        ("policies", "policies", {"__init__", "base"}),
        ("patches", "compat", {"__init__", "block_events", "patching"}),
    ):
        files = {file.stem for file in (package / folder).glob("*.py")} - others
        assert {row[0].strip("`") for row in tables[table]} == files
        assert all(row[1] for row in tables[table])


def test_every_field_of_the_report_is_described() -> None:
    fields = (DOCS / "report.md").read_text().partition("\n## ")[0]
    described = re.findall(r"^\| `(\w+)` \|", fields, re.MULTILINE)
    of_features = {"policy", "prompt_tokens", "fallback", "other_context_tokens"}
    assert sorted(described) == sorted({*of_features, *Report._fields})


def pages() -> list[Path]:
    """The documentation without what a build makes, and pages of models, kernels and examples."""
    beside = (REPOSITORY.glob(f"{folder}/**/*.md") for folder in BESIDE)
    docs = (page for page in DOCS.rglob("*.md") if "_generated" not in page.parts)
    return [*REPOSITORY.glob("*.md"), *docs, *itertools.chain.from_iterable(beside)]


def links() -> Iterator[tuple[Path, str]]:
    """(page, where to) of all links and pictures to files of the repository."""
    for page in pages():
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not re.match(r"\w+://|#", target):
                yield page, target


def test_every_link_to_a_file_leads_to_one() -> None:
    found = list(links())
    assert len(found) > 100
    dead = [
        f"{page.relative_to(REPOSITORY)}: {target}"
        for page, target in found
        if not (page.parent / target.partition("#")[0]).exists()
    ]
    assert dead == []


def test_every_module_that_a_page_runs_is_there() -> None:
    found = {
        (page, name)
        for page in pages()
        for name in re.findall(r"-m\s+([a-z_][\w.]*\w)", page.read_text())
        if name.partition(".")[0] in OURS
    }
    assert len(found) > 20
    missing = [
        f"{page.relative_to(REPOSITORY)}: {name}"
        for page, name in sorted(found)
        if not any(
            (REPOSITORY / f"{name.replace('.', '/')}{end}").is_file()
            for end in (".py", "/__main__.py")
        )
    ]
    assert missing == []


def test_the_documentation_uses_the_versions_that_the_package_is_tested_with() -> None:
    pins = {
        name: dict(
            line.split("==")
            for line in (REPOSITORY / "requirements" / name).read_text().splitlines()
            if "==" in line and not line.startswith("#") and ";" not in line
        )
        for name in ("cpu.txt", "docs.txt")
    }
    docs, cpu = pins["docs.txt"], pins["cpu.txt"]
    imported = ("numpy", "pydantic", "pydantic_core", "PyYAML", "scipy")
    assert {name: docs[name] for name in imported} == {name: cpu[name] for name in imported}
