"""Plan: how one picture is divided over the ranks. Validated when made, checked against a model before it runs.

A plan is a value: it knows no process, device or model. `str(plan)` is one line that `Plan.parse` reads back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from ditile.errors import PlanError
from ditile.flags import flag, option, readers

WARMUP_MODES = ("serial",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Degrees, patches and warmup of one generation.

    Raises:
        PlanError: if a value is out of its range, or two of them contradict each other.
    """

    pipefusion: int = option(1, "stages that the blocks are cut into, one rank each", metavar="N")
    patches: int | None = option(None, "patches that the image is cut into; as many as stages by default", metavar="M")
    warmup: int = option(1, "synchronous steps before stale keys and values are used", metavar="W")
    warmup_mode: Literal["serial"] = option("serial", "how the synchronous steps run", choices=WARMUP_MODES)
    stage_blocks: tuple[int, ...] | None = option(
        None, "blocks of each stage, such as 7,7,8; balanced by their cost by default", metavar="A,B,.."
    )

    def __post_init__(self) -> None:
        for name, least in (("pipefusion", 1), ("patches", 1), ("warmup", 0)):
            value = getattr(self, name)
            if name == "patches" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PlanError(f"{name}={value!r} is not a whole number of at least {least}; try {name}={least}")
        if self.warmup_mode not in WARMUP_MODES:
            raise PlanError(f"warmup_mode={self.warmup_mode!r} is not known; try one of {', '.join(WARMUP_MODES)}")
        if self.stage_blocks is not None:
            self._check_stage_blocks(tuple(self.stage_blocks))

    def _check_stage_blocks(self, blocks: tuple[int, ...]) -> None:
        object.__setattr__(self, "stage_blocks", blocks)
        text = ",".join(map(str, blocks))
        if len(blocks) != self.pipefusion:
            raise PlanError(
                f"stage_blocks={text} names {len(blocks)} stages and pipefusion={self.pipefusion}; "
                f"give {self.pipefusion} numbers"
            )
        if min(blocks) < 1:
            raise PlanError(f"stage_blocks={text}: every stage needs a block; give numbers of at least 1")

    @property
    def world(self) -> int:
        """The number of ranks: the product of the degrees."""
        return self.pipefusion

    @property
    def num_patches(self) -> int:
        """M: `patches`, or as many as stages."""
        return self.pipefusion if self.patches is None else self.patches

    def check_world(self, world: int) -> None:
        """Raises `PlanError` unless the plan uses all of `world` ranks."""
        if world != self.world:
            raise PlanError(
                f"the plan '{self}' needs {self.world} rank(s) and {world} are running; "
                f"start {self.world}, or use pipefusion={world}"
            )

    def check_blocks(self, model: str, blocks: int) -> None:
        """Raises `PlanError` unless a model of `blocks` blocks can be cut as the plan says."""
        if self.pipefusion > blocks:
            raise PlanError(f"pipefusion={self.pipefusion} exceeds the {blocks} blocks of {model}; try 1 to {blocks}")
        if self.stage_blocks is not None and sum(self.stage_blocks) != blocks:
            text = ",".join(map(str, self.stage_blocks))
            raise PlanError(
                f"stage_blocks={text} has {sum(self.stage_blocks)} blocks and {model} has {blocks}; "
                f"give {self.pipefusion} numbers that add up to {blocks}"
            )

    def check_rows(self, rows: int) -> None:
        """Raises `PlanError` unless an image of `rows` token rows can be cut into the plan's patches."""
        if self.num_patches > rows:
            raise PlanError(
                f"patches={self.num_patches} exceeds the {rows} token rows of this image; "
                f"try 1 to {rows}, or a higher image"
            )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON types; `Plan(**d)` is its inverse."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        shown = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return " ".join(f"{f.name}={_text(getattr(self, f.name))}" for f in shown) or "pipefusion=1"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The inverse of `str`: `Plan.parse("pipefusion=2 patches=4")`.

        Raises:
            PlanError: if a word is not `name=value`, a name is unknown or twice there, or a value has the wrong type.
        """
        known = {field.name: read for field, read in readers(cls)}
        values: dict[str, Any] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            name = name.replace("-", "_")
            if not equals or name not in known or name in values:
                raise PlanError(f"{word!r} is no part of a plan; write name=value with {', '.join(known)}, each once")
            try:
                values[name] = known[name](value)
            except ValueError:
                raise PlanError(f"{word!r}: {value!r} is no value of {flag(name)}") from None
        return cls(**values)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
