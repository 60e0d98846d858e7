"""The rules of the house. Each takes a parsed file, or all files, and yields what is wrong with them.

None of them reads the repository: the tests hand it over.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

FUNCTION_LINES = 50
ROOT_ENTRIES, FOLDER_FILES, FORMAT_SKIPS = 14, 16, 20
LONELY_LINES = 60
"""A module with fewer lines that one other alone imports belongs into that one, unless it is data."""
# What the package held when each rule was written. A figure here may only be replaced by a better one.
MOST_NODES = {
    "plan": 23_600,
    "distributed": 26_900,
    "model": 53_250,
    "parallel": 67_850,
    "cache": 40_550,
    "runner": 71_650,
    "planner": 43_200,
    "serve": 40_600,
    "cli": 14_700,
    "": 400,
    "lab": 70_000,
}
"""Top folder of the package -> its nodes of the syntax tree; "" are the files beside them, and the lab counts whole."""
MOST_DENSE = {
    "conditional expressions in 1,000 lines": 9.8,
    "tuple assignments in 1,000 lines": 0.2,
    "comprehensions in 1,000 lines": 27.0,
}
LEAST_COMMENTS = 4.5
"""Comments on a line of their own, in 100 lines of code."""
MOST_NOUNS_FIRST = 2.0
"""Of 100 docstrings of functions, those that begin with a noun phrase or "Whether" instead of a verb."""
NO_VERBS = {
    "a", "all", "an", "each", "how", "its", "of", "one", "that", "the", "their", "this", "those", "what", "where",
    "whether", "which", "why",
}  # fmt: skip
PACKAGE, LAB = "src/ditile/", "src/ditile_lab/"
ORDER = (
    "plan", "distributed", "model", "parallel", "cache", "runner", "planner", "serve", "__init__", "cli",
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
MAY_CATCH_ALL = {
    PACKAGE + "distributed/launch.py",  # whatever ends a rank must be reported to its parent
    PACKAGE + "serve/ray_replicas/actor.py",  # the same, to its replica
    LAB + "study/probe.py",  # a pipeline of anybody's is called in ways that it may not have been made for
    LAB + "study/prove.py",
    LAB + "study/autoencoders.py",
    LAB + "study/thread_ranks.py",  # what a thread raises is raised where it was started
}
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
    """A function has at most 50 lines besides its docstring."""
    for node in source.find(ast.FunctionDef, ast.AsyncFunctionDef):
        first = node.body[0]
        doc = (
            isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
        )
        lines = node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if doc else 0)
        if lines > FUNCTION_LINES:
            yield f"{node.name} has {lines} lines"


def root_entries(sources: Sequence[Source]) -> Iterator[str]:
    """The root of the package has at most 14 entries."""
    entries = {s.path.removeprefix(PACKAGE).split("/")[0] for s in sources if s.path.startswith(PACKAGE)}
    if len(entries) > ROOT_ENTRIES:
        yield f"{len(entries)} entries: {', '.join(sorted(entries))}"


def folders(sources: Sequence[Source]) -> Iterator[str]:
    """A folder of the package has at most 16 modules beside its `__init__`."""
    modules = [s.path for s in _modules(sources) if not s.path.endswith("/__init__.py")]
    for folder, count in Counter(path.rpartition("/")[0] for path in modules).items():
        if count > FOLDER_FILES:
            yield f"{folder} has {count} modules"


def twins(sources: Sequence[Source]) -> Iterator[str]:
    """No two classes of the package have one name."""
    places = [(node.name, source.path) for source in _modules(sources) for node in source.find(ast.ClassDef)]
    for name, count in Counter(name for name, _ in places).items():
        if count > 1:
            yield f"{name} is in {', '.join(path for each, path in places if each == name)}"


def format_skips(sources: Sequence[Source]) -> Iterator[str]:
    """The formatter is switched off at most 20 times in the package, for tables."""
    skips = [source.path for source in _modules(sources) for _ in re.findall(r"# fmt: (?:skip|off)", source.text)]
    if len(skips) > FORMAT_SKIPS:
        yield f"{len(skips)} times: {Counter(skips)}"


def lonely(sources: Sequence[Source]) -> Iterator[str]:
    """No module under 60 lines is imported by one other file alone, unless it is data: without functions."""
    importers = Counter(module for source in _modules(sources) for module in _imported_modules(source))
    for source in _modules(sources):
        module, lines = _module(source.path), len(source.text.splitlines())
        if lines < LONELY_LINES and importers[module] == 1 and any(source.find(ast.FunctionDef)):
            yield f"{source.path} has {lines} lines and one importer"


def rooms(sources: Sequence[Source]) -> Iterator[str]:
    """A top folder of the package has at most as many nodes of the syntax tree as its ceiling; a new one needs one."""
    counts: Counter[str] = Counter()
    for source in _modules(sources):
        room = source.path.removeprefix(PACKAGE).rpartition("/")[0].partition("/")[0]
        if source.path.startswith(LAB):
            room = "lab"
        counts[room] += sum(1 for _ in ast.walk(source.tree))
    for room, nodes in counts.items():
        if nodes > MOST_NODES.get(room, 0):
            yield f"{room or 'beside the rooms'}: {nodes} nodes, at most {MOST_NODES.get(room, 'not said')}"


def first_words(sources: Sequence[Source]) -> Iterator[str]:
    """A docstring of a function begins with a verb: Return, Yield, Check; a predicate's with "Return whether"."""
    words = []
    for source in _modules(sources):
        for node in source.find(ast.FunctionDef, ast.AsyncFunctionDef):
            first = re.match(r"\W*(\w+)", ast.get_docstring(node) or "")
            if first is not None:
                words.append(first[1].lower())
    nouns = sum(word in NO_VERBS for word in words)
    if nouns * 100 > MOST_NOUNS_FIRST * len(words):
        yield f"{nouns} of {len(words)} docstrings of functions begin with no verb, at most {MOST_NOUNS_FIRST} of 100"


def density(sources: Sequence[Source]) -> Iterator[str]:
    """Code is unfolded: one thought a line, and a comment before each hidden reason."""
    modules = _modules(sources)
    code = sum(len(_find_code_lines(source)) for source in modules)
    if code == 0:
        return
    for form, number in _count_dense_forms(modules).items():
        if number * 1000 / code > MOST_DENSE[form]:
            yield f"{number * 1000 / code:.2f} {form}, at most {MOST_DENSE[form]}"
    comments = sum(len(re.findall(r"^ *#", source.text, re.MULTILINE)) for source in modules)
    if comments * 100 / code < LEAST_COMMENTS:
        yield f"{comments * 100 / code:.2f} comments in 100 lines of code, at least {LEAST_COMMENTS}"


def _count_dense_forms(sources: Sequence[Source]) -> dict[str, int]:
    """How often each form of `MOST_DENSE` stands in these files."""
    counts = dict.fromkeys(MOST_DENSE, 0)
    conditionals, tuples, comprehensions = counts
    for source in sources:
        for node in ast.walk(source.tree):
            counts[conditionals] += isinstance(node, ast.IfExp)
            counts[comprehensions] += isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp))
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                counts[tuples] += isinstance(node.value, ast.Tuple)
    return counts


def _find_code_lines(source: Source) -> set[int]:
    """The numbers of the lines that hold more than a comment or a docstring."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for statement in source.find(ast.Expr):
        # Docstrings, those of attributes too.
        if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
            lines.difference_update(range(statement.lineno, statement.end_lineno + 1))
    return lines


def _modules(sources: Sequence[Source]) -> list[Source]:
    return [s for s in sources if s.path.startswith((PACKAGE, LAB)) and s.path.endswith(".py")]


def _imported_modules(source: Source) -> set[str]:
    """What a file imports, each name of `from package import name` as a module too."""
    modules = {*_imports(source), *_constant_imports(source)}
    for node in source.find(ast.ImportFrom):
        modules |= {f"{node.module}.{name.name}" for name in node.names}
    return modules


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

    `cache` and `parallel` do not know each other, nor do the axes of `parallel`, which share `parallel.attention`. The
    lab stands above all, and is reached through `import_lab` alone.
    """
    if source.path.startswith(LAB):
        return
    here = _parts(_module(source.path))
    for module in sorted({*_imports(source), *_constant_imports(source)}):
        if module.split(".")[0] == "ditile_lab":
            yield f"{'.'.join(filter(None, here))} imports {module}"
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
        if (
            _dotted(node.func).endswith("import_module")
            and isinstance(name, str)
            and name.startswith(("ditile.", "ditile_lab."))
        ):
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
