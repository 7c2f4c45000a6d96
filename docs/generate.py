# SPDX-License-Identifier: Apache-2.0
"""The tables of the documentation that come from the code, and from the results of measurements:
`python docs/generate.py FOLDER`.

`conf.py` calls `main` at every build, so that no table can be older than the code. Neither vLLM nor
torch is needed: options and metrics are read from the objects themselves, with stand-ins for what
they import; docstrings and error texts are read from the sources.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import sources
from sources import PACKAGE, REPOSITORY

START_UP = {
    *("RefusedError", "UnsupportedModelError", "PageLayoutError", "LayoutError", "RopeError"),
    *("ConfigError", "UnsupportedVersionError"),
}
"""Errors that end the start of a server."""


def main(folder: Path) -> None:
    """Writes every table as `FOLDER/NAME.md`; files that would not change are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in (
        *(
            server_options,
            request_options,
            similarity_options,
            audit_options,
            tier_options,
            beside_options,
            policies,
        ),
        *(metrics, start_up_errors, request_errors, admin_errors, patches),
        *(support, families, windows, tier_sizing),
    ):
        file = folder / f"{table.__name__}.md"
        _write(file, table())
    results(folder / "results")


def results(folder: Path) -> None:
    """Writes the tables of measurements as `FOLDER/NAME.md`, for pages of `docs/`.

    Raises:
        ValueError: a figure is missing, with all the sentences of `python -m bench tables`.
    """
    from bench.tables import definitions
    from bench.tables.pages import SOURCES
    from bench.tables.render import SOURCES_PAGE, Renderer

    defined = definitions.read(REPOSITORY)
    renderer = Renderer(REPOSITORY, defined)
    folder.mkdir(exist_ok=True)
    for name in defined.tables:
        _write(folder / f"{name}.md", renderer.table(name, SOURCES_PAGE))
    _write(folder / f"{SOURCES}.md", renderer.all_sources(SOURCES_PAGE))
    if renderer.findings:
        raise ValueError("; ".join(renderer.findings))


def _write(file: Path, text: str) -> None:
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)


# Options.


def request_options() -> str:
    """Options that a request may set, too."""
    from vllm_segreuse.config import RequestOptions

    return _options(RequestOptions)


def server_options() -> str:
    """Options of the server alone."""
    from vllm_segreuse.config import RequestOptions, SegReuseConfig

    of_requests = {name: _owner(RequestOptions, name) for name in RequestOptions.model_fields}
    names = [
        name
        for name in SegReuseConfig.model_fields
        if _owner(SegReuseConfig, name) is not of_requests.get(name)
    ]
    return _options(SegReuseConfig, names)


def similarity_options() -> str:
    """Keys of the server's option `similarity`."""
    from segreuse_extras.similar.options import SimilarityOptions

    return _options(SimilarityOptions)


def audit_options() -> str:
    """Keys of the server's option `audit`."""
    from segreuse_extras.audit.options import AuditOptions

    return _options(AuditOptions)


def tier_options() -> str:
    """Keys of the server's option `tier`."""
    from vllm_segreuse.features.tier.options import TierOptions

    return _options(TierOptions)


def beside_options() -> str:
    """Keys of the server's option `beside`."""
    from segreuse_extras.transfer.options import BesideOptions

    return _options(BesideOptions)


SIZED = {
    "Llama 3.1 8B": (32, 8, 128),
    "Qwen3 8B": (36, 8, 128),
    "gpt-oss 20B": (24, 8, 64),
    "Qwen3 32B": (64, 8, 128),
    "Llama 3.3 70B": (80, 8, 128),
}
"""Layers, KV heads and head size of models that are much in use."""

_SIZED_BLOCK = 16
_SIZED_DOCUMENT = 1000


def tier_sizing() -> str:
    """What a GiB of the second tier holds, of a bf16 cache; all ranks together.

    A code takes a byte. Beside the codes there is a scale in float16 for each channel of a block's
    keys, and for each token of its values.
    """
    rows = []
    for name, (layers, kv_heads, channels) in SIZED.items():
        numbers_a_token = 2 * layers * kv_heads * channels
        block = 2 * numbers_a_token * _SIZED_BLOCK  # rows are padded; here there is nothing to pad
        scales = 2 * layers * kv_heads * (channels + _SIZED_BLOCK)
        encoded = numbers_a_token * _SIZED_BLOCK + scales
        raw_blocks, encoded_blocks = ((1 << 30) // size for size in (block, encoded))
        documents = raw_blocks // -(-_SIZED_DOCUMENT // _SIZED_BLOCK)
        rows.append(
            [
                name,
                f"{2 * numbers_a_token / 1024:,.0f}",
                f"{block / (1 << 20):,.2f}",
                f"{raw_blocks * _SIZED_BLOCK:,}",
                f"{documents:,}",
                f"{encoded_blocks * _SIZED_BLOCK:,}",
            ]
        )
    head = (
        "model",
        "KiB a token",
        "MiB a block of 16",
        "tokens a GiB",
        "documents of 1,000 a GiB",
        "tokens a GiB, int8 or fp8",
    )
    return _table(head, rows)


def _options(kind: Any, names: Iterable[str] = ()) -> str:
    """Fields of a class of options; by default all."""
    rows = [(f"`{name}`", *_option(kind, name)) for name in names or kind.model_fields]
    return _table(("option", "values", "default", "meaning"), rows)


def _option(kind: Any, name: str) -> tuple[str, str, str]:
    """(values, default, meaning) of one option; the values are what its error text says."""
    from pydantic import ValidationError

    try:
        kind.model_validate({name: object()})
    except ValidationError as error:
        _, found, allowed = str(error.errors()[0]["ctx"]["error"]).partition("must ")
    assert found, f"{name}: what may it be?"
    allowed = re.sub(r"^be |^map ", lambda start: "" if start[0] == "be " else "maps ", allowed)
    default = kind.model_fields[name].default
    meaning = re.sub(r"\bNone\b", "`null`", _first_upper(_field_docstring(kind, name)))
    return sources.escaped(allowed), f"`{_yaml(default)}`", meaning


def _yaml(value: object) -> str:
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return "{}"
    if isinstance(value, tuple):
        return json.dumps(value)
    names = {type(None): "null", bool: str(value).lower()}
    return names.get(type(value), str(value) or '""')


def _owner(kind: type, name: str) -> type:
    """The class, of those that a class of options is made of, that has a field."""
    return next(it for it in kind.__mro__ if name in inspect.get_annotations(it))


def _field_docstring(kind: type, name: str) -> str:
    """The text below a field of a class of options."""
    owner = _owner(kind, name)
    file = Path(str(sys.modules[owner.__module__].__file__))
    for node in ast.walk(sources.parsed(file)):
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__:
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert isinstance(field.target, ast.Name)
                    assert isinstance(text.value, ast.Constant)
                    if field.target.id == name:
                        return sources.one_line(str(text.value.value))
    raise AssertionError(f"{file}: the option {name} has no text")


def policies() -> str:
    """What each policy computes again: the first paragraph of its module."""
    rows = []
    for file in sorted((PACKAGE / "policies").glob("*.py")):
        if file.stem not in ("__init__", "base") and not file.stem.startswith("_"):
            text = sources.paragraphs(file)[0].removeprefix(f"`{file.stem}`: ")
            rows.append((f"`{file.stem}`", _first_upper(text)))
    return _table(("policy", "what is computed"), rows)


# Metrics.


class _Absent(ModuleType):
    """Stands for a module that is not installed where the site is built: any name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args: None})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for everything below some top-level packages."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.split(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def metrics() -> str:
    """The names and help texts that the server gives to Prometheus."""
    module = _imported_alone("vllm_segreuse.config.metrics")
    rows = [
        (
            f"`{module.core.PREFIX}{row.name}`",
            row.kind.__name__.lower(),
            ", ".join(f"`{label}`" for label in row.labels),
            sources.escaped(row.help),
        )
        for row in module.METRICS
    ]
    return _table(("metric", "kind", "own labels", "meaning"), rows)


def _imported_alone(name: str) -> Any:
    """A module of ours, imported beside stand-ins for vLLM, torch and the Prometheus client.

    Nothing of it stays behind: a process that has the real ones goes on with them.
    """
    absent = ("vllm", "torch", "prometheus_client")
    before = dict(sys.modules)
    for key in before:
        ours = key.startswith(("vllm_segreuse.", "segreuse_extras"))
        ours = ours and key != "vllm_segreuse.features"
        if ours or key.split(".")[0] in absent:
            del sys.modules[key]
    finder = _StandIns(*absent)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        sys.modules.clear()
        sys.modules.update(before)


# Errors.


def start_up_errors() -> str:
    """Sentences that end the start of a server."""
    texts: list[str] = []
    for file in sources.files("features/knowledge"):
        names = START_UP | ({"RuntimeError"} if file.parent.name == "compat" else set())
        texts += (text for _, text in sources.raised(file, names))
    places = (sources.EXTRAS / it / "refusals.py" for it in ("transfer", "pipeline"))
    for file in (PACKAGE / "engine" / "supported.py", *places):
        texts += sources.faults(file)
    return _table(("message",), [(text,) for text in sorted(set(texts), key=str.lower)])


def request_errors() -> str:
    """Sentences with which a request to an inference route is refused: HTTP 400."""
    texts = {text for file in sources.files() for _, text in sources.raised(file, {"RequestError"})}
    return _table(("message",), [(text,) for text in sorted(texts, key=str.lower)])


def admin_errors() -> str:
    """Statuses of the administrator's routes, with the sentences that the code has for each."""
    classes = {node.name: found for node, found in _knowledge_error_classes()}
    sentences: dict[tuple[int, str], set[str]] = {it: set() for it in classes.values()}
    meanings = {
        (status, kind): ast.get_docstring(node) or ""
        for node, (status, kind) in _knowledge_error_classes()
    }
    for file in sources.files():
        for name, text in sources.raised(file, set(classes)):
            sentences[classes[name]].add(text)
    admin = PACKAGE / "serve" / "admin.py"
    kinds = ast.literal_eval(
        next(
            node.value
            for node in sources.parsed(admin).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        )
    )
    for status, text in sources.answers(admin):
        sentences.setdefault((status, kinds[status]), set()).add(text)
    rows = [
        (
            str(status),
            f"`{kind}`",
            sources.escaped(sources.one_line(meanings.get((status, kind), ""))),
            "<br>".join(f"• {text}" for text in sorted(texts)),
        )
        for (status, kind), texts in sorted(sentences.items())
    ]
    return _table(("status", "`error.type`", "meaning", "messages"), rows)


def _knowledge_error_classes() -> Iterator[tuple[ast.ClassDef, tuple[int, str]]]:
    """(class, (HTTP status, type)) of the errors of knowledge bases."""
    for node in sources.parsed(PACKAGE / "features" / "knowledge" / "errors.py").body:
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign) and isinstance(line.value, ast.Tuple):
                    status, kind = ast.literal_eval(line.value)
                    yield node, (status, kind)


# Patches of vLLM.


def patches() -> str:
    """Each file of `compat/`: what it is about, and what would make it unnecessary."""
    rows = []
    for file in sorted((PACKAGE / "compat").glob("*.py")):
        if file.stem in ("__init__", "block_events", "patching"):
            continue
        first, *rest = sources.paragraphs(file)
        ends = " ".join(it[it.index("Obsolete") :] for it in rest if "Obsolete" in it)
        run = [where for where, shown in _support().items() if f"compat/{file.stem}" in shown]
        cells = f"`{file.stem}`", _first_upper(first), _devices(run), _with_links(ends)
        rows.append(cells)
    return _table(("file", "what it is about", "run on", "until when"), rows)


def _support() -> dict[str, dict[str, list[str]]]:
    """What passing tests have shown: features by family and by patch, by device and vLLM."""
    found: dict[str, dict[str, list[str]]] = json.loads(
        (REPOSITORY / "docs" / "support.json").read_text()
    )
    return found


def _devices(names: Sequence[str]) -> str:
    """`cpu 0.32` and `cpu 0.33` as `CPU 0.32, 0.33`."""
    versions: dict[str, list[str]] = {}
    for name in sorted(names):
        device, version = name.split()
        versions.setdefault(device.upper(), []).append(version)
    return "; ".join(f"{device} {', '.join(it)}" for device, it in versions.items())


def _with_links(text: str) -> str:
    """Issues and pull requests of vLLM as links."""
    issue = r"[vllm#\1](https://github.com/vllm-project/vllm/issues/\1)"
    return re.sub(r"vllm-project/vllm#(\d+)", issue, text)


# Models.


def support() -> str:
    """What passing tests have shown of each shape of model, by device."""
    from bench.shapes import COMPOSED, DRAFTED, LATENT, SUPPORTED, VISION

    shown = _support()
    features = sources.constant(REPOSITORY / "tests" / "support.py", "FEATURES")
    rows = []
    shapes = SUPPORTED | VISION | LATENT | DRAFTED | COMPOSED
    for shape, about in shapes.items():
        of_shape = {where: found.get(shape, []) for where, found in shown.items()}
        cells = [_devices([it for it, has in of_shape.items() if one in has]) for one in features]
        gpu = "" if any(has for it, has in of_shape.items() if it.startswith("gpu")) else "not yet"
        rows.append((f"`{shape}`", sources.escaped(about.why), *cells, gpu))
    return _table(("shape", "what it has", *features.values(), "on a GPU"), rows)


def families() -> str:
    """The verdict of the doctor on models of real size, as its tests expect it."""
    found = json.loads((REPOSITORY / "tests" / "doctor" / "families.json").read_text())
    rows = [
        (
            name,
            ", ".join(f"`{it}`" for it in family["config"]["architectures"]),
            _verdict(family),
        )
        for name, family in found.items()
    ]
    return _table(("model", "architecture", "verdict"), rows)


def windows() -> str:
    """What prompts hold of models with windows, as the doctor counts it."""
    found = json.loads((REPOSITORY / "docs" / "windows.json").read_text())
    rows = [
        (
            name,
            f"{told['layers']} of {told['all_layers']}",
            f"{told['window']:,}",
            f"{told['prompt_tokens']:,}",
            f"{told['bytes_all'] / 2**20:,.0f} MiB",
            f"{told['bytes_windows'] / 2**20:,.0f} MiB",
            f"{told['bytes_all'] / told['bytes_windows']:.1f}",
        )
        for name, prompts in found.items()
        for told in prompts
    ]
    heads = ("layers with a window", "tokens of it", "prompt", "all blocks", "windows", "times")
    return _table(("model", *heads), rows)


def _verdict(family: dict[str, Any]) -> str:
    if not family["works"]:
        layers = "; its layers are supported" if family.get("layers") else ""
        if size := family.get("map_bytes"):
            told = f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"
            layers = f"; composed on CPUs if it is asked for, {told} a map"
        return f"refused: {sources.escaped(family['why'])}{layers}"
    examined = "for text" if family.get("text") else "not"
    works = f"works (layers {examined} examined)" if "code" in family else "works"
    needed = [f"{name}={value}" for name, value in family.get("environment", {}).items()]
    needed += [f"--{name.replace('_', '-')}" for name in family.get("options", {})]
    return f"{works}, with `{' '.join(needed)}`" if needed else works


# Markdown.


def _first_upper(text: str) -> str:
    return text if text.startswith("vLLM") else text[:1].upper() + text[1:]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    assert rows
    lines = [head, ["---"] * len(head), *rows]
    cells = ([re.sub(r"(?<!\\)\|", r"\|", cell) for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    parser = argparse.ArgumentParser(description="Write the tables that come from the code.")
    parser.add_argument("folder", type=Path, help="where they are written, as NAME.md")
    main(parser.parse_args().folder)
