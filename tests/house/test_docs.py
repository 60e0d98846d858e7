"""The pages of docs/, README and the examples name files and headings that exist, and every environment variable.

A failure means that a reader looks for a file that is not there, or does not learn of a variable.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ditile

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "ditile"
CARDS = PACKAGE.glob("model/assets/*/README.md")
FOLDERS = ("docs", "examples", "training", ".github")
PAGES = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS for page in ROOT.glob(f"{name}/**/*.md")), *CARDS])
LISTS = [ROOT / "llms.txt"]
BRACKETS = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
REFERENCES = re.compile(r"^\[[^\]]+\]: +([^#\s]*)(#\S*)?$", re.MULTILINE)
FENCES = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?)$", re.MULTILINE)


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_files_that_a_page_names_exist(page: Path) -> None:
    """Paths begin at the root, at the package, beside it, or beside the page."""
    names = re.findall(r"`([\w./*-]+\.py)`", page.read_text("utf-8"))
    folders = (ROOT, PACKAGE, PACKAGE.parent, page.parent)
    assert not [name for name in names if not any(list(folder.glob(name)) for folder in folders)]


@pytest.mark.parametrize("page", PAGES + LISTS, ids=page_id)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    """To files and folders of this clone, and to headings in them; links to other hosts are not followed."""
    text = FENCES.sub("", page.read_text("utf-8"))
    lost = []
    for path, anchor in [*BRACKETS.findall(text), *REFERENCES.findall(text)]:
        if ":" in path:
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in list_anchors(target)):
            lost.append(path + anchor)
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_titles_of_a_page_can_be_linked(page: Path) -> None:
    """A page begins with its title and has one; no heading is there twice, as its links would lead to the first."""
    text = FENCES.sub("", page.read_text("utf-8"))
    if page.is_relative_to(ROOT / ".github"):
        return
    titles = re.findall(r"^# +(.+)$", text, re.MULTILINE)
    assert len(titles) == 1 and re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).lstrip().startswith(f"# {titles[0]}")
    headings = [make_anchor(title) for title in HEADING.findall(text)]
    assert sorted(set(headings)) == sorted(headings)


def list_anchors(page: Path) -> set[str]:
    return {make_anchor(title) for title in HEADING.findall(FENCES.sub("", page.read_text("utf-8")))}


def make_anchor(title: str) -> str:
    """As GitHub makes it of a heading: of the text of links, and without marks."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return "#" + re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_modules_of_ditile_that_a_page_imports_exist(page: Path) -> None:
    """`from ditile.a.b import c` names a module that has c, `ditile.a.b` an object, `python -m benchmarks.x` a file."""
    text = page.read_text("utf-8")
    for module, names in re.findall(r"^\s*from (ditile[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        imported = importlib.import_module(module)
        assert all(hasattr(imported, name.strip()) for name in names.split(",")), module
    for name in re.findall(r"`(ditile(?:\.\w+)+)", text):
        assert pkgutil.resolve_name(name) is not None
    scripts = re.findall(r"python -m ((?:benchmarks|training)\.\w+)", text)
    assert not [name for name in scripts if not (ROOT / (name.replace(".", "/") + ".py")).exists()]


def test_every_environment_variable_is_on_its_page() -> None:
    source = ast.parse((PACKAGE / "distributed" / "env.py").read_text("utf-8"))
    constants = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant)}
    variables = {str(name) for name in constants if re.fullmatch(r"[A-Z][A-Z_]+", str(name))} - {"ERROR"}
    page = (ROOT / "docs" / "environment.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == variables


def public_callables() -> Iterator[tuple[str, Any]]:
    """The public functions, and the public methods of public classes that are written here."""
    for name in ditile.__all__:
        public = getattr(ditile, name)
        if inspect.isfunction(public):
            yield name, public
        elif inspect.isclass(public):
            methods = inspect.getmembers(public, inspect.isfunction)
            yield from ((f"{name}.{key}", method) for key, method in methods if is_written_here(key, method))


def is_written_here(name: str, method: Any) -> bool:
    return not name.startswith("_") and method.__module__.startswith("ditile.")


def test_every_public_name_has_a_docstring() -> None:
    classes = [(name, getattr(ditile, name)) for name in ditile.__all__ if inspect.isclass(getattr(ditile, name))]
    assert not [name for name, public in [*classes, *public_callables()] if not inspect.getdoc(public)]


@pytest.mark.parametrize(("name", "function"), list(public_callables()))
def test_a_public_function_says_what_its_arguments_are(name: str, function: Any) -> None:
    """Of two arguments or more each is in the docstring; and a function that raises says what."""
    doc = inspect.getdoc(function) or ""
    parameters = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
    assert len(parameters) < 2 or not [key for key in parameters if not re.search(rf"\b{key}\b", doc)]
    raises = [node for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))) if is_error(node)]
    assert not raises or "Raises" in doc


def is_error(node: ast.AST) -> bool:
    """`raise X(...)`; a bare `raise` passes on what somebody else raised."""
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)


def test_the_page_of_a_package_index_has_no_relative_links() -> None:
    """With a repository its links are absolute; without one they are text, and its pictures are left out."""
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    readme = (ROOT / "README.md").read_text("utf-8")
    plain, absolute = setup["make_index_page"](readme, None), setup["make_index_page"](readme, "https://host/ditile")
    assert not re.search(r"\]\((?!https?://)", plain + absolute)
    assert "![" not in plain and "`docs/planner.md`" in plain
    assert "](https://host/ditile/raw/HEAD/docs/images/overview.png)" in absolute
    assert "](https://host/ditile/blob/HEAD/docs/planner.md)" in absolute
