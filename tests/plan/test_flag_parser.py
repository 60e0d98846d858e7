"""Flags from dataclasses. A failure would mean that a flag is read as another one, or not at all."""

from __future__ import annotations

from typing import Literal

import pytest

from ditile.plan.errors import ModelError, PlanError
from ditile.plan.flag_parser import FlagParser, add_arguments, collect_arguments, format_flag, normalize_flags
from ditile.plan.option_classes import Counts, define_option, options


@options()
class Options:
    what: str = define_option("", "a thing", positional=True)
    num_steps: int = define_option(20, "steps")
    scale: float | None = define_option(None, "scale")
    kind: Literal["a", "b"] = define_option("a", "kind")
    parts: Counts | None = define_option(None, "parts", example="7,7,8")
    sizes: Counts | None = define_option(None, "sizes", example="256,512")
    dry: bool = define_option(False, "only look")
    sure: bool | None = define_option(None, "force or forbid")
    until: int | Literal["auto"] = define_option(1, "how long", metavar="W")
    fast: bool | Literal["auto"] = define_option(False, "whether to hurry", metavar="auto", implied=True)


def read(*words: str) -> dict[str, object]:
    parser = FlagParser(allow_abbrev=False)
    add_arguments(parser, Options, title="options")
    return collect_arguments(Options, parser.parse_args(normalize_flags(list(words))))


def test_every_kind_of_field_is_read() -> None:
    words = ("x y", "--num-steps", "3", "--scale", "1.5", "--kind", "b", "--parts", "1,2", "--dry")
    assert read(*words) == {
        "what": "x y", "num_steps": 3, "scale": 1.5, "kind": "b", "parts": (1, 2), "dry": True,
    }  # fmt: skip


def test_a_flag_that_may_stand_alone_takes_no_prompt() -> None:
    """A failure: `ditile generate --compile "a lighthouse"` would compile a lighthouse, and draw nothing."""
    assert read("--fast", "a lighthouse") == {"fast": True, "what": "a lighthouse"}
    assert read("--fast", "auto", "x") == read("x", "--fast=auto") == {"fast": "auto", "what": "x"}
    assert read("x", "--fast", "--dry") == {"fast": True, "what": "x", "dry": True}
    assert read("x", "--fast") == {"fast": True, "what": "x"} and Options(**read("x", "--fast")).fast is True
    with pytest.raises(PlanError, match="'fats' should be a valid boolean or 'auto'"):
        read("x", "--fast=fats")


def test_dash_and_underscore_are_the_same_in_names_and_not_in_values() -> None:
    assert normalize_flags(["--num_steps=1", "--out=a_b", "a_b", "--"]) == ["--num-steps=1", "--out=a_b", "a_b", "--"]
    assert read("x", "--num_steps", "4")["num_steps"] == 4
    assert format_flag("num_steps") == "--num-steps"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--kind", "c"), "argument --kind: 'c' should be 'a' or 'b'"),
        (("--num-steps", "x"), "argument --num-steps: 'x' should be a valid integer"),
        (("--parts", "1,x"), "argument --parts: '1,x' should be a valid integer, such as 7,7,8"),
        (("--until", "x"), "argument --until: 'x' should be a valid integer or 'auto'"),
        (("--sure=x",), "argument --sure/--no-sure: ignored explicit argument 'x'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_what_would_do(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        read("x", *words)
    assert str(caught.value).startswith(f"{says}; see ")


def test_three_valued_switches_and_words_beside_numbers() -> None:
    assert read("x", "--sure")["sure"] is True and read("x", "--no_sure")["sure"] is False
    assert "sure" not in read("x")
    assert read("x", "--until", "auto")["until"] == "auto" and read("x", "--until", "3")["until"] == 3


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_steps": "3"}, "num_steps='3' should be a valid integer; try num_steps=20"),
        ({"parts": (7, 0)}, "parts=(7, 0) should be greater than or equal to 1; try parts=7,7,8"),
        ({"until": True}, "until=True should be a valid integer or 'auto'; try until=1"),
        ({"num_step": 3}, "Options(num_step=..) is not known; did you mean num_steps?"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_name_and_what_would_do(
    values: dict[str, object], says: str
) -> None:
    """A failure: what a Python program gives is converted silently, or refused in several lines."""
    with pytest.raises(ModelError) as caught:
        Options(**values)
    assert str(caught.value) == says
