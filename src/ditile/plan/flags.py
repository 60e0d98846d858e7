"""A frozen dataclass is the one description of a set of options: its CLI flags and its JSON come from here.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Plan:
        pipefusion: int = define_option(1, "stages that the blocks are cut into")

`-` and `_` are the same in a flag, abbreviations are refused, and nothing here imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ditile.plan.errors import PlanError


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads a value from text; the error for other text says what it wants.

    Attributes:
        what: what it wants, such as "a whole number".
        parse: raises a ValueError for other text.
    """

    what: str
    parse: Callable[[str], Any]

    def __call__(self, text: str) -> Any:
        """The value. Raises `argparse.ArgumentTypeError`, whose message `argparse` shows as it is."""
        try:
            return self.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {self.what}") from None


def define_option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    positional: bool = False,
    aliases: tuple[str, ...] = (),
    example: str | None = None,
    reads: bool = False,
    implied: str | bool | None = None,
    repeats: bool = False,
) -> Any:
    """A dataclass field with its default and the one line that `--help` shows.

    Args:
        default: a bool that is False is a switch; one that is None has a `--no-` form too.
        doc: what `--help` says.
        choices, metavar: as in `argparse`.
        positional: whether it is an argument without a flag.
        aliases: other flags, as they are written.
        example: several numbers, for the error where they cannot be read.
        reads: whether the value names a file or folder that is read, over which no output may be written.
        implied: the value of the flag where none follows it, or a word that is no value of it.
        repeats: whether the flag may be given more than once; the value is a tuple.
    """
    metadata = {"doc": doc, "choices": choices, "metavar": metavar, "positional": positional, "aliases": aliases}
    metadata |= {"example": example, "reads": reads, "implied": implied, "repeats": repeats}
    return dataclasses.field(default=default, metadata=metadata)


def build_docstring(doc: str | None, fields: Mapping[str, Any]) -> str:
    """A class's docstring with what `--help` says of each of its fields as their `Attributes`.

    Args:
        doc: the docstring, whose last part is what the class raises.
        fields: the names in the class's body.
    """
    head, raises, rest = inspect.cleandoc(doc or "").partition("Raises:")
    field_lines = [
        f"    {name}: {field.metadata['doc']}" + ("" if field.default is None else f" (default {field.default})")
        for name, field in fields.items()
        if isinstance(field, dataclasses.Field)
    ]
    return head + "\n".join(["Attributes:", *field_lines]) + "\n\n" + raises + rest


def build_signature(fields: Mapping[str, Any]) -> inspect.Signature:
    """The signature that `help` shows for a class of these fields whose `__new__` takes any keyword."""
    options = {name: field for name, field in fields.items() if isinstance(field, dataclasses.Field)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([inspect.Parameter(n, keyword, default=field.default) for n, field in options.items()])


def parse_integers(text: str) -> tuple[int, ...]:
    """`"7,7,8"` as `(7, 7, 8)`. Raises `ValueError` if a part is not a whole number."""
    return tuple(int(part) for part in text.split(","))


def parse_numbers(text: str) -> tuple[float, ...]:
    """`"1,0.5"` as `(1.0, 0.5)`. Raises `ValueError` if a part is no number."""
    return tuple(float(part) for part in text.split(","))


def iter_field_readers(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Reader]]:
    """Each field of a dataclass with what reads it from text."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield field, _build_reader(hints[field.name], field.metadata.get("example"))


class FlagParser(argparse.ArgumentParser):
    """Raises a `DitileError` for a wrong command line, without the usage lines.

    Args:
        essential: the fields whose flags `--help` shows, each on one line or two; `--help-all` shows all flags.
            Empty: both show all of them.
        options: those of argparse.
    """

    def __init__(self, *args: Any, essential: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.essential = essential
        self.add_argument("--help-all", action=_ShowAllFlags, nargs=0, help="show every flag and exit")

    def format_help(self) -> str:
        """The help of the essential flags, without their defaults and what follows a semicolon."""
        if not self.essential:
            return self.format_full_help()
        arguments = [f"[{action.metavar}]" for action in self._actions if not action.option_strings]
        formatter = self._get_formatter()
        formatter.add_usage(" ".join([self.prog, *arguments, "[flags]"]), self._actions, [])
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            for action in group._group_actions:
                if action.dest in self.essential:
                    short = copy.copy(action)
                    short.help = re.split(r"; | \(default ", action.help or "")[0]
                    formatter.add_argument(short)
            formatter.end_section()
        formatter.add_text(f"{self.prog} --help-all: every flag, with the spellings of other tools")
        return formatter.format_help()

    def format_full_help(self) -> str:
        """The help of all flags."""
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever, but a flag that may stand alone takes no word behind it that it cannot read, such as a prompt."""
        words: list[str] = []
        for word, following in itertools.pairwise([*(args or ()), None]):
            action = self._option_string_actions.get(word)
            stands_alone = action is not None and action.nargs == "?"
            if action is not None and stands_alone and following is not None and not _can_read(action, following):
                word = f"{word}={action.const}"
            words.append(word)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        flag = "--help-all" if self.essential else "--help"
        raise PlanError(f"{message}; see {self.prog} {flag}")


class _ShowAllFlags(argparse.Action):
    """The flag `--help-all`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Prints the help of all flags and exits."""
        assert isinstance(parser, FlagParser), "it is added to no other"
        print(parser.format_full_help(), end="")
        parser.exit()


def _can_read(action: argparse.Action, word: str) -> bool:
    assert isinstance(action.type, Reader), "`add_arguments` made the flag"
    try:
        action.type(word)
    except argparse.ArgumentTypeError:
        return False
    return True


def add_arguments(parser: argparse.ArgumentParser, cls: type, *, title: str, left_out: Sequence[str] = ()) -> None:
    """Adds one flag per field of `cls` that is not left out; a flag that is not given leaves no attribute."""
    group = parser.add_argument_group(title)
    for field, read in iter_field_readers(cls):
        if field.name in left_out:
            continue
        doc, choices, metavar = (field.metadata[key] for key in ("doc", "choices", "metavar"))
        flags = (format_flag(field.name), *field.metadata["aliases"])
        if field.metadata["positional"]:
            group.add_argument(
                field.name,
                type=read,
                help=doc,
                metavar=metavar or field.name.upper(),
                nargs="?",
                default=argparse.SUPPRESS,
            )
        elif read is BOOLEAN:
            action = "store_true" if field.default is False else argparse.BooleanOptionalAction
            group.add_argument(*flags, action=action, help=doc, default=argparse.SUPPRESS)
        else:
            implied = field.metadata["implied"]
            group.add_argument(
                *flags,
                action="append" if field.metadata["repeats"] else "store",
                type=read,
                nargs=None if implied is None else "?",
                const=implied,
                choices=choices,
                default=argparse.SUPPRESS,
                help=doc + ("" if field.default is None or field.default is False else f" (default {field.default})"),
                metavar=metavar or (None if choices else field.name.split("_")[-1].upper()),
            )


def collect_arguments(cls: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The given flags of `cls` as keyword arguments."""
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(cls) if hasattr(arguments, f.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def list_flags(cls: type) -> list[str]:
    """The flags of `cls`, aliases included."""
    fields = dataclasses.fields(cls)
    return [one for field in fields for one in (format_flag(field.name), *field.metadata["aliases"])]


def format_flag(name: str) -> str:
    """The flag of a field: `stage_blocks` is `--stage-blocks`."""
    return "--" + name.replace("_", "-")


def normalize_flags(argv: list[str]) -> list[str]:
    """`--stage_blocks=1,2` as `--stage-blocks=1,2`: `-` and `_` are the same in a flag's name."""

    def normalize_word(word: str) -> str:
        name, equals, value = word.partition("=")
        return name.replace("_", "-") + equals + value if word.startswith("--") and word != "--" else word

    return [normalize_word(word) for word in argv]


def parse_boolean(text: str) -> bool:
    """`"True"` or `"false"` as a bool. Raises `ValueError` if the text is neither."""
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


BOOLEAN = Reader("True or False", parse_boolean)
_READERS_OF_TYPES = {
    bool: BOOLEAN,
    int: Reader("a whole number", int),
    float: Reader("a number", float),
    str: Reader("text", str),
}


def _build_reader(hint: Any, example: str | None = None) -> Reader:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [_build_reader(kind, example) for kind in typing.get_args(hint) if kind is not types.NoneType]
        what = " or ".join(kind.what for kind in kinds)
        return kinds[0] if len(kinds) == 1 else Reader(what, functools.partial(_parse_first_match, kinds))
    if typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is str:
        return _READERS_OF_TYPES[str]  # of one of several flags
    if typing.get_origin(hint) is tuple:
        such = "" if example is None else f" such as {example}"
        whole = typing.get_args(hint)[0] is int
        return Reader("whole numbers" + such, parse_integers) if whole else Reader("numbers" + such, parse_numbers)
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        what = choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
        return Reader(what, functools.partial(_parse_choice, choices))
    return _READERS_OF_TYPES[hint]


def _parse_choice(choices: tuple[str, ...], text: str) -> str:
    if text not in choices:
        raise ValueError(text)
    return text


def _parse_first_match(kinds: list[Reader], text: str) -> Any:
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return kind.parse(text)
    raise ValueError(text)
