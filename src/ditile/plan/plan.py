"""Plan: the division of the work on one image over the ranks.

A plan is a value: it knows no process, device or model. Contradictions are refused when a plan is made; whether it fits
a model is checked before it runs. `Plan.parse` is the inverse of `str(plan)`, which is one line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from ditile.plan.errors import PlanError
from ditile.plan.layout import Split, balance_patch_rows
from ditile.plan.option_classes import (
    Count,
    Counts,
    Indices,
    JsonObject,
    Speeds,
    checked,
    define_option,
    options,
    parse_option,
)

NumSteps = Annotated[int, Field(ge=0, le=2**31)]
AXES = ("data", "cfg", "pipefusion", "ring", "gather", "distrifusion", "ulysses", "tensor")
IMAGE = AXES[1:]
"""The axes of the ranks that make one image together."""
OUTER = ("ring", "gather", "distrifusion")
"""The axes that split the tokens outside of ulysses, of which a plan has one at most."""
SEQUENCE = (*OUTER, "ulysses")
"""The axes that split the tokens."""
AUTO: Literal["auto"] = "auto"
WireDtype = Literal["fp8", "int8", "residual4", "residual3"]
FEW_STEPS = 16
"""Up to this number of steps the command line uses warmup_mode=auto by default: every synchronous step counts then."""
SHARED_WARMUP = 2
"""The least number of synchronous steps of warmup_mode=auto if all stages share them: the second one costs no more than
its messages, and gains 2.7 dB at four steps (docs/pipefusion.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The known facts of a model and a call. A field that is None is unknown, and a plan is not checked against it.

    Attributes:
        model: its name in messages.
        blocks: how many blocks can be divided into stages.
        heads: attention heads.
        rows: token rows of the image.
        tokens_per_row: image tokens in each row.
        text: text tokens in joint attention.
        branches: branches of guidance: the rows of the batch per image, times the transformer calls per step.
        call_rows: branches in each call of a step, where calls differ.
    """

    model: str = "this model"
    blocks: int | None = None
    heads: int | None = None
    rows: int | None = None
    tokens_per_row: int | None = None
    text: int = 0
    branches: int | None = None
    call_rows: tuple[int, ...] = ()


@options(error=PlanError)
class Plan:
    """Degrees, patches and warmup of one generation. The product of the degrees is the number of ranks.

    Raises:
        PlanError: if a field is unknown, a value is out of its range, or two values contradict each other.
    """

    data: Count = define_option(1, "replicas that split prompts and images", aliases=("--data-parallel-degree",))
    cfg: Count = define_option(
        1, "groups of ranks that share the branches of guidance", switches={"--use-cfg-parallel": 2}
    )
    pipefusion: Count = define_option(
        1, "stages that the blocks are cut into, one rank each", aliases=("--pipefusion-parallel-degree",)
    )
    ring: Count = define_option(
        1, "ranks that share the tokens, keys and values passed round", aliases=("--ring-degree",)
    )
    gather: Count = define_option(1, "ranks that share the tokens, keys and values gathered once")
    distrifusion: Count = define_option(1, "ranks that own a patch each, the others' keys one step stale")
    ulysses: Count = define_option(
        1, "ranks that share the tokens, and the heads in attention", aliases=("--ulysses-degree",)
    )
    tensor: Count = define_option(
        1, "ranks that share the weights of every block", aliases=("--tensor-parallel-degree",)
    )
    patches: Count | None = define_option(
        None,
        "patches that the image is cut into; as many as stages by default",
        metavar="M",
        aliases=("--num-pipeline-patch",),
    )
    warmup: NumSteps = define_option(1, "synchronous steps before stale keys are used", aliases=("--warmup-steps",))
    warmup_mode: Literal["serial", "pipelined", "sequence", "auto"] = define_option(
        "serial",
        f"how the synchronous steps run; auto: sequence, with {SHARED_WARMUP} steps or more, if possible, or serial",
    )
    references: NumSteps | None = define_option(
        None,
        "an approximation: compute the tokens of reference images in each K-th step and in synchronous steps, "
        "0: in synchronous ones alone; in each step, like other tokens, by default",
        metavar="K",
    )
    stage_blocks: Counts | None = define_option(
        None,
        "blocks of each stage, such as 7,7,8; balanced by their cost by default",
        metavar="A,B,..",
        aliases=("--attn-layer-num-for-pp",),
        example="7,7,8",
    )
    stage_weights: Speeds | None = define_option(
        None, "speed of each stage's device, such as 1,1,0.5; equal by default", metavar="A,B,..", example="1,0.5"
    )
    token_weights: Speeds | None = define_option(
        None,
        "speed of each rank that splits the tokens, such as 2,1; equal by default",
        metavar="A,B,..",
        example="2,1",
    )
    tensor_weights: Speeds | None = define_option(
        None,
        "speed of each rank of tensor, such as 2,1; equal by default",
        metavar="A,B,..",
        example="2,1",
    )
    rank_weights: Speeds | None = define_option(
        None,
        "vae=rows or text=split: speed of each rank of an image, such as 2,1, by which decode and text encoders are "
        "divided; by the other weights by default",
        metavar="A,B,..",
        example="2,1",
    )
    uaa: bool | None = define_option(
        None, "force or forbid lengths and heads that ulysses does not divide", switches={"--ulysses-anything": True}
    )
    async_ulysses: bool = define_option(False, "exchange each projection while the next one is computed")
    split_scheme: Literal["row", "sequence"] = define_option(
        "row", "tensor: all-reduce, or reduce-scatter and all-gather"
    )
    wire_dtype: WireDtype | None = define_option(
        None,
        "an approximation: send activations, queries, keys and values in eight bits a number, scaled per token, or "
        "their differences from the step before in four or three",
    )
    text: Literal["each", "first", "split"] = define_option(
        "each", "text encoders on each rank, on the first one, or their layers split"
    )
    vae: Literal["whole", "rows"] = define_option(
        "whole", "decode whole, or rows on every rank", switches={"--use-parallel-vae": "rows"}
    )
    vae_block_size: Count | None = define_option(
        None, "vae=rows: rows that a convolution makes at a time, for less memory; all by default"
    )
    offload: Literal["none", "blocks"] = define_option(
        "none", "blocks: weights stay in the host's memory, two blocks at a time on the device"
    )
    offload_ranks: Indices | None = define_option(
        None, "the ranks whose blocks are offloaded, such as 1,3; all by default", metavar="A,B,..", example="1"
    )

    def __post_init__(self) -> None:
        for contradiction in self._iterate_contradictions():
            raise PlanError(contradiction)

    def _iterate_contradictions(self) -> Iterator[str]:
        """Yield a line for each contradiction between fields, with what would work."""
        yield from self._iterate_patch_contradictions()
        if self.async_ulysses and self.ulysses == 1:
            yield "async_ulysses needs an exchange to hide; use it with ulysses=2 or more"
        if self.wire_dtype is not None and not self.sends_activations:
            yield (
                f"wire_dtype={self.wire_dtype} packs what stages and ranks that split the tokens send, and this plan "
                "has none; use it with pipefusion, ulysses, ring, gather or distrifusion, or leave it out"
            )
        mode = f"warmup_mode={self.warmup_mode}"
        if self.warmup_mode not in ("serial", AUTO) and self.pipefusion == 1:
            yield f"{mode} fills stages that wait, and pipefusion=1 has one; leave it at serial"
        if self.warmup_mode == "sequence":
            for name in ("ring", "gather", "ulysses", "tensor"):
                degree = getattr(self, name)
                if degree > 1:
                    yield (
                        f"{mode} splits the tokens over the stages, and {name}={degree} splits tokens or weights "
                        "already; use pipelined or serial"
                    )
        if self.vae_block_size is not None and self.vae != "rows":
            yield f"vae_block_size={self.vae_block_size} belongs to vae=rows; add it, or leave the size out"
        yield from self._iterate_share_contradictions()
        ranks = self.offload_ranks
        if ranks is None:
            return
        named = f"offload_ranks={_format_plan_value(ranks)}"
        if self.offload == "none":
            yield f"{named} belongs to offload=blocks; add it, or leave the ranks out"
        if not ranks or len(set(ranks)) < len(ranks) or max(ranks) >= self.world:
            yield f"{named} does not name ranks of this plan, each once; there are 0 to {self.world - 1}"

    def _iterate_share_contradictions(self) -> Iterator[str]:
        """Yield the contradictions that concern the shares of stages and of ranks."""
        counts = {
            "stage_blocks": self.pipefusion,
            "stage_weights": self.pipefusion,
            "token_weights": self.token_ranks * self.distrifusion,
            "tensor_weights": self.tensor,
            "rank_weights": self.world // self.data,
        }
        for name, count in counts.items():
            values = getattr(self, name)
            if values is None:
                continue
            option = f"{name}={_format_plan_value(values)}"
            if len(values) != count:
                yield f"{option} has {len(values)} numbers, and '{self}' has shares for {count}; give {count} numbers"
            if name in ("token_weights", "tensor_weights") and self.uaa is False:
                yield f"{option} makes shares of unlike size, and uaa is off; leave one of them out"
        if self.stage_blocks is not None and self.stage_weights is not None:
            yield (
                f"stage_blocks={_format_plan_value(self.stage_blocks)} says where to cut, and stage_weights="
                f"{_format_plan_value(self.stage_weights)} too; give one of them, and rank_weights for decode and text"
            )
        if self.rank_weights is not None and not self.divides_ends:
            yield (
                f"rank_weights={_format_plan_value(self.rank_weights)} divides decode and text encoders, and this plan "
                "has them whole; add vae=rows or text=split, or leave the weights out"
            )

    def _iterate_patch_contradictions(self) -> Iterator[str]:
        """Yield the contradictions that concern the patches of PipeFusion and DistriFusion."""
        degree = self.distrifusion
        if degree > 1 and self.pipefusion > 1:
            yield (
                f"distrifusion={degree} and pipefusion={self.pipefusion} spend the same staleness; set one of them to "
                "1, and use ulysses or tensor for the other ranks"
            )
        outer = [f"{name}={getattr(self, name)}" for name in OUTER if getattr(self, name) > 1]
        if len(outer) > 1:
            yield f"{' and '.join(outer)} split the same tokens; use one of them, and ulysses with it"
        if degree > 1 and self.patches is not None:
            yield f"patches={self.patches}: distrifusion has one patch per rank; leave patches out"
        if self.references is not None and self.patches == 1:
            yield (
                f"references={self.references}: tokens of reference images are patches of their own, and patches=1 "
                "leaves none for them; use patches=2 or more, or leave patches out"
            )
        if self.references == 0 and self.warmup == 0:
            yield "references=0 computes them in synchronous steps alone, and warmup=0 has none; use warmup=1 or more"

    @property
    def world(self) -> int:
        """Return the number of ranks: the product of the degrees."""
        return math.prod(getattr(self, degree) for degree in AXES)

    @property
    def divides_the_batch_alone(self) -> bool:
        """Return whether each rank runs whole models on whole images. Models of any kind can do so."""
        return self.world == self.data * self.cfg and self.num_patches == 1 and self.offload == "none"

    @property
    def divides_blocks(self) -> bool:
        """Return whether a rank holds only a part of the transformer's weights."""
        return self.pipefusion * self.tensor > 1

    @property
    def divides_weights(self) -> bool:
        """Return whether a rank holds less than the whole pipeline."""
        return self.divides_blocks or self.text != "each"

    @property
    def num_patches(self) -> int:
        """Return M: `patches`, or the number of stages. It is one more if tokens of references are skipped in some
        steps."""
        if self.patches is not None:
            return self.patches
        if self.references is not None and self.distrifusion == 1:
            return self.pipefusion + 1
        return self.pipefusion

    @property
    def cuts_latents(self) -> bool:
        """Return whether the scheduler steps the latents patch by patch, or on one stage only."""
        return self.num_patches * self.pipefusion > 1

    @property
    def attends_to_stale_keys(self) -> bool:
        """Return whether patches attend to keys of the previous step after the warmup. A single patch has only fresh
        keys."""
        return self.num_patches * self.distrifusion > 1

    @property
    def keeps_calls(self) -> bool:
        """Return whether cfg must leave each call whole on a rank: stages and stale keys need all its branches."""
        return self.pipefusion > 1 or self.attends_to_stale_keys

    def has_stale_steps(self, steps: int | None) -> bool:
        """Return whether keys are, or may be, stale in some steps of a call.

        Args:
            steps: the number of steps; None if it is not known.
        """
        if steps is not None and self.warmup >= steps:
            return False
        return self.attends_to_stale_keys

    def resolve_warmup(self, *, streams: bool = True) -> Plan:
        """Return the plan with another mode instead of `warmup_mode=auto`. Any other plan is returned unchanged.

        Args:
            streams: whether the model allows the weights of its blocks to be sent from stage to stage.
        """
        if self.warmup_mode != AUTO:
            return self
        # Without warmup no step is synchronous, and ranks that split tokens or weights cannot form a warmup group.
        if not streams or self.pipefusion == 1 or self.warmup == 0 or self.token_ranks * self.tensor > 1:
            return dataclasses.replace(self, warmup_mode="serial")
        return dataclasses.replace(self, warmup_mode="sequence", warmup=max(self.warmup, SHARED_WARMUP))

    @property
    def can_be_recorded(self) -> bool:
        """Return whether calls of the model can be recorded. Such calls read weights in one place, and no code decides
        within them."""
        # With split_scheme=sequence there are hooks on parts of the model.
        return self.split_scheme != "sequence" and self.explain_no_recording() is None

    def explain_no_recording(self) -> str | None:
        """Explain why `cuda_graphs=True` is refused; None if it is not."""
        if self.offload == "blocks":
            return "cuda_graphs=True: weights of offload=blocks come and go, and graphs read them in one place"
        if self.sends_differences:
            return f"cuda_graphs=True repeats messages of one size, and wire_dtype={self.wire_dtype} has two; use int8"
        return None

    @property
    def sends_activations(self) -> bool:
        """Return whether stages or ranks that split the tokens send messages that `wire_dtype` packs."""
        return self.pipefusion * self.token_ranks * self.distrifusion > 1

    @property
    def sends_differences(self) -> bool:
        """Return whether messages travel as differences from those of the step before."""
        return self.wire_dtype in ("residual4", "residual3")

    def offloads_rank(self, rank: int) -> bool:
        """Return whether the weights of a rank's blocks stay in the host's memory."""
        return self.offload == "blocks" and (self.offload_ranks is None or rank in self.offload_ranks)

    @property
    def has_unlike_ranks(self) -> bool:
        """Return whether ranks of one stage may compute, or keep on their devices, different things."""
        unlike = (self.token_weights, self.tensor_weights, self.rank_weights, self.offload_ranks)
        return any(shares is not None for shares in unlike)

    @property
    def token_ranks(self) -> int:
        """Return the number of ranks that split the tokens of a patch exactly: ring or gather, times ulysses."""
        return self.ring * self.gather * self.ulysses

    def find_token_place(self, coordinates: Mapping[str, int]) -> int:
        """Return a rank's place among the ranks that split tokens, by its coordinates."""
        return find_outer_place(coordinates) * self.ulysses + coordinates["ulysses"]

    @property
    def head_weights(self) -> tuple[float, ...] | None:
        """Return the speed of each rank along ulysses, which splits the heads. None without `token_weights`."""
        if self.token_weights is None:
            return None
        # All ranks with one place along ulysses have the same heads.
        return tuple(sum(self.token_weights[place :: self.ulysses]) for place in range(self.ulysses))

    @property
    def divides_ends(self) -> bool:
        """Return whether ranks have shares of the decode or of the text encoders."""
        return self.vae == "rows" or self.text == "split"

    def list_rank_weights(self) -> tuple[float, ...]:
        """Return the weight of each rank of an image, by which rows or tiles of the decode, and text encoders, are
        divided."""
        if self.rank_weights is not None:
            return self.rank_weights
        weights = []
        for rank in range(self.world // self.data):
            coordinates = compute_coordinates(self, rank)
            weight = 1.0
            if self.stage_weights is not None:
                weight *= self.stage_weights[coordinates["pipefusion"]]
            if self.token_weights is not None:
                weight *= self.token_weights[self.find_token_place(coordinates)]
            if self.tensor_weights is not None:
                weight *= self.tensor_weights[coordinates["tensor"]]
            weights.append(weight)
        return tuple(weights)

    def list_tensor_weights(self) -> tuple[float, ...]:
        """Return the share of each rank of tensor, in any unit."""
        return self.tensor_weights or (1.0,) * self.tensor

    @property
    def has_unlike_tensor_shares(self) -> bool:
        """Return whether shares of tensor differ."""
        return len(set(self.list_tensor_weights())) > 1

    def check_world(self, world: int) -> None:
        """Check that the plan uses all of `world` ranks.

        Raises:
            PlanError: if it uses another number.
        """
        if world != self.world:
            start = f"start {self.world}"
            if world == 1:
                start += f" with torchrun --nproc_per_node={self.world} or ditile.launch"
            raise PlanError(
                f"the plan '{self}' needs {self.world} rank(s) and {world} are running; {start}, or use degrees whose "
                f"product is {world}, such as pipefusion={world}"
            )

    def illegal(self, facts: Facts) -> list[str]:
        """List why the plan does not fit a model and a call: a line for each reason, with what would work. Empty if it
        fits.

        Each stage needs a block, each patch a row of tokens, each rank a token, each rank of the tensor axis whole
        heads, and each group of cfg a branch of guidance. A replica may have no images of its own.
        """
        lines: list[str] = []
        for check in (_check_blocks, _check_heads, _check_token_rows, _check_patch_tokens, _check_branches):
            lines += check(self, facts)
        return lines

    def check(self, facts: Facts) -> None:
        """Check the plan against a model and a call.

        Raises:
            PlanError: with all reasons of `illegal`, if there are any.
        """
        violations = self.illegal(facts)
        if violations:
            raise PlanError("; and ".join(violations))

    def to_dict(self) -> JsonObject:
        """Return the plan as JSON types; `Plan(**d)` is the inverse."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        # Defaults are left out, so that a plan reads as it is usually written.
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_format_plan_value(value)}")
        return " ".join(words) or "pipefusion=1"

    @classmethod
    @checked(PlanError)
    def parse(cls, text: str) -> Plan:
        """Parse the result of `str`: `Plan.parse("pipefusion=2 patches=4")`.

        Raises:
            PlanError: if a word is not `name=value`, a name is unknown or repeated, or a value has the wrong type.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        values = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            name = name.replace("-", "_")
            if "=" in value and "," in value:
                raise PlanError(
                    f"{word!r}: the words of a plan have blanks between them, as in 'pipefusion=2 patches=4'"
                )
            if not equals or name not in names or name in values:
                raise PlanError(
                    f"{word!r} is not a part of a plan; write name=value with {', '.join(names)}, each once"
                )
            try:
                values[name] = parse_option(cls, name, value)
            except ValueError as error:
                raise PlanError(f"{word!r}: {error}") from None
        return cls(**values)


def suggest_whole_images(*, stale_keys: bool = False) -> str:
    """Suggest a plan without patches, where these cannot work. With `stale_keys` it is without DistriFusion too."""
    axes = "pipefusion, patches and distrifusion" if stale_keys else "pipefusion and patches"
    return f"a plan without {axes}, such as ulysses"


def compute_coordinates(plan: Plan, rank: int) -> dict[str, int]:
    """Return the coordinate of a rank on each axis of `AXES`."""
    coordinates = {}
    # Neighbouring ranks differ in the last axis first.
    for name in reversed(AXES):
        rank, coordinates[name] = divmod(rank, getattr(plan, name))
    return coordinates


def find_outer_place(coordinates: Mapping[str, int]) -> int:
    """Return a rank's place along ring, gather or distrifusion, by its coordinates."""
    # A plan has only one of these axes; on the others the coordinate is 0.
    return max(coordinates[name] for name in OUTER)


def list_subgroups(plan: Plan, names: Sequence[str]) -> list[tuple[int, ...]]:
    """List the groups of ranks that differ only on the axes `names`, in the order of their first ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.world):
        coordinates = compute_coordinates(plan, rank)
        # Ranks of a group are equal on all other axes.
        key = tuple(coordinates[name] for name in AXES if name not in names)
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _format_plan_value(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _check_branches(plan: Plan, facts: Facts) -> Iterator[str]:
    if facts.branches is None:
        return
    divides = f"cfg={plan.cfg} divides branches of guidance, and this call has {facts.branches}"
    if facts.branches == 1 < plan.cfg:
        yield (
            f"{divides}; raise guidance_scale or --guidance above 1 (of FLUX and Qwen-Image true_cfg_scale or "
            "--true-cfg, with a negative_prompt, --negative-prompt), or use cfg=1"
        )
        return
    if facts.call_rows and plan.pipefusion > 1:
        yield (
            f"pipefusion={plan.pipefusion}: the calls of a step have {', '.join(map(str, facts.call_rows))} branches "
            f"of guidance, and stages send as many in each; use {suggest_whole_images()}"
        )
        return
    max_cfg = facts.branches
    if facts.call_rows and plan.keeps_calls:
        max_cfg = facts.call_rows[0]
        divides += ", and stale keys keep its calls whole"
    if plan.cfg > max_cfg:
        yield f"{divides}; use cfg={max_cfg}"


def _check_blocks(plan: Plan, facts: Facts) -> Iterator[str]:
    blocks = facts.blocks
    stages = plan.pipefusion
    if blocks is None:
        return
    if stages > blocks:
        yield f"pipefusion={stages} exceeds the {blocks} blocks of {facts.model}; try 1 to {blocks}"
    elif plan.stage_blocks is not None and sum(plan.stage_blocks) != blocks:
        yield (
            f"stage_blocks={_format_plan_value(plan.stage_blocks)} has {sum(plan.stage_blocks)} blocks and "
            f"{facts.model} has {blocks}; give {stages} numbers that add up to {blocks}"
        )


def _check_heads(plan: Plan, facts: Facts) -> Iterator[str]:
    heads = facts.heads
    model = facts.model
    if heads is None:
        return
    # Tensor parallelism splits the heads first, and Ulysses then splits the heads of one rank.
    if plan.has_unlike_tensor_shares:
        # The model's features decide how finely they can be cut.
        if heads < plan.tensor:
            yield f"tensor={plan.tensor} exceeds the {heads} heads of {model}; try 1 to {heads}"
        return
    if heads % plan.tensor:
        yield f"tensor={plan.tensor} does not divide the {heads} heads of {model}; try {format_divisors(heads)}"
        return
    heads_per_rank = heads // plan.tensor
    if plan.uaa is False and heads_per_rank % plan.ulysses:
        part = f" of each of tensor={plan.tensor}" if plan.tensor > 1 else ""
        yield (
            f"ulysses={plan.ulysses} does not divide the {heads_per_rank} heads{part} of {model} and uaa is off; try "
            f"{format_divisors(heads_per_rank)}, or leave uaa out"
        )


def _check_token_rows(plan: Plan, facts: Facts) -> Iterator[str]:
    rows = facts.rows
    # With resolution binning, or for an unknown family, the number of rows is unknown.
    if rows is None:
        return
    of_image = f"the {rows} token rows of this image"
    hint = f"1 to {rows}, or a taller image"
    if plan.distrifusion > rows:
        yield f"distrifusion={plan.distrifusion} exceeds {of_image}, a patch for each rank; try {hint}"
    if plan.patches is not None and plan.patches > rows:
        yield f"patches={plan.patches} exceeds {of_image}; try {hint}"
    # `_check_blocks` refuses more stages than blocks already.
    elif plan.num_patches > rows and (facts.blocks is None or plan.pipefusion <= facts.blocks):
        yield f"pipefusion={plan.pipefusion} makes as many patches, more than {of_image}; try patches={hint}"


def _check_patch_tokens(plan: Plan, facts: Facts) -> Iterator[str]:
    """Yield a line if some rank would have no token of a patch."""
    rows = facts.rows
    width = facts.tokens_per_row
    patches = max(plan.num_patches, plan.distrifusion)
    if rows is None or width is None or patches > rows:
        return
    if plan.distrifusion > 1:
        split = Split(1, plan.distrifusion, plan.ulysses, weights=plan.token_weights)
        rows_of_patches = split.count_patch_rows(rows)
    else:
        rows_of_patches = balance_patch_rows(rows, patches, facts.text / width)
    # The smallest patch has the fewest tokens to split.
    fewest = width * min(rows_of_patches)
    if plan.token_ranks > fewest:
        yield (
            f"{plan.token_ranks} ranks split a patch of {fewest} tokens, less than one each; "
            f"try 1 to {fewest}, fewer patches than {patches}, or a larger image"
        )


def format_divisors(number: int) -> str:
    """Format the degrees that divide a number."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
