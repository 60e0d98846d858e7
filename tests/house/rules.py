"""The rules of the house. Each takes a parsed file, and yields what is wrong with it; none knows the repository."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

FILE_LINES, FUNCTION_LINES = 600, 50
AXES = {"attend", "tokens", "blocks", "batch", "weights", "steps", "decode", "models"}
JOINED = {"compose", "cost", "planner"}
CALLED = {
    "runner",
    "caching",
    "quantization",
    "launch",
    "callbacks",
    "table",
    "supervise",
    "load",
    "portion",
    "options",
    "cache_options",
}
TOP = {
    "answer",
    "cli",
    "console",
    "measuring",
    "bench",
    "generate",
    "matrix",
    "outcome",
    "prompts",
    "results",
    "dry_run",
    "server",
    "__main__",
    "__init__",
}
BROAD = {"Exception", "BaseException"}
MAY_PICKLE = {"ditile/launch.py", "ditile/supervise.py"}  # pipes between a parent and the ranks that it started
MAY_CATCH_ALL = {"ditile/launch.py"}  # whatever ends a rank must be reported to its parent
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
    if source.path == "ditile/env.py":
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
    """Imports point down: top -> runner, launch -> compose, planner -> one axis or models -> core."""
    here = _part(_module(source.path))
    for module in sorted(set(_imports(source))):
        if module.split(".")[0] != "ditile":
            continue
        there = _part(module)
        sideways = here in AXES and there in AXES and here != there
        if sideways or _level(there) > _level(here):
            yield f"{here} imports {module}"


def _part(module: str) -> str:
    """`ditile.models.flux` is in `models`; the package itself is `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def _level(part: str) -> int:
    return next((4 - k for k, layer in enumerate((TOP, CALLED, JOINED, AXES)) if part in layer), 0)


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(source: Source) -> Iterator[str]:
    """Dotted names of what is imported; `from ditile import plan` is `ditile.plan`."""
    for node in source.find(ast.Import):
        yield from (name.name for name in node.names)
    for node in source.find(ast.ImportFrom):
        package = _module(source.path).split(".")
        base = ".".join(package[: len(package) - node.level]) + "." if node.level else ""
        module = (base + (node.module or "")).rstrip(".")
        if module == "ditile":
            yield from (f"ditile.{name.name}" for name in node.names)
        else:
            yield module


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
