"""Reads the parts of a pipeline from a folder or hub id: only configs, to make models without weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import transformers
from torch import nn

from ditile.model.anatomies import build_block_hooks
from ditile.model.hooks.placeholders import build_meta_model, init_on_meta_device
from ditile.model.known import name_component_source
from ditile.plan.errors import LoadError, ModelError, join_error_lines
from ditile.plan.option_classes import JsonObject
from ditile.plan.shape import CallFamily
from ditile.planner.recording.recorded import (
    PipelineRecorder,
    build_recorded_blocks,
    build_recorded_pipeline,
    load_component_config,
    read_prompt_table,
)
from ditile.runner.load import (
    find_pipeline_kind,
    match_component_files,
    read_model_index,
)
from ditile.runner.model_files import (
    MODULAR_MARK,
    ComponentFiles,
    ModelSource,
    check_config_counts,
    list_own_components,
    read_json_object,
)
from ditile.runner.weights.prequantized import StoredWeights

FACTS = "facts.json"
"""Facts that are not in the configs of a published model."""
SECOND = ("transformer_2", "transformer_ref")
"""Names of a second transformer. Each rank has its part of both."""
TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")


@dataclass(frozen=True, slots=True)
class PipelineConfigs:
    """The configs of a pipeline in a folder or hub id.

    Attributes:
        pipeline: the class whose calls are planned.
        kind, transformer: the class of its transformer, and its config.
        coder, vae: the class of its VAE, and its config.
        places: component -> its folder or hub id, if that is not the pipeline's.
        stored: transformer -> the format of its weights, if they are in a file of its own or quantized.
    """

    source: ModelSource
    pipeline: Any
    index: JsonObject
    kind: Any
    transformer: JsonObject
    coder: Any
    vae: JsonObject
    places: Mapping[str, ModelSource] = field(default_factory=dict)
    stored: Mapping[str, StoredWeights] = field(default_factory=dict)

    @classmethod
    def read_source(cls, source: ModelSource, components: ComponentFiles | None = None) -> PipelineConfigs:
        """Read the configs of a pipeline, and no weights.

        Args:
            source: the folder or hub id.
            components: component -> the file with its weights; by default they are the pipeline's own.

        Raises:
            LoadError: if they cannot be read, or a file does not fit.
            ModelError: if there is no transformer.
        """
        files = components or {}
        index = read_model_index(source)
        places = dict[str, ModelSource]()
        # A modular pipeline says in an index of its own where its parts are.
        if MODULAR_MARK in index:
            index, places = _read_modular_index(source, index)
        try:
            pipeline = getattr(diffusers, index["_class_name"])
            name = index.get("transformer", (None, None))[1]
            if name is None:
                raise ModelError(f"{pipeline.__name__} has no transformer, so it cannot be cut into stages")
            kind = getattr(diffusers, name)
            encoders = _list_unlisted_encoders(pipeline, index)
            stored, config = match_component_files(source, files, encoders)
            if config is None:
                transformer = load_component_config(kind, places.get("transformer", source), "transformer")
            else:
                transformer = read_json_object(config)
            vae = load_component_config(diffusers.AutoencoderKL, places.get("vae", source), "vae")
        except (OSError, KeyError, AttributeError, TypeError) as error:
            raise LoadError(f"the configs of {str(source)!r} cannot be read: {join_error_lines(error)}") from error
        # A count in a broken config could ask for a model that no memory holds.
        check_config_counts(transformer, f"the config of transformer in {source}")
        check_config_counts(vae, f"the config of vae in {source}")
        coder = getattr(diffusers, index.get("vae", ("", "AutoencoderKL"))[1])
        return cls(source, pipeline, index, kind, transformer, coder, vae, places, stored)

    def is_recorded(self, family: CallFamily | None) -> bool:
        """Return whether a call must be recorded to know its shape. A family knows it for its own pipelines."""
        if family is None:
            return True
        name = self.pipeline.__name__
        return name not in family.pipelines and name in read_prompt_table()

    @property
    def second(self) -> str | None:
        """Return the name of a second transformer, which is called in turns with the first, or in its place."""
        for name in SECOND:
            if (self.index.get(name) or [None])[0] is not None:
                return name
        return None

    @property
    def _encoder_names(self) -> dict[str, str]:
        """Return the class name of each text encoder."""
        names = {}
        for name in TEXT:
            entry = self.index.get(name)
            # An encoder missing in the pipeline may be a pair of nulls in the index.
            if entry and entry[0]:
                names[name] = entry[1]
        return names

    @property
    def encoders(self) -> tuple[Any, ...]:
        """Return the classes of the text encoders; None for classes unknown here.

        If the index does not name them, as in the configs of this package, they are found in the pipeline's own code.
        """
        names = [*self._encoder_names.values()]
        for _, name in _list_unlisted_encoders(self.pipeline, self.index).values():
            names.append(name)
        return tuple(getattr(transformers, name, None) for name in names)

    def build_transformer(self) -> nn.Module:
        """Build the transformer without weights."""
        with init_on_meta_device():
            return self.kind.from_config(self.transformer)  # type: ignore[no-any-return]

    def make_recorder(self, transformer: nn.Module) -> PipelineRecorder:
        """Make a recorder for calls of a pipeline built from this transformer and other models without weights."""
        with init_on_meta_device():
            parts = {"transformer": transformer, "vae": self.coder.from_config(self.vae)}
            if self.second is not None:
                # Both checkpoints of such a pipeline have one architecture.
                parts[self.second] = build_meta_model(transformer)
        if MODULAR_MARK in self.index:
            pipe = build_recorded_blocks(self.locate_component, find_pipeline_kind(self.source), self.index, parts)
        else:
            pipe = build_recorded_pipeline(self.locate_component, self.pipeline, self.index, parts)
        # A step calls all of them but the VAE.
        return PipelineRecorder(pipe, *[build_block_hooks(part) for name, part in parts.items() if name != "vae"])

    def locate_component(self, name: str) -> ModelSource:
        """Return the folder or hub id of a component."""
        return self.places.get(name, self.source)

    def count_other_parts(self) -> tuple[int, int, tuple[str, ...], float | None]:
        """Read the parameters of other parts from a file, or count them on models made from configs.

        Returns:
            Parameters of the text encoders and of the VAE, and `uncounted` and `decodes` of `PlanSubject`.
        """
        # Published models come without the configs of their text encoders.
        facts = Path(self.source, FACTS)
        if facts.exists():
            counts = read_json_object(facts)
            decoded = counts.get("decoded_numbers")
            return counts["text_parameters"], counts["vae_parameters"], (), decoded
        text = 0
        uncounted = []
        for name, kind in self._encoder_names.items():
            source = self.locate_component(name)
            encoder: Any = getattr(transformers, kind, None)
            config = None
            if encoder is not None:
                with suppress(OSError):
                    where, subfolder = name_component_source(source, name)
                    config = encoder.config_class.from_pretrained(where, **subfolder)
            if config is None:
                uncounted.append(name)
                continue
            check_config_counts(config.to_dict(), f"the config of {name} in {source}")
            with init_on_meta_device():
                text += _count_module_parameters(encoder(config))
        with init_on_meta_device():
            coder = _count_module_parameters(self.coder.from_config(self.vae))
        return text, coder, tuple(uncounted), None


def _list_unlisted_encoders(pipeline: Any, index: JsonObject) -> dict[str, list[str]]:
    """List the text encoders that a pipeline's class takes and its index lacks, as in this package's configs."""
    parameters = inspect.signature(pipeline.__init__).parameters
    encoders = {}
    for name in TEXT:
        if name in parameters and name not in index:
            annotation = parameters[name].annotation
            # The annotation may be a union of several classes.
            encoders[name] = ["transformers", getattr(annotation, "__name__", str(annotation))]
    return encoders


def _read_modular_index(source: ModelSource, index: JsonObject) -> tuple[JsonObject, dict[str, ModelSource]]:
    """Return the index to plan for in place of a modular pipeline's, and the locations of its components.

    It is that of the ordinary pipeline with the same transformer, or the modular one's if diffusers has no such class.

    Raises:
        ModelError: if its calls cannot be recorded either.
    """
    own = index["_class_name"]
    values: JsonObject = {"_class_name": own.replace("Modular", "")}
    if not hasattr(diffusers, values["_class_name"]):
        if own not in read_prompt_table():
            raise ModelError(f"model {str(source)!r} is of {own}, whose calls are not planned for; give the degrees")
        values = {"_class_name": own, MODULAR_MARK: index[MODULAR_MARK]}
    parts = {part: [*entry] for part, entry in list_own_components(source, index)}
    places = dict[str, ModelSource]()
    for part, entry in index.items():
        has_place = isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)
        if part not in parts and has_place:
            where = entry[2].get("pretrained_model_name_or_path")
            if where is not None and entry[2].get("subfolder") == part:
                parts[part] = entry[2].get("type_hint") or entry[:2]
                places[part] = Path(where) if Path(where).exists() else where
    return values | parts, places


def _count_module_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
