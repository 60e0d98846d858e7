"""Published models with random weights: the configs that come with this package, for machines without checkpoints.

random-qwen-image                    20 B parameters, as Qwen-Image has them
random-wan2.1-t2v-1.3b blocks=2      the same widths with fewer blocks, to try it
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.modeling_utils import local_torch_dtype

from ditile.model.anatomies import build_block_hooks
from ditile.model.known import CONFIGS, find_known_model
from ditile.plan.errors import ModelError
from ditile.plan.option_classes import CallArguments
from ditile.planner.recording.configs import PipelineConfigs
from ditile.planner.recording.recorded import PipelineRecorder, build_recorded_pipeline, read_prompt_table
from ditile_lab.bench.options import RANDOM

MODELS = ("transformer", "transformer_2", "vae")
"""The models that get random weights; pipelines with others are refused."""
CONFIG_OF_WORD = {"blocks": "num_layers", "heads": "num_attention_heads"}
"""Word of a name -> its field in the config of a transformer."""


@dataclass(frozen=True)
class PublishedConfigs:
    """A published model, with other sizes of its transformer if its name gives them.

    Attributes:
        sizes: word -> number, such as ("blocks", 2).
    """

    model: str
    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def find_by_model_name(cls, text: str) -> PublishedConfigs | None:
        """Parse a name such as `random-qwen-image blocks=4`; return None if it names no published model.

        Raises:
            ModelError: if a size cannot be read, or the model cannot have random weights.
        """
        first, *words = text.split() or [""]
        known = find_known_model(first.removeprefix(RANDOM))
        if not first.startswith(RANDOM) or known is None or known.hub_id is None:
            return None
        sizes = {}
        for word in words:
            name, _, value = word.partition("=")
            if name not in CONFIG_OF_WORD or not value.isdecimal() or not int(value):
                raise ModelError(f"{word!r} of model {text!r}: write blocks=N or heads=N, with 1 or more")
            sizes[name] = int(value)
        published = cls(known.name, tuple(sizes.items()))
        published.read_configs()
        return published

    def __str__(self) -> str:
        sizes = [f"{name}={value}" for name, value in self.sizes]
        return " ".join([RANDOM + self.model, *sizes])

    def read_configs(self) -> PipelineConfigs:
        """Read the model's configs, with the sizes of the name.

        Raises:
            ModelError: if the config has no such size, or the pipeline has models that cannot get random weights.
        """
        configs = PipelineConfigs.read_source(CONFIGS / self.model)
        if configs.pipeline.__name__ not in read_prompt_table():
            raise ModelError(f"model {str(self)!r}: nothing says what {configs.pipeline.__name__} takes for a prompt")
        for name, entry in configs.index.items():
            is_model = isinstance(entry, list) and entry[0] is not None and name != "scheduler"
            if is_model and name not in MODELS:
                raise ModelError(f"model {str(self)!r}: its {name} gets no random weights; try random-qwen-image")
        transformer = dict(configs.transformer)
        for name, value in self.sizes:
            if CONFIG_OF_WORD[name] not in transformer or "num_single_layers" in transformer:
                raise ModelError(f"model {str(self)!r}: {name} of this model is not one number; leave it out")
            transformer[CONFIG_OF_WORD[name]] = value
        return replace(configs, transformer=transformer)

    def create_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Create the pipeline without text encoders, with the same weights on every rank.

        Args:
            device: where the weights are created.
        """
        configs = self.read_configs()
        torch.manual_seed(0)
        with device, local_torch_dtype(dtype):
            parts = {
                "transformer": configs.kind.from_config(configs.transformer).eval(),
                "vae": configs.coder.from_config(configs.vae).eval(),
            }
            if configs.second is not None:
                parts[configs.second] = configs.kind.from_config(configs.transformer).eval()
        pipe = build_recorded_pipeline(configs.locate_component, configs.pipeline, configs.index, parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe.to(device)


def make_random_arguments(pipe: Any, call: CallArguments, dtype: torch.dtype, device: torch.device) -> CallArguments:
    """Make the arguments of a call with random embeddings in place of its prompts, always the same."""
    generator = torch.Generator().manual_seed(1)

    def make_embeddings(*lengths: int) -> torch.Tensor:
        return torch.randn(lengths, generator=generator).to(device, dtype)

    recorder = PipelineRecorder(pipe, build_block_hooks(pipe.transformer))
    arguments = recorder.make_arguments(call, make_embeddings)
    for name, value in arguments.items():
        # Masks are made on the CPU and have to be moved.
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(device)
    return arguments | {"generator": torch.Generator().manual_seed(0)}
