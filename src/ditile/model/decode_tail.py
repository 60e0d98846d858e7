"""The decode of a pipeline's call: the statements after its loop, which can run later, and without the loop's models.

diffusers has no function for it: unpacking, scaling, the VAE, the vocoder and the postprocessing are written into the
end of each `__call__`. So these statements themselves are compiled as a function of the local variables that they read,
whose values `capture_decode` takes from the call's frame when the loop ends. Latents of any class are then decoded by
the class's own code, and no table says how.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import dataclass
from functools import cached_property
from types import FrameType, FunctionType
from typing import Any

from ditile.model.hooks.overrides import find_plain_class


@dataclass(frozen=True)
class DecodeTail:
    """The statements of a pipeline's call after the statement that holds its loop.

    Attributes:
        pipeline: the class.
        place: of the statement with the loop, among those of the call.
        function: the syntax tree of a function with the tail as its body.
    """

    pipeline: type
    place: int
    function: ast.FunctionDef

    @classmethod
    def find_after(cls, pipeline: type, place: int) -> DecodeTail | None:
        """Find what follows a statement of a class's call. None if nothing does."""
        function = _parse_call(pipeline)
        if not 0 <= place < len(function.body) - 1:
            return None
        function.body = function.body[place + 1 :]
        return cls(pipeline, place, function)

    def list_names(self, context: type[ast.expr_context] = ast.Load) -> list[str]:
        """List the local variables of the call that the tail reads, or sets."""
        code = _find_call(self.pipeline).__code__
        local = {*code.co_varnames, *code.co_cellvars} - {"self"}
        nodes = [node for node in ast.walk(self.function) if isinstance(node, ast.Name)]
        return sorted(local & {node.id for node in nodes if isinstance(node.ctx, context)})

    @cached_property
    def attributes(self) -> set[str]:
        """Return the attributes of the pipeline in the tail, and in the methods of the class that it calls."""
        found: set[str] = set()
        texts = [ast.unparse(self.function)]
        while texts:
            new = set(re.findall(r"\bself\.(\w+)", texts.pop())) - found
            found |= new
            for name in new:
                method = inspect.getattr_static(self.pipeline, name, None)
                method = getattr(method, "fget", None) or getattr(method, "__func__", method)
                if inspect.isfunction(method):
                    texts.append(inspect.getsource(method))
        return found

    def run(self, pipe: Any, values: dict[str, Any]) -> Any:
        """Run the tail on a pipeline, with the values of local variables, and return the result of the call."""
        names = ["self", *values]
        # Names of a file are not parsed: one could hold an expression.
        arguments = [ast.arg(name) for name in names]
        self.function.args = ast.arguments(posonlyargs=[], args=arguments, kwonlyargs=[], kw_defaults=[], defaults=[])
        call = _find_call(self.pipeline)
        namespace = dict(call.__globals__)
        module = ast.fix_missing_locations(ast.Module([self.function], type_ignores=[]))
        # A traceback of the tail then shows the lines of the pipeline's own file.
        exec(compile(module, call.__code__.co_filename, "exec", dont_inherit=True), namespace)
        return namespace[self.function.name](pipe, **values)


@dataclass(frozen=True)
class DecodeState:
    """All that the decode of a call reads, except for the pipeline's components.

    Attributes:
        tail: the statements that decode.
        values: of the local variables that the tail reads and the loop has set.
        attributes: the plain values among those that the call has set on the pipeline, such as `_guidance_scale`.
    """

    tail: DecodeTail
    values: dict[str, Any]
    attributes: dict[str, Any]


def capture_decode(pipe: Any) -> DecodeState | None:
    """Capture what the decode reads, in a function that the loop calls when it ends.

    Returns:
        None where the decode is not simply what follows: of a modular pipeline, or within an outer loop.
    """
    pipeline = find_plain_class(pipe)
    code = _find_call(pipeline).__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return None
    try:
        statements = _parse_call(pipeline).body
    except OSError:
        # An installation without sources.
        return None
    for place, statement in enumerate(statements):
        if not _ends_with_loop(statement, frame.f_lineno):
            continue
        tail = DecodeTail.find_after(pipeline, place)
        if tail is None:
            return None
        values = {name: frame.f_locals[name] for name in tail.list_names() if name in frame.f_locals}
        attributes = {}
        for name in tail.attributes & vars(pipe).keys():
            if name.startswith("_") and isinstance(vars(pipe)[name], bool | int | float | str | None):
                attributes[name] = vars(pipe)[name]
        return DecodeState(tail, values, attributes)
    return None


def _ends_with_loop(statement: ast.stmt, line: int) -> bool:
    """Return whether a statement is a loop whose head is at a line, or ends with it. An outer loop would go on."""
    loops = [node for node in ast.walk(statement) if isinstance(node, ast.For | ast.While)]
    around = [loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or 0)]
    if len(around) != 1 or line >= around[0].body[0].lineno:
        return False
    end = statement.end_lineno
    # What `finally` has restores the models of the loop.
    for node in ast.walk(statement):
        if isinstance(node, ast.Try) and node.finalbody and not node.orelse:
            end = node.body[-1].end_lineno
    return around[0].end_lineno == end


def _find_call(pipeline: type) -> FunctionType:
    call: Any = pipeline.__call__
    function: FunctionType = inspect.unwrap(call)
    return function


def _parse_call(pipeline: type) -> ast.FunctionDef:
    """Parse a class's call, with the lines of its file."""
    lines, first = inspect.getsourcelines(_find_call(pipeline))
    function: Any = ast.parse(textwrap.dedent("".join(lines))).body[0]
    ast.increment_lineno(function, first - 1)
    # Gradients are off around it, and its annotations may name what is imported for type checkers alone.
    function.decorator_list = []
    function.returns = None
    return function  # type: ignore[no-any-return]
