"""Packages that an installation may lack are named in one table, and nothing that needs one is reached without a check.

A failure means that ditile works for its developers, who have all extras, and ends in a traceback for a user.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, NamedTuple

from ditile.plan.extras import EXTRAS
from tests.house.rules import LAB, PACKAGE, Source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TOOLS = {"dev", "docs", "plots", "release"}
"""Extras that bring tools for the repository, and nothing that the package imports."""
IN_NO_EXTRA = {"bitsandbytes", "cache_dit", "torch_fidelity", "torchvision", "xfuser"}
"""Packages that are used where they are installed, each after a look for it in the same module."""
BEHIND_A_CHECK: Mapping[str, set[str]] = {
    "ditile.runner.weights.convrot_weight": {"quantize"},
    "ditile.runner.weights.gguf_file": {"gguf"},
    "ditile.serve.page.layout": {"serve", "page"},
    "ditile.serve.ray_replicas": {"ray"},
    "ditile.serve": {"serve"},
}
"""Modules and folders that are imported after the check of these extras alone; the first that fits counts."""
PACKAGES = {package: extra for extra, packages in EXTRAS.items() for package in packages}
SOURCES = [
    Source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    for folder in (PACKAGE, LAB)
    for path in (ROOT / folder).rglob("*.py")
]


class Import(NamedTuple):
    """An import: what, in which line, and the extras that the function around it has checked before."""

    name: str
    line: int
    checked: frozenset[str]


def normalize(name: str) -> str:
    """The name of a distribution, without its version and its own extras."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[]", name)[0]).lower()


def list_import_names(requirements: Sequence[str]) -> dict[str, set[str]]:
    """Distribution -> the packages that it brings; of one that is not installed here the name itself."""
    names: dict[str, set[str]] = {normalize(each): set() for each in requirements}
    for package, distributions in packages_distributions().items():
        for distribution in map(normalize, distributions):
            if distribution in names:
                names[distribution].add(package)
    return {name: packages or {name.replace("-", "_")} for name, packages in names.items()}


def name_module(source: Source) -> str:
    """The dotted name of a file of the package."""
    path = source.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__")
    return path.replace("/", ".")


def list_imports(source: Source) -> Iterator[Import]:
    """The imports that run, also those of `import_module` with a constant."""
    yield from _list_imports_in(source.tree.body, None)


def _list_imports_in(nodes: Sequence[ast.AST], function: ast.AST | None) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        for name in _read_import(node):
            checked = frozenset() if function is None else frozenset(_list_checks(function, node.lineno))
            yield Import(name, node.lineno, checked)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        inner = node if function is None and is_function else function
        yield from _list_imports_in(list(ast.iter_child_nodes(node)), inner)


def _read_import(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        return [str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant)]
    return []


def _list_checks(function: ast.AST, before: int) -> Iterator[str]:
    """The extras, or the packages of none, for which a function looks above a line."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or node.lineno >= before:
            continue
        name = ast.unparse(node.func)
        constants = [str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant)]
        if name == "require_extra":
            yield from constants
        if name == "is_installed":
            yield from (PACKAGES.get(package, package) for package in constants)
        if name == "require_quantizer":
            yield "quantize"


def find_needs(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Module -> the extras that it, or what it imports, needs without having checked them."""
    modules = {name_module(source): list(list_imports(source)) for source in sources}
    needs: dict[str, set[str]] = {name: set() for name in modules}
    is_changing = True
    while is_changing:
        is_changing = False
        for name, imports in modules.items():
            for each in imports:
                more = _find_needs_of_import(each, needs) - each.checked - needs[name]
                needs[name] |= more
                is_changing = is_changing or bool(more)
    return needs


def _find_needs_of_import(imported: Import, needs: Mapping[str, set[str]]) -> set[str]:
    package = imported.name.partition(".")[0]
    if package != "ditile":
        return {PACKAGES[package]} if package in PACKAGES else set()
    # Its last part is a module, or a name in one.
    return needs.get(imported.name, set()) | needs.get(imported.name.rpartition(".")[0], set())


def test_the_table_of_extras_is_that_of_the_project() -> None:
    """Each extra of pyproject.toml with the packages of all its distributions, and of no other."""
    extras = PROJECT["optional-dependencies"]
    assert EXTRAS.keys() == extras.keys() - TOOLS
    for extra, requirements in extras.items():
        if extra not in TOOLS:
            names = list_import_names(requirements)
            assert set(EXTRAS[extra]) <= set().union(*names.values()), extra
            assert not [name for name, packages in names.items() if packages.isdisjoint(EXTRAS[extra])], extra


def test_every_package_that_is_imported_is_a_dependency_or_in_the_table() -> None:
    base = set().union(*list_import_names(PROJECT["dependencies"]).values())
    known = {*base, *PACKAGES, *IN_NO_EXTRA, *sys.stdlib_module_names, "ditile", "ditile_lab"}
    found = [
        f"{source.path}:{each.line} {each.name}"
        for source in SOURCES
        for each in list_imports(source)
        if each.name.partition(".")[0] not in known
    ]
    assert not found


def test_what_needs_an_extra_stands_behind_its_check() -> None:
    """Every function that imports a package of an extra, or a module that does, calls `require_extra` or `is_installed`
    before it; only the modules of `BEHIND_A_CHECK` rely on those that import them."""
    wrong = {}
    for name, needs in find_needs(SOURCES).items():
        allowed = next(
            (extras for prefix, extras in BEHIND_A_CHECK.items() if f"{name}.".startswith(f"{prefix}.")), set()
        )
        if not needs <= allowed:
            wrong[name] = needs - allowed
    assert not wrong


def test_packages_are_looked_for_in_one_place() -> None:
    """`find_spec` is called by the table's module alone, and a package of no extra is looked for where it is used."""
    others = [source for source in SOURCES if not source.path.endswith("plan/extras.py")]
    assert not [source.path for source in others if "find_spec" in source.text]
    for source in others:
        used = {each.name.partition(".")[0] for each in list_imports(source)} & IN_NO_EXTRA
        assert not used or re.search(r"\b(is_installed|require_quantizer)\(", source.text), (source.path, used)
