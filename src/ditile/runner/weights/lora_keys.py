"""The keys of a LoRA: those loaded by this rank, and those without a layer in the pipeline.

diffusers converts the names of kohya, ComfyUI and other trainers to its own, and silently drops the rest: layers
missing in the model, components missing in the pipeline, unknown kinds of factors. Those keys are named in the log, and
a LoRA without any other keys is refused. All ranks find the same keys, even with different blocks, because layers of
other ranks are looked up in the model's structure.

diffusers finds the config of an adapter (its default alpha and rank, those of other layers, DoRA, biases) from all
keys that it gets. A rank gives it the keys of its own blocks, so the config is found from the whole file here, by the
same functions, and handed over as if the file had said it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.utils import peft_utils
from diffusers.utils.state_dict_utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ditile.model.hooks.compile import unwrap_compiled
from ditile.model.hooks.placeholders import build_meta_model, is_placeholder
from ditile.parallel.tensor.cuts import unwrap_lora_base
from ditile.parallel.tensor.sharding import ShardedTransformer
from ditile.plan.errors import ModelError

LOG = logging.getLogger(__name__)
LoraState = dict[str, Any]
"""Key of a LoRA -> its tensor or number."""
NUM_NAMED = 3
"""The most keys that a message names; it only counts the others."""
PEFT_FACTORS = {".lora_A.": ".lora_down.", ".lora_B.": ".lora_up."}
"""Parts of keys: peft's name -> kohya's name."""
NEVER_APPLIED = (".dora_scale", ".diff", ".w_norm", ".b_norm", ".set_weight", "hada_w1_a", "hada_w1_b")
"""Ends of keys that are not LoRA factors. The converters of diffusers leave them out."""
CONTROL_DEPTH = 3
"""Dots in the key of a layer outside of the blocks, such as `transformer.x_embedder.lora_A.weight`."""
TEXT_PREFIXES = ("lora_te", "text_encoder")
"""Beginnings of keys of text encoders, as trainers write them."""
TEXT_LAYERS = (".q_proj", ".k_proj", ".v_proj", ".out_proj", ".fc1", ".fc2")
"""Layers of text encoders inspected by diffusers for their ranks."""
FUSED = ("to_qkv", "to_added_qkv")
"""Layers that an attention has while its projections are fused."""


class NothingHereError(Exception):
    """All modules of a LoRA are on other ranks. Raised to end the loading, as pipelines refuse an empty state dict."""


class LoraKeyFilter:
    """Stands in for a pipeline's `lora_state_dict`, and removes keys for which this rank or all ranks have no use.

    If this rank holds a share of a layer, the factors for that layer are cut in the same way.

    Attributes:
        configs: component -> the config of its adapter in the whole file.
        kept, dropped: components with keys for this rank, and components with keys for other ranks.

    Args:
        pipe: the pipeline.
        parts: its modules, by the names of their components.
        shares: this rank's shares of the components with divided weights.
        label: names the LoRA in messages.
    """

    def __init__(
        self, pipe: Any, parts: dict[str, nn.Module], shares: Mapping[str, ShardedTransformer], label: str
    ) -> None:
        self._read = pipe.lora_state_dict
        self._pipeline = type(pipe).__name__
        # Such a pipeline joins an image for control to its latents. A ControlNet is another model.
        self._takes_control = "Control" in self._pipeline and "controlnet" not in pipe.components
        self._parts = parts
        self._shares = shares
        self._label = label
        self.configs: dict[str, Any] = {}
        self._whole_parts: dict[str, nn.Module] = {}
        self.kept: set[str] = set()
        self.dropped: set[str] = set()

    def filter_state_dict(self, source: Any, **kwargs: Any) -> Any:
        """Return the result of the pipeline's `lora_state_dict` without keys that are of no use on this rank.

        Raises:
            ModelError: if nothing of the pipeline takes any of the keys.
            NothingHereError: if all keys that are taken belong to other ranks.
        """
        file_keys = _list_file_keys(source, kwargs.get("weight_name"))
        loaded_state = self._read(source, **kwargs)
        applied = self._select_applied_keys(loaded_state)
        has_comfy_names = any(
            key.startswith("diffusion_model.") and any(part in key for part in PEFT_FACTORS) for key in file_keys
        )
        if not applied and has_comfy_names:
            # The converter of FLUX.1 knows ComfyUI's names only together with kohya's factors.
            loaded_state = self._read(_read_with_kohya_factors(source, kwargs.get("weight_name")), **kwargs)
            applied = self._select_applied_keys(loaded_state)
        # Loaders ask for the metadata of the file, which comes last; some pipelines have alphas before it.
        state, *alphas, metadata = loaded_state
        self._report_unapplied_keys(file_keys, state, applied)
        for values in alphas:
            self._check_alphas(values or {})
        for component in {key.partition(".")[0] for key in applied}:
            self._check_layers_are_alike(_strip_component(component, applied))
            # diffusers' config for LoRAs also counts the keys without a layer.
            counted = applied if any(".lokr_" in key for key in applied) else state
            self.configs[component] = self._find_config(component, counted, alphas, metadata)
        local = {}
        for key, value in applied.items():
            component, _, name = key.partition(".")
            part = self._parts.get(component)
            if part is not None and is_placeholder(_follow_key(part, name)[0]):
                self.dropped.add(component)
                continue
            self.kept.add(component)
            share = self._shares.get(component)
            local[key] = value if share is None else share.cut_lora_factor(name, value)
        if not local:
            raise NothingHereError
        metadata = {}
        for component, config in self.configs.items():
            metadata |= {f"{component}.{name}": value for name, value in config.to_dict().items()}
        # The alphas are empty here because the configs have them already.
        return local, *({} for _ in alphas), metadata

    def _select_applied_keys(self, loaded_state: Any) -> LoraState:
        state: LoraState = loaded_state[0]
        return {key: value for key, value in state.items() if self._is_applied(key, state)}

    def _is_applied(self, key: str, state: LoraState) -> bool:
        """Return whether a key leads to a layer of the pipeline on any rank. One factor without the other does not
        count.

        Raises:
            ModelError: if it does, and the layer cannot take its value.
        """
        component, _, name = key.partition(".")
        whole = self._find_whole_part(component)
        if whole is None or _swap_factor(key) not in state:
            return False
        module, rest = _follow_key(whole, name)
        if is_placeholder(module):
            # The structure of a text encoder on another rank is not known here.
            return True
        # Old files have the factors in the processors of layers.
        if rest[:1] == ["processor"]:
            return True
        layer = unwrap_lora_base(module)
        if rest and rest[0] in FUSED and hasattr(whole, "fuse_qkv_projections"):
            raise ModelError(
                f"lora={self._label!r} changes {name}, which is there while projections are fused; call "
                f"pipe.{component}.fuse_qkv_projections() before it is divided"
            )
        # Some LoRAs replace norms too, with keys that end in the name of a parameter.
        if not hasattr(layer, "weight") or not rest:
            return False
        if len(rest) > 1 and not _names_factor(rest[0]):
            return False
        problem = self._find_problem(key, state, layer)
        if problem:
            raise ModelError(
                f"lora={self._label!r} cannot be loaded: {key} {problem}; take one that was trained for this model"
            )
        return True

    def _find_problem(self, key: str, state: LoraState, layer: Any) -> str:
        """Return why a layer cannot take a value of a LoRA; empty if it can."""
        value = state[key]
        shape = list(value.shape)
        if not _names_factor(key):
            parameter = getattr(layer, key.rpartition(".")[2], None)
            if not isinstance(parameter, nn.Parameter):
                return ""
            # diffusers overwrites it, for the calls without this LoRA too. Pipelines for control keep the old norms.
            if not self._takes_control:
                return "replaces a weight of the model, which no scale reaches and which would stay for other calls"
            if shape != list(parameter.shape):
                return f"of shape {shape} does not fit a weight of shape {list(parameter.shape)}"
            return ""
        if not value.is_floating_point():
            return f"has numbers of {value.dtype}, and factors are floating-point numbers"
        if not is_finite(value):
            return "has numbers that are not finite"
        if not isinstance(layer, nn.Linear):
            return ""
        if key.endswith(".lora_B.bias") and shape != [layer.out_features]:
            return f"of shape {shape} does not fit a layer of {layer.out_features} outputs"
        if ".lora_A." not in key:
            return ""
        inputs = layer.in_features
        # diffusers makes the first Linear of a transformer wider for a LoRA with an image for control. It stays so.
        if key.count(".") == CONTROL_DEPTH and self._takes_control:
            inputs = shape[-1]
        up = list(state[_swap_factor(key)].shape)
        if shape[1:] != [inputs] or up[:1] != [layer.out_features]:
            return (
                f"of shape {shape} does not fit a layer of {layer.in_features} inputs and {layer.out_features} outputs"
            )
        if up[1:] != shape[:1]:
            return f"of shape {shape} does not fit .lora_B.weight of shape {up}"
        return ""

    def _check_alphas(self, values: LoraState) -> None:
        """Check that each alpha is one finite number. Raises `ModelError` otherwise."""
        for key, value in values.items():
            if not key.endswith(".alpha"):
                continue
            alpha = torch.as_tensor(value)
            if alpha.numel() != 1 or not is_finite(alpha):
                raise ModelError(
                    f"lora={self._label!r} cannot be loaded: {key} is {alpha.flatten()[:3].tolist()}, and an alpha is "
                    "one finite number; take a file that is whole"
                )

    def _find_config(self, component: str, state: LoraState, alphas: Sequence[Any], metadata: LoraState | None) -> Any:
        """Return diffusers' config for the adapter of a whole component.

        Args:
            component: its name.
            state: the keys of the file that count, in diffusers' form.
            alphas: at most one table of key -> alpha.
            metadata: the configs of all components in the file.

        Raises:
            ModelError: if nothing is a factor, or this rank holds shares of layers and the adapter is DoRA or LoKr.
        """
        part = self._parts[component]
        factors = {}
        for key, value in _strip_component(component, state).items():
            # A control LoRA has norms too, which diffusers takes out first.
            if _names_factor(key):
                factors[key] = value
        if not factors:
            # LoHa, IA3 and others, which diffusers does not load either.
            named = ", ".join(sorted(state)[:NUM_NAMED])
            raise ModelError(f"lora={self._label!r} has no LoRA or LoKr factors for the {component}: {named}")
        own_alphas: LoraState = {}
        for table in alphas:
            own_alphas |= _strip_component(component, table or {})
        own_metadata = None if metadata is None else _strip_component(component, metadata)
        if own_alphas and own_metadata:
            raise ModelError(
                f"lora={self._label!r} has alphas in its metadata and in tensors; diffusers takes only one of them"
            )
        if any(".lokr_" in key for key in factors):
            config = peft_utils._create_lokr_config(factors, own_metadata)
        else:
            is_text = not isinstance(unwrap_compiled(part), ModelMixin)
            factors, ranks = _measure_ranks(part, factors, is_text=is_text)
            config = peft_utils._create_lora_config(factors, own_alphas, own_metadata, ranks, is_unet=not is_text)
        is_lora = config.peft_type == "LORA"
        if component in self._shares and (not is_lora or config.use_dora):
            raise ModelError(
                f"lora={self._label!r} is a {'DoRA' if is_lora else config.peft_type.value}, and tensor parallelism "
                "cuts plain LoRAs only; fuse it into the weights before parallelize"
            )
        return config

    def _check_layers_are_alike(self, factors: LoraState) -> None:
        """Raise `ModelError` if a layer lacks a bias or a magnitude and others have it. peft would leave it empty."""
        layers = {key.removesuffix(".lora_B.weight") for key in factors if key.endswith(".lora_B.weight")}
        for leaf in (".lora_B.bias", ".lora_magnitude_vector"):
            having = {key.partition(leaf)[0] for key in factors if leaf in key}
            lacking = layers - having
            if having and lacking:
                raise ModelError(
                    f"lora={self._label!r} has {leaf[1:]} in {len(having)} layers, and {min(lacking)} lacks it; take "
                    "a file whose layers are alike"
                )

    def _find_whole_part(self, component: str) -> nn.Module | None:
        """Return the structure of a component with the blocks of all ranks; None if the pipeline does not have it."""
        if component not in self._whole_parts and component in self._parts:
            whole = unwrap_compiled(self._parts[component])
            is_divided = component in self._shares or any(map(is_placeholder, whole.modules()))
            if is_divided and isinstance(whole, ModelMixin):
                whole = build_meta_model(whole)
            self._whole_parts[component] = whole
        return self._whole_parts.get(component)

    def _report_unapplied_keys(self, file_keys: Sequence[str], state: LoraState, applied: LoraState) -> None:
        """Log the keys without a layer to take them. Raises `ModelError` if no key has a layer."""
        if not applied:
            raise ModelError(
                f"lora={self._label!r} changes nothing of this {self._pipeline}: no layer takes its "
                f"{_name_keys(file_keys or [*state])}; take one that was trained for this model"
            )
        unapplied = sorted(state.keys() - applied.keys())
        # A converter drops some keys of the file and renames others, so the dropped ones are told by their kind: keys
        # of text encoders if no such key is left, and keys of T5 always.
        has_text = any(key.startswith(TEXT_PREFIXES) for key in state)
        has_bias = any(key.endswith(".lora_B.bias") for key in state)
        for key in file_keys:
            is_text = key.startswith(TEXT_PREFIXES) and (not has_text or "t5xxl" in key)
            is_bias = key.endswith(".diff_b") and not has_bias
            if key not in state and (is_text or is_bias or key.endswith(NEVER_APPLIED)):
                unapplied.append(key)
        if unapplied:
            LOG.warning(
                "lora=%r is applied in part: nothing of this %s takes its %s",
                self._label,
                self._pipeline,
                _name_keys(unapplied),
            )


def _strip_component(component: str, values: LoraState) -> LoraState:
    """Return a component's part of a table, without its name."""
    prefix = f"{component}."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _measure_ranks(part: nn.Module, factors: LoraState, *, is_text: bool) -> tuple[LoraState, dict[str, int]]:
    """Return factors under peft's names, and the rank of each layer by the rule of diffusers' loaders."""
    ranks = {}
    if is_text:
        factors = convert_state_dict_to_peft(convert_state_dict_to_diffusers(factors))
        if not hasattr(part, "text_model"):
            factors = {key.removeprefix("text_model."): value for key, value in factors.items()}
        for key, value in factors.items():
            layer, is_up, _ = key.partition(".lora_B.weight")
            if is_up and layer.endswith(TEXT_LAYERS):
                ranks[key] = value.shape[1]
        return factors, ranks
    if "lora_A" not in next(iter(factors)):
        factors = convert_unet_state_dict_to_peft(factors)
    for key, value in factors.items():
        # Biases have one dimension. After ^ peft takes the key for the whole name of a layer, not for its end.
        if "lora_B" in key and value.ndim > 1:
            ranks[f"^{key}"] = value.shape[1]
    return factors, ranks


def _follow_key(part: nn.Module, name: str) -> tuple[nn.Module, list[str]]:
    """Return the module at a key, and the names after it; a placeholder if one is on the way."""
    module = part
    path = name.split(".")
    # In most LoRAs the names of CLIP's layers begin with `text_model`. Some versions of transformers have no such
    # module, and diffusers then removes it from the names.
    if path[0] == "text_model" and "text_model" not in module._modules:
        del path[0]
    while path and path[0] in module._modules:
        # A layer with an earlier LoRA keeps its factors in modules.
        if _names_factor(path[0]) or is_placeholder(module):
            break
        following = module._modules[path.pop(0)]
        assert following is not None
        module = following
    return module, path


def _names_factor(name: str) -> bool:
    return "lora" in name or "lokr" in name


def _swap_factor(key: str) -> str:
    """Return the key of the same layer's other factor; the key itself if it is not one of two factors."""
    for one, other in ((".lora_A.", ".lora_B."), (".lora_B.", ".lora_A.")):
        # Only the second factor may have a bias.
        if one in key and key.endswith(".weight"):
            return key.replace(one, other)
    return key


def is_finite(numbers: Tensor) -> bool:
    """Return whether all numbers are finite. torch cannot tell in fp8, so they are converted."""
    return bool(numbers.float().isfinite().all())


def _list_file_keys(source: Any, weight_name: str | None) -> list[str]:
    """List the keys of a file or a state dict under its trainer's names; none if diffusers chooses the file."""
    if isinstance(source, Mapping):
        return list(source)
    path = Path(source, weight_name or "")
    if not path.is_file():
        return []
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _read_with_kohya_factors(source: Any, weight_name: str | None) -> dict[str, Tensor]:
    state = source
    if not isinstance(source, Mapping):
        state = load_file(Path(source, weight_name or ""))
    renamed = {}
    for key, value in state.items():
        for part, instead in PEFT_FACTORS.items():
            key = key.replace(part, instead)
        renamed[key] = value
    return renamed


def _name_keys(keys: Sequence[str]) -> str:
    """Format the number of keys, and the first of them."""
    named = ", ".join(keys[:NUM_NAMED])
    more = ", .." if len(keys) > NUM_NAMED else ""
    return f"{len(keys)} keys ({named}{more})"
