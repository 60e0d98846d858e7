"""Classes of options: frozen dataclasses that pydantic validates, with flags, `--help` and JSON made from them.

    @options(error=PlanError)
    class Plan:
        pipefusion: Ranks = define_option(1, "stages that the blocks are divided into")

The type of a field is its check: `Plan(pipefusion=0)` raises `PlanError: pipefusion=0 should be greater than or equal
to 1; try pipefusion=1`. A `__post_init__` checks what concerns several fields. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass

from ditile.plan.errors import DitileError, ModelError, quote_value, suggest_nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        """Do nothing at run time, because Python 3.10 lacks this function. It tells type checkers that `options` makes
        dataclasses."""
        return lambda function: function


CallArguments = dict[str, Any]
"""The arguments of a call, by name."""
JsonObject = dict[str, Any]
"""An object of JSON: an answer, a report, a section of a file."""
OptionsT = TypeVar("OptionsT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Key = TypeVar("Key")
Value = TypeVar("Value")


def drop_missing(values: Mapping[Key, Value | None]) -> dict[Key, Value]:
    """Drop the entries that are None."""
    return {key: value for key, value in values.items() if value is not None}


def _split_at_commas(value: Any) -> Any:
    """Turn several numbers into a tuple, from the text of a flag or a list in JSON."""
    if isinstance(value, str):
        return tuple(value.split(","))
    return tuple(value) if isinstance(value, list) else value


# The upper limits are more than any run needs, and low enough that a mistyped number does not fill the memory.
Count = Annotated[int, Field(ge=1, le=2**31)]
Ranks = Annotated[int, Field(ge=1, le=1024)]
Images = Annotated[int, Field(ge=1, le=1024)]
Steps = Annotated[int, Field(ge=1, le=10_000)]
Pixels = Annotated[int, Field(ge=1, le=2**16)]
Frames = Annotated[int, Field(ge=1, le=100_000)]
Scale = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_split_at_commas)]
Indices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_split_at_commas)]
# Within these limits, sums of speeds stay finite, shares of a run exact, and products of three speeds above 0.
Speed = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]
Speeds = Annotated[tuple[Speed, ...], BeforeValidator(_split_at_commas)]


def define_option(
    default: Any,
    doc: str,
    *,
    metavar: str | None = None,
    positional: bool = False,
    aliases: tuple[str, ...] = (),
    switches: Mapping[str, Any] = MappingProxyType({}),
    example: Any = None,
    reads: bool | Callable[[str], str] = False,
    implied: str | bool | None = None,
    repeats: bool = False,
) -> Any:
    """Define a field of a class of options.

    Args:
        default: the value without the flag. A bool whose default is False is a switch; with the default None there is a
            `--no-` form too.
        doc: the text of `--help`, on one line.
        metavar: as in `argparse`; by default it says the type.
        positional: whether it is an argument without a flag.
        aliases: other spellings of the flag, with their dashes, such as those of xDiT and cache-dit.
        switches: flags without a value of their own -> the value that each sets.
        example: the value that an error proposes; without one, the limit that was exceeded, or the default.
        reads: whether the value names a file or folder that is read, so that no output may overwrite it; or a function
            from the value to that name.
        implied: the value of the flag if no word follows it, or the next word is not a valid value.
        repeats: whether the flag may be given more than once; the value is a tuple.
    """
    # pydantic reads limits from the types; it ignores metadata with other names.
    metadata: dict[str, Any] = {"doc": doc, "metavar": metavar, "positional": positional, "aliases": aliases}
    metadata |= {"switches": switches, "example": example, "reads": reads, "implied": implied, "repeats": repeats}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(*, error: type[DitileError] = ModelError) -> Callable[[type[OptionsT]], type[OptionsT]]:
    """Turn a class into a frozen dataclass of options. It raises `error` for an unknown name or a wrong value."""
    config = ConfigDict(strict=True, extra="forbid")

    def build(cls: type[OptionsT]) -> type[OptionsT]:
        built: Any = validated_dataclass(frozen=True, kw_only=True, config=config)(cls)
        validate: Callable[..., None] = built.__init__

        # pydantic has no setting for the type of error that a dataclass raises.
        def initialize(self: Any, *nameless: Any, **values: Any) -> None:
            """Set each attribute by its name, and check it."""
            try:
                validate(self, *nameless, **values)
            except ValidationError as invalid:
                raise _convert_error(invalid, built, values, error) from None

        initialize.__name__ = "__init__"
        initialize.__qualname__ = f"{cls.__qualname__}.__init__"
        built.__init__ = initialize
        # The docstring gets the `--help` text of each field.
        head, _, rest = inspect.cleandoc(built.__doc__ or "").partition("Raises:")
        lines = [head.rstrip(), "", "Attributes:"]
        for field in dataclasses.fields(built):
            line = f"    {field.name}: {field.metadata['doc']}"
            if field.default is not None:
                line += f" (default {field.default})"
            lines.append(line)
        raised = rest.strip("\n") or f"    {error.__name__}: if a value is out of its range."
        built.__doc__ = "\n".join([*lines, "", "Raises:", raised])
        return cast(type[OptionsT], built)

    return build


def _convert_error(invalid: ValidationError, cls: Any, values: dict[str, Any], kind: type[DitileError]) -> Exception:
    """Return the error to raise for pydantic's. An error of `__post_init__` is returned unchanged."""
    rows = invalid.errors(include_url=False)
    # PlanError and ModelError are ValueErrors, and pydantic wraps a ValueError of `__post_init__`.
    raised = rows[0].get("ctx", {}).get("error")
    if isinstance(raised, Exception):
        return raised
    name = str(rows[0]["loc"][0])
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if name.isdigit():
        return kind(f"{cls.__name__}({quote_value(rows[0]['input'])}) needs a name, as in {next(iter(fields))}=..")
    if name not in fields:
        hint = suggest_nearest(name, fields, f"known are {', '.join(fields)}")
        return kind(f"{cls.__name__}({name}=..) is not known; {hint}")
    # For a union, pydantic reports a row for each of its types.
    own_rows = [row for row in rows if row["loc"][0] == name]
    field = fields[name]
    return kind(describe_wrong_value(name, values.get(name), own_rows, field.metadata["example"], field.default))


def describe_wrong_value(name: str, value: Any, rows: Sequence[ErrorDetails], example: Any, default: Any = None) -> str:
    """Describe a wrong value in one line: the field, its value, the expected values, and a value that works.

    Args:
        name, value: the field or argument, and its value.
        rows: the errors that pydantic found.
        example: the value to propose; without one, the limit that was exceeded, or `default`.
    """
    limits = rows[0].get("ctx", {})
    for proposed in (example, limits.get("ge"), limits.get("le"), default):
        if proposed is not None:
            # In "image='0x5': width" the field's own name is the last word.
            own_name = name.rpartition(" ")[2]
            return f"{name}={quote_value(value)} should be {join_expectations(rows)}; try {own_name}={proposed}"
    return f"{name}={quote_value(value)} should be {join_expectations(rows)}"


def join_expectations(rows: Sequence[ErrorDetails]) -> str:
    """Join the expectations of pydantic's errors in its words: "a valid integer or 'auto'"."""
    texts = []
    for row in rows:
        text = row["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if row["type"] == "sequence_str":
            text = "a list"
        texts.append(text.partition(", unable to")[0].partition(", got")[0])
    return " or ".join(dict.fromkeys(texts))


def check_value(
    kind: Any, value: Any, name: str, *, error: type[DitileError] = ModelError, example: Any = None
) -> None:
    """Raise `error` unless `value` has the type `kind`, such as `Count | None`. The error proposes `example`."""
    try:
        adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
        adapter.validate_python(value, strict=True)
    except ValidationError as invalid:
        raise error(describe_wrong_value(name, value, invalid.errors(), example)) from None


def checked(error: type[DitileError] = ModelError) -> Callable[[FunctionT], FunctionT]:
    """Make a function raise `error` for an argument that is unknown, missing or of a wrong type."""

    def decorate(function: FunctionT) -> FunctionT:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError as wrong:
                raise error(f"{function.__name__}: {wrong}") from None
            check_values(function, arguments, error)
            return function(*args, **kwargs)

        return cast(FunctionT, call)

    return decorate


def check_values(annotated: Any, values: Mapping[str, Any], error: type[DitileError] = ModelError) -> None:
    """Raise `error` for a value of another type than a function, or a class, says in its annotations."""
    for name, (adapter, example) in _build_adapters(annotated).items():
        if name in values:
            check_value(adapter, values[name], name, error=error, example=example)


# Adapters are built at the first call, because only then do modules have all names in their annotations.
@functools.cache
def _build_adapters(annotated: Any) -> dict[str, tuple[TypeAdapter[Any], Any]]:
    """Return the type of each argument, or of each field of a dataclass, and an example of its value."""
    adapters = {}
    fields = getattr(annotated, "__dataclass_fields__", {})
    for name, kind in typing.get_type_hints(annotated, include_extras=True).items():
        example = None
        if name in fields:
            example = fields[name].metadata.get("example", fields[name].default)
        # Other names of a class are not fields.
        if name in fields or (not fields and name != "self"):
            adapters[name] = TypeAdapter(_use_instances(kind)), example
    return adapters


def _use_instances(kind: Any) -> Any:
    """Return a type whose classes are checked only by `isinstance`, whatever fields they have."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = tuple(_use_instances(part) for part in typing.get_args(kind))
        return typing.Union[parts]  # noqa: UP007
    # In Python 3.11 and later `Any` is a class too.
    is_class = isinstance(kind, type) and kind is not Any and typing.get_origin(kind) is None
    if is_class and kind.__module__ != "builtins":
        return Annotated[kind, InstanceOf()]  # type: ignore[type-arg]
    return kind


def parse_option(cls: type, name: str, text: str) -> Any:
    """Parse the text of an option. Raises `ValueError` with a message that says what the value should be."""
    adapter, example = _build_adapters(cls)[name]
    try:
        return adapter.validate_python(text, strict=False)
    except ValidationError as invalid:
        expected = join_expectations(invalid.errors())
    proposal = "" if example is None else f", such as {example}"
    raise ValueError(f"{quote_value(text)} should be {expected}{proposal}")


def iterate_literals(kind: Any) -> Iterator[Any]:
    """Yield the values of a `Literal` type, which may be optional. Any other type has none."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        yield from parts
        return
    others = [part for part in parts if part is not type(None)]
    if len(others) == 1:
        yield from iterate_literals(others[0])
