"""The rules of the house. Each takes a parsed file, and yields what is wrong with it; none knows the repository."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

FILE_LINES, FUNCTION_LINES = 600, 50
PACKAGE = "src/ditile/"
ORDER = (
    "errors", "plan", "distributed", "hooks", "models", "parallel", "cache", "runner", "planner", "__init__", "cli",
    "__main__",
)  # fmt: skip
"""The parts of the package from the ground up: each may import itself and those before it."""
AXES = {"sequence", "pipefusion", "batch", "tensor", "text", "vae"}
"""The folders of `parallel` that do not import each other; all may import `parallel.attention`."""
BROAD = {"Exception", "BaseException"}
MAY_PICKLE = {
    PACKAGE + "distributed/launch.py",
    PACKAGE + "distributed/supervise.py",
}  # pipes between a parent and the ranks that it started
MAY_CATCH_ALL = {PACKAGE + "distributed/launch.py"}  # whatever ends a rank must be reported to its parent
MACHINE_PATH = re.compile(r"(?<![\w.\-}])/(work|root|tmp|home|Users)/")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
VAGUE = re.compile(r"^_?Base(?=[A-Z]|$)|Manager|Wrapper|Helper")


@dataclass(frozen=True)
class Source:
    """A file: its path from the root of the repository, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def find(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


def sizes(source: Source) -> Iterator[str]:
    """A file has at most 600 lines, a function at most 50 besides its docstring."""
    if (lines := len(source.text.splitlines())) > FILE_LINES:
        yield f"{lines} lines"
    for node in source.find(ast.FunctionDef, ast.AsyncFunctionDef):
        first = node.body[0]
        doc = (
            isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
        )
        lines = node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if doc else 0)
        if lines > FUNCTION_LINES:
            yield f"{node.name} has {lines} lines"


def globals_(source: Source) -> Iterator[str]:
    """State is passed."""
    for node in source.find(ast.Global):
        yield f"global {', '.join(node.names)}"


def environment(source: Source) -> Iterator[str]:
    """Only env.py reads the environment."""
    if source.path == PACKAGE + "distributed/env.py":
        return
    for node in source.find(ast.Attribute):
        if _dotted(node) in {"os.environ", "os.environb", "os.getenv", "os.putenv"}:
            yield _dotted(node)
    for node in source.find(ast.ImportFrom):
        if node.module == "os" and {"environ", "getenv"} & {name.name for name in node.names}:
            yield "environ from os"


def swallowed(source: Source) -> Iterator[str]:
    """What is caught is named; everything is caught only to be raised again."""
    for node in source.find(ast.ExceptHandler):
        kinds = _names(node.type) if node.type else {"everything"}
        again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if kinds & {*BROAD, "everything"} and not again and source.path not in MAY_CATCH_ALL:
            yield f"except {', '.join(sorted(kinds))}"
    for node in source.find(ast.Call):
        if _dotted(node.func).endswith("suppress") and any(_names(kind) & BROAD for kind in node.args):
            yield "suppress of everything"


def patched(source: Source) -> Iterator[str]:
    """Nothing is set on a class; overrides are on instances."""
    for node in source.find(ast.Assign, ast.AugAssign, ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and _is_class(target.value):
                yield f"{ast.unparse(target)} is set"
    for node in source.find(ast.Call):
        if _dotted(node.func) in {"setattr", "delattr"} and node.args and _is_class(node.args[0]):
            yield ast.unparse(node)


def unfinished(source: Source) -> Iterator[str]:
    """What is not done is an issue, not a comment."""
    yield from (match.group() for match in UNFINISHED.finditer(source.text))


def vague(source: Source) -> Iterator[str]:
    """Names say what a thing is."""
    if source.path.rsplit("/", 1)[-1] in {"utils.py", "helpers.py", "misc.py", "common.py"}:
        yield source.path
    yield from (node.name for node in source.find(ast.ClassDef) if VAGUE.search(node.name))


def machine_paths(source: Source) -> Iterator[str]:
    """No path of one machine."""
    yield from (match.group() for match in MACHINE_PATH.finditer(source.text))


def unsafe(source: Source) -> Iterator[str]:
    """Nothing that can run code is read from a file or a socket."""
    if source.path not in MAY_PICKLE:
        banned = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib"}
        yield from sorted(banned & {module.split(".")[0] for module in _imports(source)})
    for node in source.find(ast.Call):
        if _dotted(node.func) == "torch.load":
            yield "torch.load"
        if _dotted(node.func).startswith("dist.") and "_object" in _dotted(node.func):
            yield f"{_dotted(node.func)}: it unpickles what comes; use transport.gather_json"
        for word in node.keywords:
            refused = {"trust_remote_code": True, "use_safetensors": False}
            if word.arg in refused and getattr(word.value, "value", refused[word.arg]) == refused[word.arg]:
                yield f"{word.arg}={ast.unparse(word.value)}"


def directions(source: Source) -> Iterator[str]:
    """Imports point down, wherever they stand: also in functions, under TYPE_CHECKING, and by `import_module`.

    `cache` and `parallel` do not know each other, nor do the axes of `parallel`, which share `parallel.attention`.
    """
    here = _parts(_module(source.path))
    for module in sorted({*_imports(source), *_constant_imports(source)}):
        if module.split(".")[0] != "ditile":
            continue
        there = _parts(module)
        strangers = {here[0], there[0]} == {"parallel", "cache"}
        sideways = (
            here[0] == there[0] == "parallel" and here[1] != there[1] and (here[1] not in AXES or there[1] in AXES)
        )
        if strangers or sideways or ORDER.index(there[0]) > ORDER.index(here[0]):
            yield f"{'.'.join(filter(None, here))} imports {module}"
    yield from (f"import_module({module!r}) hides an import" for module in _constant_imports(source))


def _parts(module: str) -> tuple[str, str]:
    """`ditile.parallel.vae.halo` is in `parallel`, `vae`; the package itself is `__init__`."""
    names = [*module.split("."), "", ""]
    return names[1] or "__init__", names[2]


def _module(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(source: Source) -> Iterator[str]:
    """Dotted names of what is imported; `from ditile import plan` is `ditile.plan`."""
    for node in source.find(ast.Import):
        yield from (name.name for name in node.names)
    for node in source.find(ast.ImportFrom):
        package = _module(source.path).split(".")
        base = ".".join(package[: len(package) - node.level]) + "." if node.level else ""
        module = (base + (node.module or "")).rstrip(".")
        if module in {"ditile", "ditile.parallel"}:
            folders = {*ORDER, *AXES, "attention"}
            yield from (f"{module}.{name.name}" if name.name in folders else module for name in node.names)
        else:
            yield module


def _constant_imports(source: Source) -> Iterator[str]:
    """Modules of ditile that `import_module` is given as a constant."""
    for node in source.find(ast.Call):
        name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if _dotted(node.func).endswith("import_module") and isinstance(name, str) and name.startswith("ditile."):
            yield name


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _is_class(node: ast.AST) -> bool:
    """A capitalised name, `cls`, `type(x)` or `x.__class__`."""
    if isinstance(node, ast.Call):
        return _dotted(node.func) == "type"
    last = _dotted(node).rsplit(".", 1)[-1]
    return last in {"cls", "__class__"} or (last[:1].isupper() and not last.isupper())
