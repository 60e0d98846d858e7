"""The model that a plan is for, built from its configs without weights, and the shapes of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import transformers
from torch import nn

from ditile.errors import LoadError, ModelError
from ditile.hooks.block_hooks import TransformerHooks
from ditile.hooks.placeholders import init_on_meta_device
from ditile.models.anatomies import build_block_hooks, find_derived_cuts
from ditile.models.registry import choose_model_spec
from ditile.parallel.pipefusion.block_costs import CostModel, divide_blocks
from ditile.parallel.tensor.cuts import TensorCuts
from ditile.parallel.tensor.tensor import find_tensor_table
from ditile.plan.cost import PlannedCall
from ditile.plan.plan import Plan
from ditile.plan.shape import Shape, Weights, check_image_size, fill_call_defaults
from ditile.plan.spec import ModelSpec
from ditile.planner.footprint import Footprint, count_decoder_numbers, make_frame_decode_counter
from ditile.planner.kernel_times import TransformerWork, count_transformer_work
from ditile.planner.tables import FamilyTable, VaeScale, check_family_plan, find_family_table, splits_only_tokens
from ditile.runner.load import check_config_counts, convert_build_errors, read_json_object

FACTS = "facts.json"
"""What cannot be read off the configs of a published model."""
TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3")


@dataclass(frozen=True)
class PlanSubject:
    """A pipeline whose transformer has no weights.

    Attributes:
        name: the name of the model.
        pipeline: the class of the pipeline.
        transformer: the transformer, on the meta device.
        vae_scale: pixels of a latent pixel's side.
        text, vae: parameters of the text encoders together, and of the VAE.
        decoder: the config of the VAE, if there is one.
        family: its `ModelSpec`, if none is registered for its class.
        uncounted: text encoders whose configs could not be read, and which `text` does not include.
        table: the table of a family without a `ModelSpec`.
        frames_of_latent: frames that its VAE makes of a latent one.
        coder: the class of the VAE.
        others: parameters of a second transformer, which is called in turns with the first.
        decodes: numbers that are alive at once for each latent pixel of a decoded picture, if a file says so.
    """

    name: str
    pipeline: type
    transformer: nn.Module
    vae_scale: int
    text: int = 0
    vae: int = 0
    decoder: Mapping[str, Any] | None = None
    family: ModelSpec | None = None
    uncounted: tuple[str, ...] = ()
    table: FamilyTable | None = None
    frames_of_latent: int = 1
    coder: type = diffusers.AutoencoderKL
    others: int = 0
    decodes: float | None = None
    _stages: dict[Any, list[range]] = field(default_factory=dict, repr=False)
    _footprints: dict[int, Footprint] = field(default_factory=dict, repr=False)
    _kept: dict[tuple[range, int, int, int], float] = field(default_factory=dict, repr=False)
    _parameters: dict[tuple[range, int], int] = field(default_factory=dict, repr=False)

    @classmethod
    def from_configs(cls, name: str, source: Path | str) -> PlanSubject:
        """The pipeline of a folder or hub id (of which only configs are read).

        Raises:
            LoadError: if configs cannot be read.
            ModelError: if it has no transformer, or one without a `ModelSpec` that cannot be counted.
        """
        with convert_build_errors(name):
            return cls._build_from_configs(name, source)

    @classmethod
    def _build_from_configs(cls, name: str, source: Path | str) -> PlanSubject:
        try:
            index = diffusers.DiffusionPipeline.load_config(source)
            pipeline = getattr(diffusers, index["_class_name"])
            kind = index.get("transformer", (None, None))[1]
            if kind is None:
                raise ModelError(f"{index['_class_name']} has no transformer, so it cannot be cut into stages")
            transformer = getattr(diffusers, kind)
            config = transformer.load_config(source, subfolder="transformer")
            vae = diffusers.AutoencoderKL.load_config(source, subfolder="vae")
        except (OSError, KeyError, AttributeError, TypeError) as error:
            raise LoadError(f"the configs of {str(source)!r} cannot be read: {' '.join(str(error).split())}") from error
        for part, values in (("transformer", config), ("vae", vae)):
            check_config_counts(values, f"the config of {part} in {source}")
        with init_on_meta_device():
            transformer_model: nn.Module = transformer.from_config(config)
        kind = getattr(diffusers, index.get("vae", ("", "AutoencoderKL"))[1])
        table = find_family_table(transformer_model, index)
        if table is None:
            scale = VaeScale(2 ** (len(vae["block_out_channels"]) - 1))
        else:
            with init_on_meta_device():
                scale = table.scale(kind.from_config(vae))
        other_parts = _count_other_parts(source, index, kind, vae)
        second = (index.get("transformer_2") or [None])[0] is not None
        return cls(
            name,
            pipeline,
            transformer_model,
            scale.side,
            other_parts.text,
            other_parts.vae,
            decoder=vae,
            uncounted=other_parts.uncounted,
            table=table,
            frames_of_latent=scale.frames,
            coder=kind,
            others=_count_module_parameters(transformer_model) if second else 0,
            decodes=other_parts.decodes,
        )

    @cached_property
    def model_spec(self) -> ModelSpec:
        """The spec of its family."""
        return self.family or (choose_model_spec(self.transformer) if self.table is None else self.table.spec)

    @cached_property
    def block_hooks(self) -> TransformerHooks:
        """Hooks for its blocks, which are not installed."""
        return build_block_hooks(self.transformer, self.model_spec)

    @cached_property
    def parameter_counts(self) -> Weights:
        """The numbers of its parameters."""
        return self.block_hooks.describe_weights()

    @cached_property
    def transformer_work(self) -> TransformerWork:
        """Its work, counted on the first use."""
        return count_transformer_work(self.transformer, self.model_spec)

    @cached_property
    def replicated_numbers(self) -> int:
        """Numbers that every rank has beside its parameters: in its buffers, and in a second transformer."""
        return self.others + sum(buffer.numel() for buffer in self.transformer.buffers())

    def get_footprint(self, ranks: int) -> Footprint:
        """The numbers that are alive in its forward, on each of so many ranks of tensor parallelism."""
        if ranks not in self._footprints:
            config: Any = self.transformer.config
            channels = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
            whole_footprint = self.transformer_work.footprint
            self._footprints[ranks] = whole_footprint.divide_by_ranks(channels, ranks) if ranks > 1 else whole_footprint
        return self._footprints[ranks]

    def count_kept_numbers(self, blocks: range, ranks: int, image: int, text: int) -> float:
        """Numbers that some blocks keep for a whole generation, on each of so many ranks of tensor parallelism."""
        key = blocks, ranks, image, text
        if key not in self._kept:
            each = self.get_footprint(ranks).kept
            self._kept[key] = sum(each[block].count_numbers(image, text) for block in blocks)
        return self._kept[key]

    @cached_property
    def sharded_parameters(self) -> tuple[int, ...]:
        """Parameters of each block that tensor parallelism divides."""
        table = find_tensor_table(self.transformer, self.model_spec, find_derived_cuts(self.transformer))
        cuts = TensorCuts.match_tensor_table(self.transformer, table, 0, 2, loaded=True)
        named = [(hook.name, hook.block.named_parameters()) for hook in self.block_hooks.chain]
        return tuple(
            sum(p.numel() for name, p in parameters if cuts.select_shard(f"{block}.{name}", p.shape))
            for block, parameters in named
        )

    def count_parameters(self, blocks: range, ranks: int) -> int:
        """Parameters of some blocks on each of so many ranks of tensor parallelism."""
        if (blocks, ranks) not in self._parameters:
            cut = [self.sharded_parameters[block] if ranks > 1 else 0 for block in blocks]
            whole = sum(self.parameter_counts.blocks[block] for block in blocks)
            self._parameters[blocks, ranks] = whole - sum(cut) + sum(-(-each // ranks) for each in cut)
        return self._parameters[blocks, ranks]

    @cached_property
    def _cost_model(self) -> CostModel:
        return CostModel.from_model_hooks(self.block_hooks)

    @cached_property
    def _decode_counter(self) -> Callable[[int], float]:
        if self.decoder is None:
            return lambda frames: 0.0
        if self.table is not None and self.table.decodes_frames:
            return make_frame_decode_counter(self.coder, self.decoder, self.table.channels)
        numbers = count_decoder_numbers(self.decoder, self.coder) if self.decodes is None else self.decodes
        return lambda frames: numbers

    def count_decode_numbers(self, frames: int = 1) -> float:
        """Numbers that are alive at once while a latent pixel of so many latent frames is decoded."""
        return self._decode_counter(frames)

    def count_text_tokens(self, call: Mapping[str, Any]) -> int:
        """Tokens of text that cross attention sees, which are not in the sequence."""
        own = 300 if self.table is None else self.table.text_tokens
        return 0 if self.model_spec.joint != "none" else int(call.get("max_sequence_length") or own)

    @property
    def memory_saving_options(self) -> tuple[tuple[str, Any], ...]:
        """(field of a plan, value) with which a rank needs less memory, at no cost in the loop."""
        return (("vae", "rows"), ("text", "split")) if self.table is None else ()

    def can_run_plan(self, plan: Plan) -> bool:
        """Whether its family can run under a plan: one without a `ModelSpec` divides only calls and tokens."""
        calls = plan.world == plan.data * plan.cfg * plan.token_ranks
        return self.table is None or (splits_only_tokens(plan) if self.others else calls)

    def make_call_shape(self, call: Mapping[str, Any], element_size: int = 4) -> Shape:
        """The shape of a call; the pipeline's own defaults fill the gaps.

        Raises:
            ModelError: if a side is not a whole number of tokens, or there are frames that the model does not make.
        """
        config: Any = self.transformer.config
        filled = fill_call_defaults(self.pipeline, config, self.vae_scale, call)
        check_image_size(filled, self.vae_scale * self.model_spec.latent_per_token(config))
        frames = call.get("num_frames")
        if frames is not None and not (self.table and self.table.is_video):
            raise ModelError(f"frames={frames}: {self.pipeline.__name__} makes pictures; leave it out")
        shape = Shape.from_call(self.model_spec, config, self.vae_scale, element_size, filled)
        if self.table is None:
            return shape
        return self.table.add_frames(shape, int(filled.get("num_frames", 1)), self.frames_of_latent)

    def make_plan_job(self, plan: Plan, shape: Shape) -> PlannedCall:
        """The call under a plan.

        Raises:
            PlanError: if the plan does not fit.
        """
        kind = type(self.transformer).__name__
        if self.table is not None:
            check_family_plan(plan, self.coder.__name__, in_turns=self.others > 0)
        plan.check(shape.collect_facts(kind, len(self.block_hooks.chain)))
        key = (plan.pipefusion, plan.num_patches, plan.stage_blocks, plan.stage_weights)
        if key not in self._stages:
            self._stages[key] = divide_blocks(self.block_hooks, plan, self._cost_model)
        weights, stages = self.parameter_counts, self._stages[key]
        return PlannedCall(plan=plan, spec=self.model_spec, shape=shape, weights=weights, stages=stages)


class _OtherParts(NamedTuple):
    """Parameters of text encoders and VAE; `uncounted` and `decodes` as in `PlanSubject`."""

    text: int
    vae: int
    uncounted: tuple[str, ...] = ()
    decodes: float | None = None


def _count_other_parts(source: Path | str, index: Mapping[str, Any], kind: Any, vae: Mapping[str, Any]) -> _OtherParts:
    """Reads the parameters of other parts from a file, or else counts them on models that are made from configs."""
    facts = Path(source, FACTS)
    if facts.exists():
        counts = read_json_object(facts)
        return _OtherParts(counts["text_parameters"], counts["vae_parameters"], decodes=counts.get("decoded_numbers"))
    names = [name for name in TEXT if (index.get(name) or [None])[0]]
    sizes = {name: _count_encoder_parameters(source, name, index[name][1]) for name in names}
    with init_on_meta_device():
        coder = _count_module_parameters(kind.from_config(vae))
    uncounted = tuple(name for name, size in sizes.items() if size is None)
    return _OtherParts(sum(size or 0 for size in sizes.values()), coder, uncounted)


def _count_encoder_parameters(source: Path | str, name: str, kind: str) -> int | None:
    """Parameters of a text encoder; None if transformers has no such class, or the config cannot be read."""
    kinds: Any = getattr(transformers, kind, None)
    if kinds is None:
        return None
    try:
        config = kinds.config_class.from_pretrained(str(source), subfolder=name)
    except OSError:
        return None
    check_config_counts(config.to_dict(), f"the config of {name} in {source}")
    with init_on_meta_device():
        return _count_module_parameters(kinds(config))


def _count_module_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
