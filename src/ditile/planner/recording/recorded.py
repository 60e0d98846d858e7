"""Records a pipeline's inputs to its transformer, at any size, without weights.

The pipeline itself is called, with text embeddings instead of a prompt (their names and shapes are in `prompts.json`).
It only runs for the sizes of its tensors, and its blocks pass on their inputs, until the first step ends. So tokens,
calls, rows and latents are those of the call, whatever the family does to get there.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from PIL import Image
from torch import Tensor, nn

from ditile.distributed.recording.segments import list_tensors
from ditile.model.hooks.block_calls import make_pass_on
from ditile.model.hooks.block_hooks import TransformerHooks
from ditile.model.hooks.block_policy import BlockHook
from ditile.model.hooks.overrides import bind_arguments, override_attribute
from ditile.model.hooks.placeholders import init_on_meta_device
from ditile.model.known import ASSETS, name_component_source
from ditile.model.pipeline_calls import (
    hide_block_tracebacks,
    iterate_blocks,
    list_call_parameters,
    read_guidance_rule,
)
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments, JsonObject
from ditile.plan.shape import FRAME_COUNTS
from ditile.planner.recording.sizes import SizesOnly
from ditile.runner.load import convert_build_errors
from ditile.runner.requests.arguments import check_rotary_table

NO_GUIDANCE = dict.fromkeys(("guidance_scale", "true_cfg_scale", "audio_guidance_scale"), 0.0)
"""Arguments of a call of one branch, if the pipeline has them: 0 turns guidance off under every convention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """One call of a transformer.

    Attributes:
        arguments: the arguments of its forward, by parameter.
        rows: rows of its batch.
        image, text: tokens in its blocks; tokens of a single sequence all count as the image's.
        channels: channels of an image token.
        out: the size of the prediction, over all rows.
    """

    arguments: CallArguments
    rows: int
    image: int
    text: int
    channels: int
    out: int


class RecordedStep(NamedTuple):
    """The first step of a pipeline's loop.

    Attributes:
        latents: the number of elements in the latents.
        mode: the mode in which it ran. It knows which values are unknown.
    """

    calls: tuple[RecordedCall, ...]
    latents: int
    mode: SizesOnly


class StopAfterFirstStep(Exception):  # noqa: N818
    """Raised to leave the pipeline after its first step."""


@lru_cache(maxsize=1)
def read_prompt_table() -> Mapping[str, Mapping[str, Any]]:
    """Read what each class of pipelines takes in place of a prompt: argument -> how to make it.

    - `["text", "joint_attention_dim"]`: a tensor of this shape for each row; a word is a size in a config.
    - `[["text", "caption_channels"]]`: a list, with such a tensor for each row.
    - `"picture"`, `"film"`: an image or a video in the size of the call.
    - `"ends"`: where each text of a joined sequence begins and ends.
    - `"tags"`, `"words"`: a number for each token of one text, or of each row's.
    - `"dtype"`: the type of embeddings.
    - a number: itself. null: nothing, since the pipeline takes this argument only with a prompt.
    """
    table: Mapping[str, Mapping[str, Any]] = json.loads((ASSETS / "prompts.json").read_text("utf-8"))
    return table


class PipelineRecorder:
    """Records calls of a pipeline.

    Args:
        pipe: the pipeline, without text encoders; to record a step, its models must be on the meta device.
        hooks: the hooks of each of its transformers, not installed.

    Raises:
        ModelError: if the arguments in place of a prompt are not known.
    """

    def __init__(self, pipe: Any, *hooks: TransformerHooks) -> None:
        self.pipe = pipe
        self._hooks = hooks
        # Progress bars would show a call that the user did not make.
        for owner in (pipe, *iterate_blocks(pipe)):
            if hasattr(owner, "set_progress_bar_config"):
                owner.set_progress_bar_config(disable=True)
        name = type(pipe).__name__
        if name not in read_prompt_table():
            raise ModelError(
                f"{name} cannot be planned for, as nothing says what it takes in place of a prompt; give a plan, as "
                "ulysses=2, or one of the models that `ditile models` names"
            )
        self._prompt = read_prompt_table()[name]
        self._parameters = list_call_parameters(pipe)
        # A modular pipeline may have no config.
        self._guidance = read_guidance_rule(type(pipe), getattr(pipe, "config", {}))

    @property
    def takes_frames(self) -> bool:
        """Return whether a call has a number of frames."""
        return not self._parameters.keys().isdisjoint(FRAME_COUNTS)

    @cached_property
    def default_frames(self) -> int:
        """Return the frames of a call that does not say how many."""
        frames = [self._parameters[name].default for name in FRAME_COUNTS if name in self._parameters]
        # In a modular pipeline, only the block that makes the latents may have a default.
        for block in iterate_blocks(self.pipe):
            frames += [argument.default for argument in block.inputs if argument.name in FRAME_COUNTS]
        return next(filter(None, frames), 1)

    def count_text_tokens(self, call: CallArguments) -> int:
        """Return the most text tokens that a call may have."""
        tokens = call.get("max_sequence_length")
        own = self._parameters.get("max_sequence_length")
        if not tokens and own is not None:
            tokens = own.default
        return int(tokens or getattr(self.pipe, "tokenizer_max_length", None) or 512)

    def record_step(self, call: CallArguments) -> RecordedStep:
        """Record the first step of a call.

        Args:
            call: its arguments; the words of a prompt among them are not read.

        Raises:
            ModelError: if the pipeline refuses it, or decides by unknown values.
        """
        calls = list[RecordedCall]()
        latents = list[int]()
        sizes = SizesOnly()
        step = inspect.signature(self.pipe.scheduler.step)
        defaults = {name: parameter.default for name, parameter in self._parameters.items()}
        check_rotary_table(self.pipe, defaults | dict(call))

        def end_step(*args: Any, **kwargs: Any) -> Any:
            latents.append(step.bind(*args, **kwargs).arguments["sample"].numel())
            raise StopAfterFirstStep

        with ExitStack() as stack:
            for hooks in self._hooks:
                self._watch_model(stack, hooks, calls)
            override_attribute(stack, self.pipe.scheduler, "step", end_step)
            # Blocks of a modular pipeline log every error that passes through them.
            hide_block_tracebacks(stack)
            stack.enter_context(silence_libraries())
            refusal = (
                f"cannot be called for its sizes alone, with the most tokens of text ({self.count_text_tokens(call)})"
            )
            stack.enter_context(convert_build_errors(type(self.pipe).__name__, refusal))
            stack.enter_context(torch.no_grad())
            stack.enter_context(sizes)
            # Only the first step is run; guidance and rows are the same in the others.
            with suppress(StopAfterFirstStep):
                self.pipe(**self.make_arguments(call, sizes.make_unknown))
        if not calls or not latents:
            raise ModelError(f"{type(self.pipe).__name__} ended without a step, so that its calls cannot be counted")
        return RecordedStep(tuple(calls), latents[0], sizes)

    def _watch_model(self, stack: ExitStack, hooks: TransformerHooks, calls: list[RecordedCall]) -> None:
        model = hooks.transformer
        forward = model.forward
        seen = dict[int, dict[str, Any]]()

        # Blocks of a modular pipeline read the names of a forward's parameters.
        @functools.wraps(forward)
        def forward_and_record(*args: Any, **kwargs: Any) -> Any:
            # Drop the inputs of blocks that an earlier call of the transformer left.
            seen.clear()
            out = forward(*args, **kwargs)
            calls.append(_describe_call(hooks, bind_arguments(model, args, kwargs), seen, out))
            return out

        def watch(hook: BlockHook) -> None:
            pass_streams_on = make_pass_on(hook.anatomy)

            def pass_on(*args: Any, **kwargs: Any) -> Any:
                seen[hook.index] = bind_arguments(hook.block, args, kwargs)
                return pass_streams_on(seen[hook.index])

            override_attribute(stack, hook.block, "forward", pass_on)

        for hook in hooks.chain:
            watch(hook)
        override_attribute(stack, model, "forward", forward_and_record)

    def make_arguments(self, call: CallArguments, make_unknown: Callable[..., Tensor]) -> CallArguments:
        """Make the arguments of a pipeline's call, with placeholders for the prompt.

        The call has two steps, because schedulers may refuse one.

        Args:
            call: the other arguments; the words of a prompt among them are not read.
            make_unknown: makes a tensor of a shape, with values that decide nothing.
        """
        arguments = {}
        for name, value in call.items():
            if name == "num_frames":
                # Each class has its own name for the number of frames.
                name = next((own for own in FRAME_COUNTS if own in self._parameters), name)
            # Numbers of images for each prompt are left out too: the rows of embeddings say how many images there are.
            if name in self._parameters and value is not None and "prompt" not in name:
                arguments[name] = value
        rule = self._guidance
        # Some classes guide only where there is a negative prompt; without one they must get no embeddings of it.
        guides = rule is None or not rule.needs_negative_prompt or call.get("negative_prompt") is not None
        for name, shape in self._prompt.items():
            if shape is None:
                arguments.pop(name, None)
                continue
            if shape in ("picture", "film") and name in arguments:
                continue
            # A model whose config has None for a size takes no such argument.
            if isinstance(shape, list) and None in [self._sizes.get(str(size), size) for size in shape]:
                continue
            names = [name]
            if guides:
                names.append(f"negative_{name}")
            for argument in names:
                if argument in self._parameters:
                    arguments[argument] = self._make_prompt(shape, call, make_unknown, is_mask="mask" in name)
        # A class refuses a text beside embeddings, and its default may be a text.
        arguments |= {name: None for name in self._parameters if f"{name}_embeds" in arguments}
        return arguments | {"num_inference_steps": 2, "output_type": "latent"}

    def _make_prompt(
        self, shape: Any, call: CallArguments, make_unknown: Callable[..., Tensor], *, is_mask: bool
    ) -> Any:
        rows = int(call.get("num_images_per_prompt") or call.get("num_videos_per_prompt") or 1)
        if isinstance(shape, int):
            return shape
        # The texts of all rows are one sequence, so each begins at a multiple of a text's length.
        if shape == "ends":
            return torch.arange(rows + 1, dtype=torch.int32) * self.count_text_tokens(call)
        if shape == "tags":
            return torch.ones(self.count_text_tokens(call), dtype=torch.long)
        if shape == "dtype":
            return torch.get_default_dtype()
        if shape == "words":
            return torch.ones(rows, self.count_text_tokens(call), dtype=torch.long)
        if isinstance(shape, str):
            picture = Image.new("RGB", (int(call["width"]), int(call["height"])))
            if shape == "picture":
                return picture
            return [picture] * int(call["num_frames"])
        if isinstance(shape[0], list):
            return [make_unknown(*self._read_shape(shape[0], call)) for _ in range(rows)]
        lengths = (rows, *self._read_shape(shape, call))
        if is_mask:
            return torch.ones(lengths, dtype=torch.bool)
        return make_unknown(*lengths)

    def _read_shape(self, shape: Sequence[str], call: CallArguments) -> list[int]:
        """Return the lengths that names stand for. Some are products or sums of names."""
        known = self._sizes | {"text": self.count_text_tokens(call)}
        lengths = []
        for terms in shape:
            length = 0
            for factors in terms.split("+"):
                length += math.prod(int(known.get(name, name)) for name in factors.split("*"))
            lengths.append(length)
        return lengths

    @cached_property
    def _sizes(self) -> dict[str, Any]:
        """Return sizes by name from the configs of the transformer and of what prepares text for it, and from the
        pipeline."""
        config = dict(self._hooks[0].transformer.config)  # type: ignore[arg-type]
        for part in ("connectors", "text_conditioner"):
            model = getattr(self.pipe, part, None)
            if model is not None:
                config |= {f"{part}.{name}": value for name, value in model.config.items()}
        own = {name: value for name, value in vars(self.pipe).items() if isinstance(value, int)}
        return own | config


def _describe_call(
    hooks: TransformerHooks, arguments: CallArguments, seen: Mapping[int, Mapping[str, Any]], out: Any
) -> RecordedCall:
    """Describe a call, from the arguments of its blocks in `seen`."""
    if not seen:
        raise ModelError(f"{type(hooks.transformer).__name__} called none of its blocks")
    first = min(seen)
    anatomy = hooks.chain[first].anatomy
    image = seen[first][anatomy.image]
    text = 0
    for hook in hooks.chain:
        stream = seen.get(hook.index, {}).get(hook.anatomy.text or "")
        if stream is not None:
            text = stream.shape[hook.anatomy.tokens]
            break
    image_tokens = image.shape[anatomy.tokens]
    # The parameter of the image may have the text too.
    if anatomy.joint != "none":
        image_tokens -= text
    rows = 1
    if not anatomy.has_no_batch:
        # Streams are `[B, tokens, C]` or `[tokens, B, C]`.
        rows = image.shape[1 - anatomy.tokens]
    return RecordedCall(
        arguments=arguments,
        rows=rows,
        image=image_tokens,
        text=text,
        channels=image.shape[-1],
        out=sum(leaf.numel() for leaf in list_tensors(out)),
    )


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Silence warnings of diffusers and transformers about the recorded call. It generates nothing."""
    with ExitStack() as stack:
        for logger in map(logging.getLogger, ("diffusers", "transformers")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def build_recorded_pipeline(
    locate: Callable[[str], Path | str], pipeline: Any, index: JsonObject, parts: Mapping[str, Any]
) -> Any:
    """Build a pipeline without weights, text encoders and their preprocessing.

    Args:
        locate: component -> the folder or hub id with its config.
        parts: its models that are made already.
    """
    parameters = inspect.signature(pipeline.__init__).parameters
    made = {name: parts.get(name) for name in list(parameters)[1:]}
    if "processor" in made and made["processor"] is None:
        made["processor"] = _Unread()
    for name, entry in index.items():
        if name not in parameters or parts.get(name) is not None:
            continue
        is_pair = isinstance(entry, list | tuple) and len(entry) == 2
        is_component = is_pair and isinstance(entry[0], str | None)
        if not is_component:
            made[name] = entry
        elif entry[0] not in (None, "transformers"):
            made[name] = _build_part(locate(name), name, *entry)
    needed = {}
    for name, part in made.items():
        if part is not None or parameters[name].default is inspect.Parameter.empty:
            needed[name] = part
    with silence_libraries():
        return pipeline(**needed)


def build_recorded_blocks(
    locate: Callable[[str], Path | str], pipeline: Any, index: JsonObject, parts: Mapping[str, Any]
) -> Any:
    """Build a modular pipeline without weights and without the blocks that encode a prompt.

    Args:
        locate, index, parts: as in `build_recorded_pipeline`.
        pipeline: the modular pipeline without components.
    """
    blocks = pipeline.blocks
    for name, block in list(blocks.sub_blocks.items()):
        libraries = {getattr(spec.type_hint, "__module__", "").partition(".")[0] for spec in block.expected_components}
        if "transformers" in libraries:
            blocks.sub_blocks.pop(name)
    recorded = blocks.init_pipeline()
    made = {}
    for name in recorded.pretrained_component_names:
        part = parts.get(name)
        if part is None and name in index:
            part = _build_part(locate(name), name, *index[name])
        if part is not None:
            made[name] = part
    recorded.update_components(**made)
    return recorded


class _Unread:
    """Stands for a processor, which some pipelines ask about their template when they are made."""

    def __getattr__(self, name: str) -> _Unread:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Unread:
        return self

    def __getitem__(self, key: Any) -> _Unread:
        return self

    def __len__(self) -> int:
        return 0


def load_component_config(cls: Any, source: Path | str, name: str) -> JsonObject:
    """Load the config of a component of diffusers. Raises `OSError` if there is none."""
    where, subfolder = name_component_source(source, name)
    config: JsonObject = cls.load_config(where, **subfolder)
    return config


def _build_part(source: Path | str, name: str, library: str, kind: str) -> Any:
    """Build a part of a pipeline by its config, or by the defaults of its class if there is none."""
    place = diffusers if library == "diffusers" else getattr(diffusers.pipelines, library)
    cls = getattr(place, kind, None) or getattr(diffusers, kind)
    is_model = issubclass(cls, nn.Module)
    try:
        config = load_component_config(cls, source, name)
    # Parts without a config, such as schedulers of old models, have the defaults of their class.
    except OSError:
        config = {}
    with init_on_meta_device() if is_model else nullcontext():
        return cls.from_config(config) if config else cls()
