"""The model that a plan is for, built from its configs without weights, and the shapes of its calls.

A `CallFamily` describes the calls of its family. Calls of other families are recorded (`recorded.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import diffusers
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ditile.model.anatomies import build_block_hooks, find_derived_cuts
from ditile.model.call_families import find_call_family
from ditile.model.hooks.block_calls import read_token_grid
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.overrides import find_latents_parameter
from ditile.model.pipeline_calls import list_call_parameters
from ditile.model.support import find_holes, name_family
from ditile.parallel.pipefusion.block_costs import CostModel, divide_blocks
from ditile.parallel.tensor.cuts import TensorCuts
from ditile.parallel.tensor.sharding import find_tensor_table
from ditile.parallel.text.parts import can_split_encoder, find_encoder_modules
from ditile.parallel.vae.parallel_vae import PROVEN
from ditile.plan.anatomy import REAL_PAIRS, drop_further_keys
from ditile.plan.cost import PlannedCall, memoize_method
from ditile.plan.errors import ModelError, PlanError
from ditile.plan.layout import Grid, Joint
from ditile.plan.option_classes import CallArguments, JsonObject, drop_missing
from ditile.plan.plan import AXES, Facts, Plan
from ditile.plan.shape import (
    FRAME_COUNTS,
    CallFamily,
    Shape,
    Weights,
    check_image_size,
    count_images,
    fill_call_defaults,
)
from ditile.planner.footprint import (
    Footprint,
    VaeScale,
    count_decode_work,
    count_decoder_numbers,
    count_on_line,
    measure_vae_scale,
)
from ditile.planner.kernel_times import (
    GRID,
    TEXT,
    CountedCall,
    Stream,
    StreamSizes,
    TransformerWork,
    count_transformer_work,
)
from ditile.planner.profile import DecodeWork
from ditile.planner.recording.configs import PipelineConfigs
from ditile.planner.recording.recorded import (
    NO_GUIDANCE,
    PipelineRecorder,
    RecordedCall,
    RecordedStep,
    read_prompt_table,
)
from ditile.planner.recording.sizes import SizesOnly
from ditile.runner.load import convert_build_errors
from ditile.runner.model_files import DENOISERS, ComponentFiles, ModelSource
from ditile.runner.requests.conditions import bind_conditions, check_picture_count, read_call_conditions
from ditile.runner.requests.pipeline_choice import choose_pipeline_class
from ditile.runner.weights.prequantized import StoredWeights

PROBED = Grid(22, 32)
"""Token rows and columns of the image in the probe, the recorded call that a model's work is counted with."""
PROBED_TEXT = 384
"""Text tokens of the probe. Both counts are multiples of 32, to which some families pad, and no large model's width."""
SIDES = (32, 64)
"""Latent pixels along the sides of the squares used to find the pixels per token."""
EXCHANGE_OF_STYLE = {"rowwise": "sum", "rms_norm": "norm"}
"""Style of a module's tensor parallelism -> the exchange between its ranks."""
STREAM_NAMES: Mapping[str, str] = {"image": "image", "text": "text", "both": "text+image"}
"""Stream of a counted kernel -> its name in `Weights.exchanges`."""
COLUMNS = {name: (name,) for name in AXES} | {"pipefusion": ("pipefusion", "stale")}
"""Axis -> the columns of `model/assets/support.json` that a family must hold."""


@dataclass(frozen=True)
class PlanSubject:
    """A pipeline whose transformer has no weights.

    Attributes:
        transformer: the transformer, on the meta device.
        vae_scale: pixels along the side of a latent pixel.
        text, vae: the number of parameters in all text encoders, and in the VAE.
        encoders: the classes of the text encoders, with None for an unknown class.
        decoder: the config of the VAE, if there is one.
        uncounted: text encoders with unreadable configs, not included in `text`.
        recorder: records calls, if no `CallFamily` names the pipeline's class.
        scale: the VAE's scale of sides and frames.
        coder: the class of the VAE.
        models: the number of transformers that are called in turns, each on every rank.
        decodes: numbers that are alive at once for each latent pixel of a decoded image, if the model's facts say so.
        stored: transformer -> the format of its weights, if they are in a file of its own or quantized.
    """

    name: str
    pipeline: type
    transformer: nn.Module
    vae_scale: int
    text: int = 0
    vae: int = 0
    encoders: tuple[Any, ...] = ()
    decoder: JsonObject | None = None
    uncounted: tuple[str, ...] = ()
    recorder: PipelineRecorder | None = None
    scale: VaeScale = VaeScale(1)
    coder: type = diffusers.AutoencoderKL
    models: int = 1
    decodes: float | None = None
    stored: Mapping[str, StoredWeights] = field(default_factory=dict)
    _stages: dict[Any, list[range]] = field(default_factory=dict, repr=False)
    _steps: dict[Any, RecordedStep] = field(default_factory=dict, repr=False)

    @classmethod
    def from_configs(
        cls,
        name: str,
        source: ModelSource,
        given: Collection[str] = (),
        *,
        has_controlnet: bool = False,
        components: ComponentFiles | None = None,
    ) -> PlanSubject:
        """Read a pipeline from a folder or hub id. Only its configs are read.

        Args:
            given: inputs besides text, such as `image`. They choose another class of the pipeline's family, if calls of
                that class can be recorded.
            has_controlnet: whether there is a ControlNet besides the model's own parts.
            components: component -> the file with its weights; by default they are the model's own.

        Raises:
            LoadError: if configs cannot be read.
            ModelError: if it has no transformer, or one whose calls are not known and cannot be recorded.
        """
        with convert_build_errors(name):
            configs = PipelineConfigs.read_source(source, components or {})
            chosen = choose_pipeline_class(configs.pipeline, given, configs.index, has_controlnet=has_controlnet)
            if chosen.__name__ in read_prompt_table():
                configs = replace(configs, pipeline=chosen)
            return cls.from_pipeline_configs(name, configs)

    @classmethod
    def from_pipeline_configs(cls, name: str, configs: PipelineConfigs) -> PlanSubject:
        """Build the subject from a pipeline's configs."""
        transformer = configs.build_transformer()
        family = find_call_family(transformer)
        recorder = None
        # To record a call, the pipeline is built from its configs, which takes seconds.
        if configs.is_recorded(family):
            recorder = configs.make_recorder(transformer)
        if family is None:
            scale = measure_vae_scale(configs.coder, configs.vae)
        else:
            # Families with an example make images, and their VAEs halve an image's sides between blocks.
            scale = VaeScale(2 ** (len(configs.vae["block_out_channels"]) - 1))
        text, vae, uncounted, decodes = configs.count_other_parts()
        return cls(
            name,
            configs.pipeline,
            transformer,
            scale.side,
            text,
            vae,
            encoders=configs.encoders,
            decoder=configs.vae,
            uncounted=uncounted,
            recorder=recorder,
            scale=scale,
            coder=configs.coder,
            models=1 if configs.second is None else 2,
            decodes=decodes,
            stored=configs.stored,
        )

    @cached_property
    def family(self) -> CallFamily:
        """Return the model's family, derived from its anatomy if no `CallFamily` describes it."""
        family = find_call_family(self.transformer)
        if family is not None:
            return family
        anatomy = self.block_hooks.anatomy
        joint: Joint = anatomy.joint
        if anatomy.is_one_sequence:
            joint = "none"
        return CallFamily(name=name_family(type(self.transformer)), joint=joint)

    @cached_property
    def block_hooks(self) -> TransformerHooks:
        """Build hooks for its blocks, without installing them."""
        return build_block_hooks(self.transformer)

    @cached_property
    def parameter_counts(self) -> Weights:
        """Count the transformer's parts: parameters, attention layers and exchanges."""
        weights = self.block_hooks.describe_weights()
        if self.family.example is not None:
            return weights
        layers = []
        for hook in self.block_hooks.chain:
            sees_text = []
            for path, _ in hook.list_attentions():
                kinds = [drop_further_keys(kind.rstrip(REAL_PAIRS)) for kind in hook.anatomy.attention[path]]
                # Other kinds attend only to the tokens of a second stream, whose keys no rank exchanges.
                if any(kind.endswith(("N", "J")) for kind in kinds):
                    sees_text.append(hook.sees_text(path))
            layers.append(tuple(sees_text))
        call = self._record_probe().calls[0]
        out, rest = divmod(call.out, call.rows * call.image)
        # The image's sequence also holds text, which has no prediction.
        if rest:
            out = call.out // (call.rows * self._probed_tokens)
        return replace(weights, layers=tuple(layers), out=out, exchanges=self._find_tensor_exchanges())

    def _find_tensor_exchanges(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Find each block's sums after row-parallel Linears, and those within norms across heads."""
        chain = self.block_hooks.chain
        if "tensor" in self._holes:
            return tuple(() for _ in chain)
        styles = self._tensor_cuts.styles
        exchanges = []
        for hook, streams in zip(chain, self.transformer_work.streams, strict=True):
            of_block = []
            for path, stream in streams.items():
                style = styles.get(f"{hook.name}.{path}")
                if style is not None and style.kind in EXCHANGE_OF_STYLE and stream in STREAM_NAMES:
                    of_block.append((EXCHANGE_OF_STYLE[style.kind], STREAM_NAMES[stream]))
            exchanges.append(tuple(of_block))
        return tuple(exchanges)

    @cached_property
    def transformer_work(self) -> TransformerWork:
        """Return the counted work of the transformer."""
        return count_transformer_work(self.transformer, self.family, self._make_counted_call())

    @cached_property
    def token_side(self) -> int:
        """Return the pixels along the side of a token."""
        if self.family.example is not None:
            return self.vae_scale * self.family.latent_per_token(self.transformer.config)  # type: ignore[arg-type]
        # Inputs besides the image, such as references, are the same at both sizes, so the difference leaves them out.
        sides = [side * self.vae_scale for side in SIDES]
        tokens = []
        for side in sides:
            step = self._record({"height": side, "width": side, "num_frames": self._probed_frames})
            tokens.append(step.calls[0].image)
        more_pixels = sides[1] ** 2 - sides[0] ** 2
        latent_frames = self.scale.count_latent_frames(self._probed_frames)
        return round(math.sqrt(more_pixels * latent_frames / (tokens[1] - tokens[0])))

    @cached_property
    def _probed_frames(self) -> int:
        """Return the number of frames in the probe."""
        assert self.recorder is not None
        # A VAE that decodes chunks of frames makes no single frame, and a pipeline's shortest video is not known.
        return 1 if self.scale.chunk == 1 else self.recorder.default_frames

    @property
    def _probed_tokens(self) -> int:
        """Count the image's tokens in the probe, without other tokens of their sequence."""
        return PROBED.num_tokens * self.scale.count_latent_frames(self._probed_frames)

    def _record(self, call: CallArguments) -> RecordedStep:
        """Record the first step of a call."""
        assert self.recorder is not None
        filled = self.fill_arguments(call)
        sizes = drop_missing({name: _describe_argument(value) for name, value in filled.items()})
        key = tuple(sorted(sizes.items()))
        if key not in self._steps:
            self._steps[key] = self.recorder.record_step(filled)
        return self._steps[key]

    def _record_probe(self) -> RecordedStep:
        """Record the first step of the probe, which has one branch of one image."""
        size = {
            "height": PROBED.rows * self.token_side,
            "width": PROBED.tokens_per_row * self.token_side,
            "num_frames": self._probed_frames,
            "max_sequence_length": PROBED_TEXT,
        }
        step = self._record(size | NO_GUIDANCE)
        # Work is counted for one row, and multiplied by the rows of a call.
        if step.calls[0].rows != 1:
            raise ModelError(
                f"{self.pipeline.__name__} calls {type(self.transformer).__name__} with {step.calls[0].rows} rows for "
                "one image without guidance, so that its work cannot be counted"
            )
        return step

    def _make_counted_call(self) -> CountedCall:
        example = self.family.example
        if example is not None:
            config: Any = dict(self.transformer.config)  # type: ignore[arg-type]
            return CountedCall(
                lambda: {**example(config, GRID, TEXT), "return_dict": False}, StreamSizes(GRID.num_tokens, TEXT)
            )
        step = self._record_probe()
        call = step.calls[0]
        others: dict[int, Stream] = {PROBED_TEXT: "text", self._probed_tokens: "image"}
        sizes = StreamSizes(call.image, call.text or PROBED_TEXT, others, many=True)
        return CountedCall(
            lambda: tree_map(partial(renew_numbers, step.mode), call.arguments), sizes, lambda: step.mode, True
        )

    @cached_property
    def attention_heads(self) -> tuple[int, int]:
        """Return the attention heads in a block, and the channels of each."""
        kernels = [kernel for kernel in self.transformer_work.blocks[0] if kernel.kind == "attention"]
        if not kernels:
            raise ModelError(
                f"{type(self.transformer).__name__} attends otherwise than by scaled_dot_product_attention, so that "
                "its work cannot be counted"
            )
        # A block may attend twice; the widest attention is that of its tokens.
        channels, head_dim = max(kernel.size for kernel in kernels)
        return int(channels) // head_dim, head_dim

    @cached_property
    def replicated_numbers(self) -> int:
        """Count the numbers in buffers of the transformer. Every rank has them."""
        return sum(buffer.numel() for buffer in self.transformer.buffers())

    @memoize_method
    def divide_footprint(self, channels: int, ranks: float) -> Footprint:
        """Return the footprint of the forward on a rank of tensor parallelism.

        Args:
            channels: the channels of a token between blocks.
            ranks: the number of ranks; if shares differ, the whole divided by this rank's share.
        """
        footprint = self.transformer_work.footprint
        if ranks == 1:
            return footprint
        return footprint.divide_by_ranks(channels, ranks)

    @cached_property
    def _tensor_cuts(self) -> TensorCuts:
        table = find_tensor_table(self.transformer, find_derived_cuts(self.transformer))
        return TensorCuts.match_tensor_table(self.transformer, table, 0, 2, loaded=(1, 1))

    @cached_property
    def _divisible_weights(self) -> Weights:
        """Return the counts of `parameter_counts`, with the equal parts for unlike shares of tensor parallelism."""
        table = find_tensor_table(self.transformer, find_derived_cuts(self.transformer))
        # Equal weights would give each rank one part, however many parts there are.
        cuts = TensorCuts.match_tensor_table(self.transformer, table, 0, 2, weights=(2.0, 1.0))
        return replace(self.parameter_counts, tensor_units=sum(cuts.shares))

    @cached_property
    def sharded_parameters(self) -> tuple[int, ...]:
        """Count the parameters of each block that tensor parallelism divides."""
        counts = []
        for hook in self.block_hooks.chain:
            count = 0
            for name, parameter in hook.block.named_parameters():
                if self._tensor_cuts.select_shard(f"{hook.name}.{name}", parameter.shape):
                    count += parameter.numel()
            counts.append(count)
        return tuple(counts)

    @memoize_method
    def count_block_parameters(self, ranks: float) -> tuple[int, ...]:
        """Count the parameters of each block on a rank. `ranks` is that of `divide_footprint`."""
        whole = self.parameter_counts.blocks
        if ranks == 1:
            return whole
        counts = []
        for count, sharded in zip(whole, self.sharded_parameters, strict=True):
            counts.append(count - sharded + math.ceil(sharded / ranks))
        return tuple(counts)

    @cached_property
    def _cost_model(self) -> CostModel:
        return CostModel.from_model_hooks(self.block_hooks, self.family)

    @memoize_method
    def count_decode_numbers(self, frames: int = 1) -> float:
        """Count the numbers alive at once for each latent pixel while `frames` latent frames are decoded."""
        if self.decoder is None:
            return 0.0
        # A video VAE keeps some frames alive, so its peak depends on the number of frames.
        if self.scale.frames:
            count = partial(count_decoder_numbers, self.coder, self.decoder, self.scale.channels)
            return count_on_line(count, frames, self.scale.counted_frames)
        if self.decodes is not None:
            return self.decodes
        return count_decoder_numbers(self.coder, self.decoder)

    @memoize_method
    def count_decode_work(self, frames: int = 1) -> DecodeWork:
        """Count the work to decode `frames` latent frames."""
        if self.decoder is None:
            return DecodeWork(0.0, 0)
        count = partial(count_decode_work, self.coder, self.decoder, self.scale.channels)
        if not self.scale.frames:
            return count()
        counted = self.scale.counted_frames
        work = count(min(frames, counted[1]))
        return work._replace(operations=count_on_line(lambda number: count(number).operations, frames, counted))

    def count_text_tokens(self, call: CallArguments) -> int:
        """Count the text tokens of cross attention. They are not in the sequence."""
        # Text in the sequence is counted with its tokens.
        if self.family.joint != "none":
            return 0
        if self.recorder is not None:
            return self.recorder.count_text_tokens(call)
        # The default of PixArt-Sigma, a family with text in cross attention.
        return int(call.get("max_sequence_length") or 300)

    @property
    def streams_weights(self) -> bool:
        """Return whether stages can share synchronous steps by sending each other the weights of blocks."""
        return self.models == 1 and not self.block_hooks.anatomy.modes

    @property
    def divides_decode(self) -> bool:
        """Return whether the decode can be divided by rows."""
        return self.coder.__name__ in PROVEN

    @property
    def memory_saving_options(self) -> tuple[tuple[str, Any], ...]:
        """List the pairs (field of a plan, value) that lower a rank's memory at no cost in the loop."""
        options = []
        if self.divides_decode:
            options.append(("vae", "rows"))
        if all(encoder is not None and can_split_encoder(encoder) for encoder in self.encoders):
            options.append(("text", "split"))
        return tuple(options)

    def can_run_plan(self, plan: Plan) -> bool:
        """Return whether the table of families (`ditile models`) and the number of key heads allow a plan."""
        if self._find_holes(plan):
            return False
        # Grouped queries have fewer heads of keys, which tensor parallelism must divide too.
        heads, _ = self.attention_heads
        return round(heads * self.transformer_work.key_heads) % plan.tensor == 0

    @cached_property
    def _holes(self) -> Mapping[str, str]:
        """Return the columns of the table of families that this family does not hold, each with the reason."""
        return find_holes(type(self.transformer), self.pipeline.__name__)

    def _find_holes(self, plan: Plan) -> dict[str, str]:
        """Return the reason why the family does not support an axis of the plan, for each such axis."""
        reasons = {}
        for axis in AXES:
            columns = COLUMNS[axis] if getattr(plan, axis) > 1 else ()
            for column in columns:
                if column in self._holes:
                    reasons[axis] = self._holes[column]
        return reasons

    def fill_arguments(self, call: CallArguments) -> CallArguments:
        """Complete the arguments of a call with the defaults of the pipeline."""
        config: Any = self.transformer.config
        if self.recorder is None:
            return fill_call_defaults(list_call_parameters(self.pipeline), config, self.vae_scale, call)
        # The object of a modular pipeline knows the inputs of its blocks, and the class does not.
        filled = fill_call_defaults(list_call_parameters(self.recorder.pipe), config, self.vae_scale, call)
        if self.makes_videos and not any(name in filled for name in FRAME_COUNTS):
            filled["num_frames"] = self.recorder.default_frames
        return filled

    def make_call_shape(self, call: CallArguments, element_size: int = 4) -> Shape:
        """Make the shape of a call. The pipeline's own defaults fill the gaps.

        Raises:
            ModelError: if a side is not a whole number of tokens, or there are frames that the model does not make.
        """
        config: Any = self.transformer.config
        filled = self.fill_arguments(call)
        # Checked before a call is recorded, because the recording would only fail somewhere inside the pipeline.
        check_image_size(filled, self.token_side)
        frames = call.get("num_frames")
        if frames is not None and not self.makes_videos:
            raise ModelError(f"frames={frames}: {self.pipeline.__name__} makes images; leave it out")
        if self.recorder is None:
            return Shape.from_call(self.family, config, self.vae_scale, element_size, filled)
        return self._make_recorded_shape(filled, element_size)

    def count_weight_bytes(self, numbers: float, element_size: int, model: int = 0) -> int:
        """Count the bytes of `numbers` weights, which may be quantized, in one of the transformers."""
        stored = self.stored.get(DENOISERS[model])
        if stored is None:
            return int(numbers * element_size)
        return stored.count_bytes(numbers, element_size)

    @property
    def unpacks_weights(self) -> bool:
        """Return whether calls unpack quantized weights, and so are not recorded as CUDA graphs."""
        return any(stored.quantized for stored in self.stored.values())

    def join_stored_weights(self) -> StoredWeights | None:
        """Join the stored weights of all transformers; None if `stored` is empty."""
        if not self.stored:
            return None
        numbers = self.parameter_counts.shared + sum(self.parameter_counts.blocks)
        plain = StoredWeights(quantized=0, plain=numbers, quantized_bytes=0)
        parts = [self.stored.get(name, plain) for name in DENOISERS[: self.models]]
        formats: dict[str, tuple[int, int]] = {}
        for part in parts:
            for name, counts in part.formats.items():
                before = formats.get(name, (0, 0))
                formats[name] = before[0] + counts[0], before[1] + counts[1]
        return StoredWeights(
            quantized=sum(part.quantized for part in parts),
            plain=sum(part.plain for part in parts),
            quantized_bytes=sum(part.quantized_bytes for part in parts),
            formats=formats,
        )

    @property
    def makes_videos(self) -> bool:
        """Return whether a call has frames."""
        return self.recorder is not None and self.recorder.takes_frames

    def bind_pictures(self, pictures: Sequence[Image.Image]) -> CallArguments:
        """Return the call arguments for input images; none without images, or if the class is not known to take any.

        Raises:
            ModelError: if there are more images than the class takes.
        """
        taken = read_call_conditions(self.pipeline)
        check_picture_count(self.pipeline.__name__, taken.max_pictures, len(pictures))
        if not pictures or "image" not in taken.arguments:
            return {}
        return bind_conditions(taken, {"image": list(pictures)})

    def _make_recorded_shape(self, call: CallArguments, element_size: int) -> Shape:
        frames = int(call.get("num_frames") or 1) if self.makes_videos else 1
        step = self._record(call)  # first: the next line's error may propose a number that the pipeline refuses
        latent_frames = self.scale.count_latent_frames(frames)
        heads, head_dim = self.attention_heads
        images = count_images({"prompt": "", **call})
        latents = step.latents // images
        rows = [recorded.rows for recorded in step.calls]
        largest = max(step.calls, key=lambda recorded: recorded.rows)
        out = self.parameter_counts.out
        # If text is in the sequence, or a second stream is predicted, `out` counts more than the image's numbers.
        references = None
        if largest.out == largest.rows * largest.image * out and latents % out == 0:
            references = largest.image - latents // out
        height = int(call["height"])
        width = int(call["width"])
        if references is not None and latent_frames == 1:
            tokens = largest.image - references
            # Some pipelines resize images to the size that the model was trained with.
            if tokens * self.token_side**2 != height * width:
                columns = round(math.sqrt(tokens * width / height))
                height = round(tokens / columns) * self.token_side
                width = columns * self.token_side
        # If calls have unlike numbers of rows, each counts as several calls of one row for each image.
        batch = images
        calls = sum(rows) // images
        call_rows = tuple(count // images for count in rows)
        if len(set(rows)) == 1:
            batch = rows[0]
            calls = len(rows)
            call_rows = ()
        return Shape(
            height=height,
            width=width,
            steps=int(call["num_inference_steps"]),
            grid=self._find_grid(height, width, largest),
            text=largest.text,
            batch=batch,
            images=images,
            calls=calls,
            call_rows=call_rows,
            heads=heads,
            head_dim=head_dim,
            latent_elements=latents,
            element_size=element_size,
            frames=latent_frames,
            channels=largest.channels,
            key_heads=self.transformer_work.key_heads,
            references=references,
        )

    def _find_grid(self, height: int, width: int, call: RecordedCall) -> Grid:
        """Return the grid whose rows are divided into patches; flattened tokens are a grid of one column."""
        flat = Grid(call.image, 1)
        # A family's anatomy may name the argument that the grid is read from.
        argument = self.block_hooks.anatomy.grid
        if argument:
            grid = read_token_grid(self.transformer, call.arguments[argument])
            return grid if grid.num_tokens == call.image else flat
        latents = call.arguments.get(find_latents_parameter(self.transformer))
        rows = height // self.token_side
        columns = width // self.token_side
        # Patches of a video are the same rows of every frame.
        frames, rest = divmod(call.image, rows * columns)
        # Flattened latents do not say where a frame ends.
        has_frames = isinstance(latents, Tensor) and latents.ndim == 5
        if has_frames and not rest and frames > 1:
            return Grid(rows, columns, frames)
        return flat

    def collect_facts(self, shape: Shape) -> Facts:
        """Collect the facts that a call's plans are checked against."""
        return shape.collect_facts(type(self.transformer).__name__, len(self.block_hooks.chain))

    def make_plan_job(self, plan: Plan, shape: Shape) -> PlannedCall:
        """Make the call under a plan.

        Raises:
            PlanError: if the plan does not fit.
            ModelError: if a text encoder cannot be split as the plan says.
        """
        kind = type(self.transformer).__name__
        for axis, reason in self._find_holes(plan).items():
            raise PlanError(f"{axis}={getattr(plan, axis)}: {kind} {reason}; `ditile models` says what it holds")
        if plan.vae == "rows" and not self.divides_decode:
            raise PlanError(
                f"vae=rows: whether {self.coder.__name__} can be divided by rows is only seen when it is loaded; "
                "use vae=whole"
            )
        if plan.references is not None and not shape.references:
            raise PlanError(
                f"references={plan.references}: no tokens of reference images are known of this call of "
                f"{self.pipeline.__name__}; give images (--image 1024x1024) to a model that refers to them, or leave "
                "references out"
            )
        if plan.text == "split" and plan.world > 1:
            # Called for its check: it raises if the layers of an encoder are not known.
            for encoder in filter(None, self.encoders):
                find_encoder_modules(encoder)
        plan.check(self.collect_facts(shape))
        size = shape.element_size
        key = (plan.pipefusion, plan.num_patches, plan.stage_blocks, plan.stage_weights, size)
        if key not in self._stages:
            costs = None
            if self.family.example is not None:
                # Weights will be loaded as numbers of `size` bytes; here they have torch's default type.
                costs = replace(self._cost_model, itemsize=min(size, 4))
            self._stages[key] = divide_blocks(self.block_hooks, plan, costs)
        weights = self.parameter_counts
        if plan.has_unlike_tensor_shares:
            weights = self._divisible_weights
        return PlannedCall(
            plan=plan,
            family=self.family,
            shape=shape,
            weights=weights,
            stages=self._stages[key],
        )


def renew_numbers(mode: SizesOnly, value: Any) -> Any:
    """Copy a tensor of floats that the forward reads, because only tensors made during the forward are counted."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return value
    renewed = torch.empty_like(value)
    if not mode.is_unknown(value):
        # The forward may branch on known numbers, such as zeros in place of an image. This copy is not counted.
        with _disable_current_modes():
            renewed.copy_(value)
    return renewed


def _describe_argument(value: Any) -> Any:
    """Return what an argument says of a call's size: a number, a string or the sizes of images; otherwise None."""
    if isinstance(value, Image.Image):
        return value.size
    if isinstance(value, list):
        return tuple(item.size for item in value if isinstance(item, Image.Image)) or None
    return value if isinstance(value, str | int | float) else None
