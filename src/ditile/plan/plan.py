"""Plan: how one picture is divided over the ranks. Checked when it is made, and against a model before it runs.

A plan is a value: it knows no process, device or model. `Plan.parse` is the inverse of `str(plan)`, which is one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from ditile.plan.checks import (
    check_choice,
    check_counts,
    check_positive_number,
    check_whole_number,
    is_number,
    is_whole_number,
    suggest_nearest,
)
from ditile.plan.errors import PlanError
from ditile.plan.flags import build_docstring, build_signature, define_option, iter_field_readers
from ditile.plan.layout import balance_patch_rows

AXES = ("data", "cfg", "pipefusion", "ring", "distrifusion", "ulysses", "tensor")
IMAGE = AXES[1:]
"""The axes of the ranks that make one image together."""
SEQUENCE = ("ring", "distrifusion", "ulysses")
"""The axes that share out the tokens."""
WARMUP_MODES = ("serial", "pipelined", "sequence", "separate", "auto")
SPLIT_SCHEMES = ("row", "sequence")
TEXT_PLACES = ("each", "first", "split")
TEXT_AFTER = ("keep", "offload", "free")
VAE_PLACES = ("whole", "rows")
OFFLOADS = ("none", "blocks")
WIRE_DTYPES = ("fp8", "int8")
AUTO: Literal["auto"] = "auto"
FEW_STEPS = 16
"""Steps up to which the command line takes warmup_mode=auto where none is given: each counts then."""
SHARED_WARMUP = 2
"""The least number of synchronous steps of warmup_mode=auto where all stages share them: the second one costs messages
alone, and is worth 2.7 dB at four steps (docs/pipefusion.md)."""

WORTHWHILE_SHARE = 0.7
"""A pipeline that can reach less than this share of its stages' speed is worth a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a model and a call. A plan is not checked against a field that is None.

    Attributes:
        model: what to call it.
        blocks: blocks that stages are cut from.
        heads: attention heads.
        rows: token rows of the image.
        tokens_per_row: image tokens in each.
        text: text tokens in joint attention.
        branches: branches of guidance: rows of the batch for each image, times transformer calls per step.
    """

    model: str = "this model"
    blocks: int | None = None
    heads: int | None = None
    rows: int | None = None
    tokens_per_row: int | None = None
    text: int = 0
    branches: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Degrees, patches and warmup of one generation. World = the product of the degrees.

    Raises:
        PlanError: if a field is not known, a value is out of its range, or two of them contradict each other.
    """

    data: int = define_option(1, "replicas that share out prompts and images", metavar="N")
    cfg: int = define_option(1, "1, or 2: each half computes one branch of guidance", metavar="N")
    pipefusion: int = define_option(1, "stages that the blocks are cut into, one rank each", metavar="N")
    ring: int = define_option(1, "ranks that share the tokens, keys and values passed round", metavar="N")
    distrifusion: int = define_option(1, "ranks that own a patch each, the others' keys one step stale", metavar="N")
    ulysses: int = define_option(1, "ranks that share the tokens, and the heads in attention", metavar="N")
    tensor: int = define_option(1, "ranks that share the weights of every block", metavar="N")
    patches: int | None = define_option(
        None, "patches that the image is cut into; as many as stages by default", metavar="M"
    )
    warmup: int | Literal["auto"] = define_option(
        1, "synchronous steps before stale keys are used, or auto", metavar="W"
    )
    warmup_mode: Literal["serial", "pipelined", "sequence", "separate", "auto"] = define_option(
        "serial",
        f"how the synchronous steps run; auto: sequence, with {SHARED_WARMUP} steps or more, where it can, else serial",
        choices=WARMUP_MODES,
    )
    warmup_bound: float = define_option(
        0.6, "warmup=auto ends where latents and keys change less in a step", metavar="X"
    )
    warmup_ranks: int | None = define_option(
        None, "ranks of each pipeline that hold all blocks for warmup_mode=separate; 1 by default", metavar="N"
    )
    references: int | None = define_option(
        None,
        "an approximation: compute the tokens of reference pictures in each K-th step and in synchronous steps, "
        "0: in synchronous ones alone; in each step, like other tokens, by default",
        metavar="K",
    )
    stage_blocks: tuple[int, ...] | None = define_option(
        None,
        "blocks of each stage, such as 7,7,8; balanced by their cost by default",
        metavar="A,B,..",
        example="7,7,8",
    )
    stage_weights: tuple[float, ...] | None = define_option(
        None, "speed of each stage's device, such as 1,1,0.5; equal by default", metavar="A,B,..", example="1,0.5"
    )
    uaa: bool | None = define_option(None, "force or forbid lengths and heads that ulysses does not divide")
    async_ulysses: bool = define_option(False, "exchange each projection while the next one is computed")
    split_scheme: Literal["row", "sequence"] = define_option(
        "row", "tensor: all-reduce, or reduce-scatter and all-gather", choices=SPLIT_SCHEMES
    )
    wire_dtype: Literal["fp8", "int8"] | None = define_option(
        None,
        "an approximation: send activations, queries, keys and values in eight bits a number, scaled per token",
        choices=WIRE_DTYPES,
    )
    text: Literal["each", "first", "split"] = define_option(
        "each", "text encoders on each rank, on the first one, or their layers shared out", choices=TEXT_PLACES
    )
    vae: Literal["whole", "rows"] = define_option("whole", "decode whole, or rows on every rank", choices=VAE_PLACES)
    vae_block_size: int | None = define_option(
        None, "vae=rows: rows that a convolution makes at a time, for less memory; all by default", metavar="N"
    )
    offload: Literal["none", "blocks"] = define_option(
        "none", "blocks: weights stay in the host's memory, two blocks at a time on the device", choices=OFFLOADS
    )

    __doc__, __signature__ = build_docstring(__doc__, vars()), build_signature(vars())

    def __new__(cls, **values: Any) -> Any:
        """Raises `PlanError`, with the nearest field, for a name that is no field."""
        known = cls.__dataclass_fields__
        for name in values:
            if name not in known:
                hint = suggest_nearest(name, known, f"known are {', '.join(known)}")
                raise PlanError(f"Plan({name}=..) is not known; {hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_counts(self, "patches", "warmup_ranks", "vae_block_size", error=PlanError)
        for name in AXES:
            check_whole_number(getattr(self, name), name, error=PlanError)
        if self.warmup != AUTO:
            check_whole_number(self.warmup, "warmup", 0, error=PlanError, hint=f"warmup=0 or warmup={AUTO}")
        for name, known in (
            ("warmup_mode", WARMUP_MODES),
            ("split_scheme", SPLIT_SCHEMES),
            ("text", TEXT_PLACES),
            ("vae", VAE_PLACES),
            ("offload", OFFLOADS),
            ("uaa", (None, True, False)),
            ("async_ulysses", (True, False)),
            ("wire_dtype", (None, *WIRE_DTYPES)),
        ):
            check_choice(getattr(self, name), name, known, error=PlanError)
        check_whole_number(self.references, "references", 0, error=PlanError, hint="references=0", optional=True)
        check_positive_number(self.warmup_bound, "warmup_bound", "bound", example=0.6, error=PlanError)
        for name in ("stage_blocks", "stage_weights"):
            if getattr(self, name) is not None:
                self._check_stage_values(name, getattr(self, name))
        for contradiction in self._iterate_contradictions():
            raise PlanError(contradiction)

    def _iterate_contradictions(self) -> Iterator[str]:
        """A line for fields that exclude each other, with what would work."""
        degree, stages = self.distrifusion, self.pipefusion
        if self.cfg > 2:
            yield f"cfg={self.cfg}: guidance has two branches; try cfg=2, and data for more images at once"
        if degree > 1 and stages > 1:
            yield (
                f"distrifusion={degree} and pipefusion={stages} spend the same staleness; set one of them to 1, and "
                "use ulysses or tensor for the other ranks"
            )
        if degree > 1 and self.ring > 1:
            yield f"distrifusion={degree} takes the place of ring={self.ring}; use ulysses beside it"
        if degree > 1 and self.patches is not None:
            yield f"patches={self.patches}: distrifusion has one patch per rank; leave patches out"
        if self.references is not None and self.patches == 1:
            yield (
                f"references={self.references}: tokens of reference pictures are patches of their own, and patches=1 "
                "leaves none for them; use patches=2 or more, or leave patches out"
            )
        if self.references == 0 and self.warmup == 0:
            yield "references=0 computes them in synchronous steps alone, and warmup=0 has none; use warmup=1 or more"
        if self.async_ulysses and self.ulysses == 1:
            yield "async_ulysses needs an exchange to hide; use it with ulysses=2 or more"
        if self.wire_dtype is not None and stages * self.token_ranks * degree == 1:
            yield (
                f"wire_dtype={self.wire_dtype} packs what stages and ranks that share out tokens send, and this plan "
                "has none; use it with pipefusion, ulysses, ring or distrifusion, or leave it out"
            )
        mode = f"warmup_mode={self.warmup_mode}"
        if self.warmup_mode not in ("serial", AUTO) and stages == 1:
            yield f"{mode} fills stages that wait, and pipefusion=1 has one; leave it at serial"
        others = [f"{name}={getattr(self, name)}" for name in ("ring", "ulysses", "tensor") if getattr(self, name) > 1]
        if self.warmup_mode in ("sequence", "separate") and others:
            yield (
                f"{mode} shares out tokens over the stages, and {others[0]} shares out tokens or weights already; use "
                "pipelined or serial"
            )
        if self.warmup_ranks is not None and self.warmup_mode != "separate":
            yield f"warmup_ranks={self.warmup_ranks} belongs to warmup_mode=separate; leave it out"
        if self.warmup_ranks is not None and self.warmup_ranks > stages:
            yield f"warmup_ranks={self.warmup_ranks} exceeds pipefusion={stages}; try 1 to {stages}"
        if self.vae_block_size is not None and self.vae != "rows":
            yield f"vae_block_size={self.vae_block_size} belongs to vae=rows; add it, or leave the size out"
        if self.stage_blocks is not None and self.stage_weights is not None:
            yield (
                f"stage_blocks={_format_plan_value(self.stage_blocks)} says where to cut, and stage_weights="
                f"{_format_plan_value(self.stage_weights)} too; give one of them"
            )

    def _check_stage_values(self, name: str, values: Any) -> None:
        is_kind, wanted = (is_whole_number, "whole numbers") if name == "stage_blocks" else (is_number, "numbers")
        if not isinstance(values, list | tuple) or not all(map(is_kind, values)):
            raise PlanError(f"{name}={values!r} are no {wanted}; give one for each of {self.pipefusion} stage(s)")
        object.__setattr__(self, name, tuple(values))
        shown = f"{name}={_format_plan_value(tuple(values))}"
        if len(values) != self.pipefusion:
            raise PlanError(
                f"{shown} names {len(values)} stages and pipefusion={self.pipefusion}; give {self.pipefusion} numbers"
            )
        if name == "stage_blocks" and min(values) < 1:
            raise PlanError(f"{shown}: every stage needs a block; give numbers of at least 1")
        if not all(0 < value < math.inf for value in values):
            raise PlanError(f"{shown}: a stage needs some speed; give numbers above 0")

    @property
    def world(self) -> int:
        """The number of ranks: the product of the degrees."""
        return math.prod(getattr(self, degree) for degree in AXES)

    @property
    def divides_the_batch_alone(self) -> bool:
        """Whether each rank runs whole models on whole images, which models of any kind can do."""
        return self.world == self.data * self.cfg and self.num_patches == 1 and self.offload == "none"

    @property
    def divides_weights(self) -> bool:
        """Whether a rank holds less than the whole pipeline."""
        return self.pipefusion * self.tensor > 1 or self.text != "each"

    @property
    def num_patches(self) -> int:
        """M: `patches`, or as many as stages, and one more for tokens of references that are not always computed."""
        if self.patches is not None:
            return self.patches
        return self.pipefusion + (self.references is not None and self.distrifusion == 1)

    @property
    def attends_to_stale_keys(self) -> bool:
        """Whether patches attend to keys of the step before, once the warmup is over; one patch has all keys fresh."""
        return self.num_patches * self.distrifusion > 1

    def predicts_whole(self, steps: int | None) -> bool:
        """Whether all of each prediction is of the step at hand, in a call of so many steps: no patch comes by itself.

        Args:
            steps: None where the call does not say.
        """
        return self.num_patches == 1 or not self.has_stale_steps(steps)

    def has_stale_steps(self, steps: int | None) -> bool:
        """Whether keys are stale in some steps of a call, or may be.

        Args:
            steps: None where the call does not say.
        """
        is_known = steps is not None and isinstance(self.warmup, int)
        return self.attends_to_stale_keys and not (is_known and self.warmup >= steps)  # type: ignore[operator]

    @property
    def least_warmup(self) -> int:
        """The number of synchronous steps; with warmup=auto the fewest that there can be."""
        # Keys change first in step 1, and the change in a step decides on the one after the next: on step 3.
        return self.warmup if isinstance(self.warmup, int) else 3

    def resolve_warmup(self, *, streams: bool = True) -> Plan:
        """The plan with a mode in place of `warmup_mode=auto`; any other plan is returned as it is.

        Args:
            streams: whether the weights of blocks can be sent from stage to stage, which the model says.
        """
        if self.warmup_mode != AUTO:
            return self
        if not streams or self.pipefusion == 1 or self.warmup == 0 or self.token_ranks * self.tensor > 1:
            return dataclasses.replace(self, warmup_mode="serial")
        warmup = self.warmup if self.warmup == AUTO else max(self.warmup, SHARED_WARMUP)
        return dataclasses.replace(self, warmup_mode="sequence", warmup=warmup)

    @property
    def num_whole_stages(self) -> int:
        """Stages that hold the weights of all blocks, for the synchronous steps of warmup_mode=separate."""
        return (self.warmup_ranks or 1) if self.warmup_mode == "separate" else 0

    @property
    def token_ranks(self) -> int:
        """Ranks that share out the tokens of a patch exactly: ring x ulysses."""
        return self.ring * self.ulysses

    @property
    def rounds_otherwise(self) -> bool:
        """Whether every step rounds differently from one process."""
        # Matrix products of shared-out tokens have other shapes, for which libraries choose other kernels.
        return self.token_ranks > 1

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`.

        Raises:
            PlanError: if the text is no JSON object of a plan's fields.
        """
        example = '{"pipefusion": 2}'
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{text[:80]!r} is no JSON ({error}); a plan is an object such as {example}") from error
        if not isinstance(values, dict):
            raise PlanError(f"{text[:80]!r} is no JSON object; a plan is one such as {example}")
        return cls(**values)

    def to_json(self) -> str:
        """The plan as a JSON object with all its fields."""
        return json.dumps(self.to_dict())

    def check_world(self, world: int) -> None:
        """Raises `PlanError` unless the plan uses all of `world` ranks."""
        if world != self.world:
            how = f" with torchrun --nproc_per_node={self.world} or ditile.launch" if world == 1 else ""
            raise PlanError(
                f"the plan '{self}' needs {self.world} rank(s) and {world} are running; "
                f"start {self.world}{how}, or use degrees whose product is {world}, such as pipefusion={world}"
            )

    def illegal(self, facts: Facts) -> list[str]:
        """Everything that a model and a call forbid, one line each with what would work; empty if the plan fits.

        Each stage needs a block, each patch a row of tokens, each rank a token, each rank of tensor whole heads, and
        each half of cfg a branch of guidance. A replica without images is allowed, and idle.
        """
        return [
            line
            for check in (_check_blocks, _check_heads, _check_token_rows, _check_patch_tokens, _check_guidance_branches)
            for line in check(self, facts)
        ]

    def check(self, facts: Facts) -> None:
        """Raises `PlanError` with all that is illegal, unless the plan fits what is known of a model and a call."""
        if violations := self.illegal(facts):
            raise PlanError("; and ".join(violations))

    def advice(self, bound: float) -> str | None:
        """A warning where warmup and the filling of the pipeline cost more than 30 % of the gain; else None.

        Args:
            bound: the speed-up over one rank that its stages can reach, from `Schedule.bound_speedup`.
        """
        stages = self.pipefusion
        if stages == 1 or bound >= WORTHWHILE_SHARE * stages:
            return None
        few = f"patches={stages} or more, " if self.num_patches < stages else ""
        less = "less warmup, " if self.least_warmup > 1 else ""
        mode = "another warmup_mode, " if self.warmup_mode == "serial" else ""
        return (
            f"pipefusion={stages} can be at most {bound:.1f}x as fast as one rank here: warmup and the filling of the "
            f"pipeline eat {1 - bound / stages:.0%}; try more steps, {few}{less}{mode}"
            f"or fewer stages and ulysses or tensor beside them"
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON types; `Plan(**d)` is its inverse."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        shown = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return " ".join(f"{f.name}={_format_plan_value(getattr(self, f.name))}" for f in shown) or "pipefusion=1"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The inverse of `str`: `Plan.parse("pipefusion=2 patches=4")`.

        Raises:
            PlanError: if a word is not `name=value`, a name is unknown or twice there, or a value has the wrong type.
        """
        known = {field.name: read for field, read in iter_field_readers(cls)}
        values: dict[str, Any] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            name = name.replace("-", "_")
            if value.count("=") and "," in value:
                apart = text.replace(",", " ") if text.count("=") == text.count(",") + 1 else "pipefusion=2 patches=4"
                raise PlanError(f"{word!r}: the words of a plan have blanks between them; write '{apart}'")
            if not equals or name not in known or name in values:
                raise PlanError(f"{word!r} is no part of a plan; write name=value with {', '.join(known)}, each once")
            try:
                values[name] = known[name](value)
            except argparse.ArgumentTypeError as error:
                raise PlanError(f"{word!r}: {error}") from None
        return cls(**values)


def require_plan(plan: Any) -> Plan:
    """The plan as it is. Raises `PlanError` if it is something else."""
    if isinstance(plan, Plan):
        return plan
    is_text = isinstance(plan, str) and plan.strip()
    instead = f"ditile.Plan.parse({plan!r})" if is_text else "one, such as ditile.Plan(pipefusion=2)"
    raise PlanError(f"plan={plan!r} is no Plan; give {instead}")


def compute_coordinates(plan: Plan, rank: int) -> dict[str, int]:
    """The coordinate of a rank on each axis of `AXES`."""
    place = {}
    for name in reversed(AXES):
        rank, place[name] = divmod(rank, getattr(plan, name))
    return place


def list_subgroups(plan: Plan, names: Sequence[str]) -> list[tuple[int, ...]]:
    """The groups of ranks that differ on some axes only, in the order of their first ranks."""
    sizes = [getattr(plan, name) for name in AXES]
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]

    def combine_offsets(chosen: Sequence[int]) -> list[int]:
        steps = [[index * strides[k] for index in range(sizes[k])] for k in chosen]
        return [sum(parts) for parts in product(*steps)]

    along = [k for k, name in enumerate(AXES) if name in names]
    across = [k for k, name in enumerate(AXES) if name not in names]
    return [tuple(start + rank for rank in combine_offsets(along)) for start in combine_offsets(across)]


def _format_plan_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_blocks(plan: Plan, facts: Facts) -> Iterator[str]:
    blocks, model, n = facts.blocks, facts.model, plan.pipefusion
    if blocks is not None and n > blocks:
        yield f"pipefusion={n} exceeds the {blocks} blocks of {model}; try 1 to {blocks}"
    elif blocks is not None and plan.stage_blocks is not None and sum(plan.stage_blocks) != blocks:
        yield (
            f"stage_blocks={_format_plan_value(plan.stage_blocks)} has {sum(plan.stage_blocks)} blocks and {model} has "
            f"{blocks}; give {n} numbers that add up to {blocks}"
        )


def _check_heads(plan: Plan, facts: Facts) -> Iterator[str]:
    heads, model = facts.heads, facts.model
    if heads is not None and heads % plan.tensor:
        yield f"tensor={plan.tensor} does not divide the {heads} heads of {model}; try {format_divisors(heads)}"
    elif heads is not None and plan.uaa is False and (own_heads := heads // plan.tensor) % plan.ulysses:
        of_each = f"{own_heads} heads" + (f" of each of tensor={plan.tensor}" if plan.tensor > 1 else "")
        yield (
            f"ulysses={plan.ulysses} does not divide the {of_each} of {model} and uaa is off; try "
            f"{format_divisors(own_heads)}, or leave uaa out"
        )


def _check_token_rows(plan: Plan, facts: Facts) -> Iterator[str]:
    rows = facts.rows
    if rows is None:
        return
    of_image, hint = f"the {rows} token rows of this image", f"1 to {rows}, or a taller image"
    if plan.distrifusion > rows:
        yield f"distrifusion={plan.distrifusion} exceeds {of_image}, a patch for each rank; try {hint}"
    if plan.patches is not None and plan.patches > rows:
        yield f"patches={plan.patches} exceeds {of_image}; try {hint}"
    elif plan.num_patches > rows and (facts.blocks is None or plan.pipefusion <= facts.blocks):
        yield f"pipefusion={plan.pipefusion} makes as many patches, more than {of_image}; try patches={hint}"


def _check_patch_tokens(plan: Plan, facts: Facts) -> Iterator[str]:
    """Every rank needs a token of every patch that it shares."""
    rows, each = facts.rows, facts.tokens_per_row
    patches = plan.distrifusion if plan.distrifusion > 1 else plan.num_patches
    if rows is None or each is None or patches > rows:
        return
    text = 0 if plan.distrifusion > 1 else facts.text / each
    least = each * min(balance_patch_rows(rows, patches, text))
    if plan.token_ranks > least:
        yield (
            f"ring={plan.ring} x ulysses={plan.ulysses} share out a patch of {least} tokens, less than one each; "
            f"try a product of 1 to {least}, fewer patches than {patches}, or a larger image"
        )


def _check_guidance_branches(plan: Plan, facts: Facts) -> Iterator[str]:
    if facts.branches is not None and plan.cfg > facts.branches:
        yield (
            f"cfg={plan.cfg} divides branches of guidance, and this call has {facts.branches}; raise guidance_scale or "
            "--guidance above 1 (of FLUX and Qwen-Image true_cfg_scale or --true-cfg, with a negative_prompt, "
            "--negative-prompt), or use cfg=1"
        )


def format_divisors(number: int) -> str:
    """The degrees that divide a number, as text."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
