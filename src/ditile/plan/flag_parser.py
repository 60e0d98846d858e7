"""Flags of the command line, made from classes of options (`ditile.plan.option_classes`).

`-` and `_` are the same in a flag, abbreviations are refused, and nothing here imports torch.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import re
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from ditile.plan.errors import PlanError
from ditile.plan.option_classes import CallArguments, Seconds, iterate_literals, parse_option


class FlagParser(argparse.ArgumentParser):
    """A parser that raises a `DitileError` for a wrong command line, without the usage lines.

    Args:
        essential: the fields whose flags `--help` shows, each on one line or two; `--help-all` shows all flags.
            If it is empty, `--help` shows all flags too.
        options: the options of argparse.
    """

    def __init__(self, *args: Any, essential: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.essential = essential
        self.add_argument("--help-all", action=_ShowAllFlags, nargs=0, help="show every flag and exit")

    def format_help(self) -> str:
        """Return the help of the essential flags, without their defaults and the text after a semicolon."""
        if not self.essential:
            return super().format_help()
        arguments = [f"[{action.metavar}]" for action in self._actions if not action.option_strings]
        formatter = self._get_formatter()
        formatter.add_usage(" ".join([self.prog, *arguments, "[flags]"]), self._actions, [])
        formatter.add_text(self.description)
        shown: set[str] = set()
        for group in self._action_groups:
            formatter.start_section(group.title)
            for action in group._group_actions:
                # Aliases and switches of a flag come after it, with the same `dest`.
                if action.dest in self.essential and action.dest not in shown:
                    shown.add(action.dest)
                    short = copy.copy(action)
                    short.option_strings = action.option_strings[:1]
                    short.help = re.split(r"; | \(default ", action.help or "")[0]
                    formatter.add_argument(short)
            formatter.end_section()
        formatter.add_text(f"{self.prog} --help-all: every flag, with the spellings of other tools")
        return formatter.format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, except for flags with an optional value. These take no word that is not a valid value,
        such as a prompt."""
        words = []
        for word, following in itertools.pairwise([*(args or ()), None]):
            action: Any = self._option_string_actions.get(word)
            if action is not None and action.nargs == "?" and following is not None:
                try:
                    action.type(following)
                except argparse.ArgumentTypeError:
                    word = f"{word}={action.const}"
            words.append(word)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise the message as a `PlanError`."""
        flag = "--help-all" if self.essential else "--help"
        raise PlanError(f"{message}; see {self.prog} {flag}")


class _ShowAllFlags(argparse.Action):
    """The flag `--help-all`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print the help of all flags and exit."""
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser, cls: Any, *, title: str, left_out: Sequence[str] = ()) -> None:
    """Add one flag per field of `cls` that is not left out. A flag that is not given leaves no attribute."""
    group = parser.add_argument_group(title)
    types = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        if field.name in left_out:
            continue
        names, settings = _describe_argument(cls, field, types[field.name])
        # With SUPPRESS a flag that is not used leaves the default to the class.
        group.add_argument(*names, default=argparse.SUPPRESS, **settings)
        if field.metadata["positional"]:
            for flag in field.metadata["aliases"]:
                group.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, type=str, help=f"as {names[0]}")
        for flag, value in field.metadata["switches"].items():
            switch: CallArguments = {"action": "store_const", "const": value, "help": f"as {names[0]} {value}"}
            group.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, **switch)


def _describe_argument(cls: type, field: dataclasses.Field[Any], kind: Any) -> tuple[list[str], CallArguments]:
    """Return the names and the keyword arguments of `add_argument` for an option."""
    metadata = field.metadata
    names = [format_flag(field.name), *metadata["aliases"]]
    settings = {"help": metadata["doc"]}
    if kind is bool and field.default is False:
        return names, settings | {"action": "store_true"}
    if kind == bool | None:
        return names, settings | {"action": argparse.BooleanOptionalAction}
    settings["type"] = functools.partial(_read_text, cls, field.name)
    if metadata["positional"]:
        metavar = metadata["metavar"] or field.name.upper()
        return [field.name], settings | {"nargs": "?", "metavar": metavar}
    if field.default is not None and field.default is not False:
        settings["help"] += f" (default {field.default})"
    choices = list(iterate_literals(kind))
    if choices:
        settings["choices"] = choices
    settings["metavar"] = metadata["metavar"]
    if settings["metavar"] is None and not choices:
        settings["metavar"] = _choose_metavar(field, kind)
    # Each use of the flag adds a value, so a value is text and not yet a tuple.
    if metadata["repeats"]:
        settings |= {"action": "append", "type": str}
    if metadata["implied"] is not None:
        settings |= {"nargs": "?", "const": metadata["implied"]}
    return names, settings


def _choose_metavar(field: dataclasses.Field[Any], kind: Any) -> str:
    """Choose S for seconds, N for a whole number, X for another one, FILE for what is read; otherwise the name's last
    word."""
    kinds = [kind, *typing.get_args(kind)]
    if Seconds in kinds:
        return "S"
    plain_kinds = [getattr(part, "__origin__", part) for part in kinds]
    for number, letter in {int: "N", float: "X"}.items():
        if number in plain_kinds:
            return letter
    if field.metadata["reads"]:
        return "FILE"
    return field.name.split("_")[-1].upper()


def _read_text(cls: type, name: str, text: str) -> Any:
    """Read the text of an option. argparse shows the message of this error unchanged."""
    try:
        return parse_option(cls, name, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def collect_arguments(cls: Any, arguments: argparse.Namespace) -> CallArguments:
    """Return the given flags of `cls` as keyword arguments."""
    values = {}
    for field in dataclasses.fields(cls):
        if hasattr(arguments, field.name):
            value = getattr(arguments, field.name)
            # A flag that may be given more than once appends to a list.
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


def list_flags(cls: Any, *, left_out: Sequence[str] = ()) -> list[str]:
    """List the flags of those fields of `cls` that are not left out, aliases included."""
    flags = []
    for field in dataclasses.fields(cls):
        if field.name in left_out:
            continue
        if not field.metadata["positional"]:
            flags.append(format_flag(field.name))
        flags += [*field.metadata["aliases"], *field.metadata["switches"]]
    return flags


def format_flag(name: str) -> str:
    """Return the flag of a field: `stage_blocks` is `--stage-blocks`."""
    return "--" + name.replace("_", "-")


def normalize_flags(argv: list[str]) -> list[str]:
    """Turn `--stage_blocks=1,2` into `--stage-blocks=1,2`: `-` and `_` are the same in a flag's name."""
    words: list[str] = []
    for word in argv:
        # xDiT's flag for this field has blanks between its numbers.
        if words and words[-1].startswith("--attn-layer-num-for-pp") and word.replace(",", "").isdecimal():
            words[-1] = f"{words[-1]},{word}".replace("pp,", "pp=")
            continue
        if word.startswith("--") and word != "--":
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        words.append(word)
    return words
