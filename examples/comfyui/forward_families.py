"""What ComfyUI gives to its own transformer, in the arguments of diffusers' class of the same model, and back.

The two define the same function of the same weights, with other layouts: ComfyUI hands over latents, diffusers takes
packed tokens, ids of their positions, other scales of the time and another sign. A family is two functions of a few
lines. Whatever has no place among the arguments is refused by `check_call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

# Wan's processors of diffusers take the last 512 tokens for the text, and those before for the image.
WAN_TEXT_TOKENS = 512
# What models get from ComfyUI whether they use it or not. The mask of denoising is in the timestep already.
UNUSED = frozenset({"crossattn_controlnet", "denoise_mask"})
# Entries of `transformer_options` that change what happens inside of the transformer.
INNER_OPTIONS = ("patches", "patches_replace", "rope_options", "optimized_attention_override")
# Parts of LTX-2 that they can switch off.
INNER_SWITCHES = ("run_vx", "run_ax", "a2v_cross_attn", "v2a_cross_attn")


class FamilyError(ValueError):
    """A model or a call that cannot be handed over; the text says why."""


@dataclass(frozen=True)
class Call:
    """One call of ComfyUI.

    Attributes:
        x: noisy latents, with further channels behind them where the model has such [B, C, ..., H, W]; LTX-2: a list of
            those of the picture and those of the sound.
        timestep: as the model's sampling scales it [B], or one for each frame [B, T]; LTX-2: one such for each of both.
        context: of the text [B, L, D].
        extra: whatever ComfyUI adds, without None.
        config: of diffusers' class.
    """

    x: Any
    timestep: Any
    context: torch.Tensor
    extra: Mapping[str, Any]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """How one architecture is called.

    Attributes:
        describe: diffusers' config -> the part of ComfyUI's that its own detection and conditions read.
        encode: a call -> arguments of diffusers' forward.
        decode: diffusers' prediction, and the call -> ComfyUI's prediction.
        handled: names in `Call.extra` that `encode` uses, or that have no effect on this model.
    """

    describe: Callable[[Mapping[str, Any]], dict[str, Any]]
    encode: Callable[[Call], dict[str, Any]]
    decode: Callable[[Any, Call], Any]
    handled: frozenset[str] = frozenset()


def find_family(model: str) -> Family:
    """Return the family of a diffusers class.

    Raises:
        FamilyError: if there is none.
    """
    if model not in FAMILIES:
        raise FamilyError(f"{model} has no adapter for ComfyUI; there are {', '.join(FAMILIES)}")
    return FAMILIES[model]


def check_call(family: Family, extra: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check that nothing of a call is lost on its way.

    Raises:
        FamilyError: if a condition or a patch would have no effect.
    """
    for name in INNER_OPTIONS:
        if options.get(name):
            entries = options[name]
            names = ", ".join(map(str, entries)) if isinstance(entries, Mapping) else type(entries).__name__
            raise FamilyError(
                f"{name} ({names}) changes the inside of a transformer that runs elsewhere; remove its node"
            )
    for name in INNER_SWITCHES:
        if options.get(name) is False:
            raise FamilyError(f"{name} switches off a part of a transformer that runs elsewhere; remove its node")
    for name, value in extra.items():
        if value is not None and name not in family.handled and name not in UNUSED:
            what = "a ControlNet" if name == "control" else repr(name)
            raise FamilyError(f"{what} cannot be handed to the transformer of ditile; remove the node that sets it")


def pad_to_patches(x: torch.Tensor, size: int = 2) -> torch.Tensor:
    """Return latents that whole patches cover; rows and columns of the other side are added, as ComfyUI does."""
    height, width = x.shape[-2:]
    missing = (0, -width % size, 0, -height % size)
    if not any(missing):
        return x
    flat = x.reshape(-1, 1, height, width)
    padded = functional.pad(flat, missing, mode="circular")
    return padded.reshape(*x.shape[:-2], *padded.shape[-2:])


def pack_patches(x: torch.Tensor) -> torch.Tensor:
    """Return the 2x2 patches of latents as tokens [B, C, H, W] -> [B, H/2 * W/2, C * 4]."""
    batch, channels, height, width = x.shape
    patches = x.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height // 2 * (width // 2), channels * 4)


def unpack_patches(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the latents of 2x2 patches, cut to their size before padding."""
    rows, columns = -(-height // 2), -(-width // 2)
    patches = tokens[:, : rows * columns].reshape(tokens.shape[0], rows, columns, -1, 2, 2)
    x = patches.permute(0, 3, 1, 4, 2, 5).reshape(tokens.shape[0], -1, rows * 2, columns * 2)
    return x[..., :height, :width]


def number_positions(index: float, rows: int, columns: int, top: int = 0, left: int = 0) -> torch.Tensor:
    """Return (index, row, column) of each token of an image [rows * columns, 3]."""
    ids = torch.zeros(rows, columns, 3)
    ids[..., 0] = index
    ids[..., 1] = (top + torch.arange(rows))[:, None]
    ids[..., 2] = (left + torch.arange(columns))[None, :]
    return ids.reshape(-1, 3)


def require_method(call: Call, *methods: str) -> str:
    """Return how reference images are placed: the first method, unless the call names another one of them.

    Raises:
        FamilyError: if it names one that the model has not.
    """
    method = call.extra.get("ref_latents_method", methods[0])
    if method not in methods:
        raise FamilyError(f"reference latents method {method!r} cannot be handed over; try {' or '.join(methods)}")
    return str(method)


# FLUX.1: dev, schnell, Kontext, Fill, Canny, Depth.


def describe_flux(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ComfyUI's config of a FLUX.1 model."""
    return {
        "image_model": "flux",
        "guidance_embed": bool(config["guidance_embeds"]),
        "in_channels": config["in_channels"] // 4,
        "out_channels": (config.get("out_channels") or config["in_channels"]) // 4,
        "patch_size": 2,
    }


def encode_flux(call: Call) -> dict[str, Any]:
    """Return the arguments of `FluxTransformer2DModel`.

    Raises:
        FamilyError: if a model of distilled guidance gets none.
    """
    x = pad_to_patches(call.x)
    tokens = [pack_patches(x)]
    ids = [number_positions(0, x.shape[-2] // 2, x.shape[-1] // 2)]
    for reference, index, top, left in place_references(call):
        padded = pad_to_patches(reference)
        tokens.append(pack_patches(padded))
        ids.append(
            number_positions(index, padded.shape[-2] // 2, padded.shape[-1] // 2, (top + 1) // 2, (left + 1) // 2)
        )
    width = call.config["pooled_projection_dim"]
    pooled = call.extra.get("y")
    if pooled is None:
        pooled = x.new_zeros(x.shape[0], width)
    arguments = {
        "hidden_states": torch.cat(tokens, dim=1),
        "encoder_hidden_states": call.context,
        "pooled_projections": pooled[:, :width],
        "timestep": call.timestep,
        "img_ids": torch.cat(ids),
        "txt_ids": torch.zeros(call.context.shape[1], 3),
    }
    return arguments | take_guidance(call)


def take_guidance(call: Call) -> dict[str, Any]:
    """Return the argument of distilled guidance, for models that have it.

    Raises:
        FamilyError: if such a model gets none.
    """
    if not call.config["guidance_embeds"]:
        return {}
    if call.extra.get("guidance") is None:
        raise FamilyError("this model needs a guidance; remove FluxDisableGuidance or add FluxGuidance")
    return {"guidance": call.extra["guidance"]}


def place_references(call: Call) -> Iterator[tuple[torch.Tensor, int, int, int]]:
    """Yield each reference image of FLUX.1 with its index, and its first row and column of latents.

    By "offset" all have index 1 and lie beside or below those before, whichever keeps the whole nearer to a square;
    by "index" they count up, each at the origin.
    """
    method = require_method(call, "offset", "index")
    height = width = 0
    for number, reference in enumerate(call.extra.get("ref_latents", ()), 1):
        if method == "index":
            yield reference, number, 0, 0
            continue
        rows, columns = reference.shape[-2:]
        top = left = 0
        if rows + height > columns + width:
            left = width
        else:
            top = height
        height = max(height, rows + top)
        width = max(width, columns + left)
        yield reference, 1, top, left


def decode_patches(output: Any, call: Call) -> torch.Tensor:
    """Return the latents of predicted tokens; those of reference images come last and are left out."""
    return unpack_patches(output, *call.x.shape[-2:])


# FLUX.2: dev, klein.


def describe_flux2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ComfyUI's config of a FLUX.2 model."""
    channels = config["in_channels"]
    return {"image_model": "flux2", "in_channels": channels, "out_channels": channels, "patch_size": 1}


def encode_flux2(call: Call) -> dict[str, Any]:
    """Return the arguments of `Flux2Transformer2DModel`: a token is a place of the latents, ids have four axes."""
    require_method(call, "index")
    images = [call.x, *call.extra.get("ref_latents", ())]
    # Reference images are 10, 20, .. apart from the image in the first axis.
    ids = [number_positions(10 * index, *image.shape[-2:]) for index, image in enumerate(images)]
    img_ids = functional.pad(torch.cat(ids), (0, 1)).long()
    txt_ids = torch.zeros(call.context.shape[1], 4, dtype=torch.long)
    txt_ids[:, 3] = torch.arange(call.context.shape[1])
    batch = call.x.shape[0]
    arguments = {
        "hidden_states": torch.cat([image.flatten(2).transpose(1, 2) for image in images], dim=1),
        "encoder_hidden_states": call.context,
        "timestep": call.timestep,
        "img_ids": img_ids.expand(batch, -1, -1),
        "txt_ids": txt_ids.expand(batch, -1, -1),
    }
    return arguments | take_guidance(call)


def decode_flux2(output: Any, call: Call) -> torch.Tensor:
    """Return the latents of predicted tokens."""
    batch, _, height, width = call.x.shape
    tokens: torch.Tensor = output[:, : height * width]
    return tokens.transpose(1, 2).reshape(batch, -1, height, width)


# Qwen-Image and its edits.


def describe_qwen(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ComfyUI's config of a Qwen-Image model.

    Raises:
        FamilyError: if it makes layers, whose latents have another layout.
    """
    if config.get("use_layer3d_rope") or config.get("use_additional_t_cond"):
        raise FamilyError("Qwen-Image-Layered has no adapter for ComfyUI; try Qwen-Image or Qwen-Image-Edit")
    return {"image_model": "qwen_image", "in_channels": config["in_channels"]}


def encode_qwen(call: Call) -> dict[str, Any]:
    """Return the arguments of `QwenImageTransformer2DModel`, whose ids follow from the sizes of its images.

    Raises:
        FamilyError: if there are several frames.
    """
    # The edits since 2511 give the reference images the time zero by themselves.
    require_method(call, "index_timestep_zero" if call.config.get("zero_cond_t") else "index")
    images = [call.x, *call.extra.get("ref_latents", ())]
    if any(image.shape[2] != 1 for image in images):
        raise FamilyError(f"Qwen-Image takes one frame, not latents of {list(call.x.shape)}")
    padded = [pad_to_patches(image[:, :, 0]) for image in images]
    sizes = [[1, image.shape[-2] // 2, image.shape[-1] // 2] for image in padded]
    mask = call.extra.get("attention_mask")
    return {
        "hidden_states": torch.cat([pack_patches(image) for image in padded], dim=1),
        "encoder_hidden_states": call.context,
        "encoder_hidden_states_mask": None if mask is None else mask.bool(),
        "timestep": call.timestep,
        "img_shapes": [sizes] * call.x.shape[0],
    }


def decode_qwen(output: Any, call: Call) -> torch.Tensor:
    """Return the latents of predicted tokens, with their axis of frames."""
    return decode_patches(output, call)[:, :, None]


# Z-Image.


def describe_z_image(_: Mapping[str, Any]) -> dict[str, Any]:
    """Return ComfyUI's config of a Z-Image model, which it tells from Lumina 2 by its width."""
    return {"image_model": "lumina2", "dim": 3840}


def encode_z_image(call: Call) -> dict[str, Any]:
    """Return the arguments of `ZImageTransformer2DModel`: lists of images and texts, and a time that counts up."""
    texts = list(call.context.unbind())
    mask = call.extra.get("attention_mask")
    if mask is not None:
        # Texts have no padding here: their tokens alone are handed over.
        texts = [text[keep.bool()] for text, keep in zip(texts, mask, strict=True)]
    images = pad_to_patches(call.x)[:, :, None].unbind()
    return {"x": list(images), "t": 1 - call.timestep, "cap_feats": texts}


def decode_z_image(output: Any, call: Call) -> torch.Tensor:
    """Return the latents, which point from the image to the noise in ComfyUI."""
    height, width = call.x.shape[-2:]
    return -torch.stack(list(output))[:, :, 0, :height, :width]


# Wan 2.1 and 2.2: from text, from images; both sizes.


def describe_wan(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ComfyUI's config of a Wan model; those with CLIP's features of an image are "i2v"."""
    return {
        "image_model": "wan2.1",
        "model_type": "t2v" if config.get("image_dim") is None else "i2v",
        "in_dim": config["in_channels"],
        "out_dim": config.get("out_channels") or config["in_channels"],
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
    }


def encode_wan(call: Call) -> dict[str, Any]:
    """Return the arguments of `WanTransformer3DModel`.

    Raises:
        FamilyError: if the text or the features of an image do not fit the model.
    """
    x = pad_to_patches(call.x)
    timestep = call.timestep
    if timestep.ndim == 2:
        # A time for each frame, as with a first frame that is known; diffusers takes one for each token.
        timestep = timestep.repeat_interleave(x.shape[-2] // 2 * (x.shape[-1] // 2), dim=1)
    features = call.extra.get("clip_fea")
    has_features = call.config.get("image_dim") is not None
    if has_features and (features is None or call.context.shape[1] != WAN_TEXT_TOKENS):
        raise FamilyError(
            f"this Wan needs clip_vision_output and a text of {WAN_TEXT_TOKENS} tokens, not {call.context.shape[1]}"
        )
    return {
        "hidden_states": x,
        "timestep": timestep,
        "encoder_hidden_states": call.context,
        # ComfyUI leaves the features out as well where the model has no place for them.
        "encoder_hidden_states_image": features if has_features else None,
    }


def decode_wan(output: Any, call: Call) -> torch.Tensor:
    """Return the latents without what was added for whole patches."""
    height, width = call.x.shape[-2:]
    return torch.as_tensor(output)[..., :height, :width]


# LTX-2: video with sound.


def describe_ltx2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ComfyUI's config of an LTX-2 model.

    Raises:
        FamilyError: if it is of a later release, to whose prompts ComfyUI's model does more.
    """
    if config.get("cross_attn_mod") or not config.get("use_prompt_embeddings", True):
        raise FamilyError("LTX-2.3 and later have no adapter for ComfyUI; try LTX-2")
    return {"image_model": "ltxav", "cross_attention_dim": config["cross_attention_dim"]}


def encode_ltx2(call: Call) -> dict[str, Any]:
    """Return the arguments of `LTX2VideoTransformer3DModel`: tokens of both latents, and a text for each.

    Raises:
        FamilyError: if there is no sound, or the text is none of LTX-2's.
    """
    width = call.config["caption_channels"]
    if len(call.x) != 2 or call.x[1].numel() == 0:
        raise FamilyError("LTX-2 needs latents of sound too; add LTXVEmptyLatentAudio and LTXVConcatAVLatent")
    if call.context.shape[-1] != 2 * width:
        raise FamilyError(
            f"the text has a width of {call.context.shape[-1]}, not the {2 * width} of LTX-2's connectors"
        )
    video, audio = call.x
    scale = call.config["timestep_scale_multiplier"]
    video_time, audio_time = (scale * time.reshape(video.shape[0], -1) for time in call.timestep)
    video_text, audio_text = call.context.split(width, dim=-1)
    return {
        "hidden_states": video.flatten(2).transpose(1, 2),
        # Channels come before frequencies in a token.
        "audio_hidden_states": audio.transpose(1, 2).flatten(2),
        "encoder_hidden_states": video_text,
        "audio_encoder_hidden_states": audio_text,
        # One time for all tokens has no axis for them.
        "timestep": video_time if video_time.shape[1] > 1 else video_time[:, 0],
        "audio_timestep": audio_time if audio_time.shape[1] > 1 else audio_time[:, 0],
        "num_frames": video.shape[2],
        "height": video.shape[3],
        "width": video.shape[4],
        "fps": float(call.extra.get("frame_rate", 25)),
        "audio_num_frames": audio.shape[2],
    }


def decode_ltx2(output: Any, call: Call) -> list[torch.Tensor]:
    """Return the latents of the picture and of the sound."""
    video, audio = output
    channels, length, frequencies = call.x[1].shape[1:]
    sound = audio.reshape(-1, length, channels, frequencies).transpose(1, 2)
    return [video.transpose(1, 2).reshape(call.x[0].shape), sound]


FLUX_CONDITIONS = frozenset({"y", "guidance", "ref_latents", "ref_latents_method"})
FAMILIES = {
    "FluxTransformer2DModel": Family(describe_flux, encode_flux, decode_patches, FLUX_CONDITIONS),
    "Flux2Transformer2DModel": Family(describe_flux2, encode_flux2, decode_flux2, FLUX_CONDITIONS),
    "QwenImageTransformer2DModel": Family(
        describe_qwen, encode_qwen, decode_qwen, frozenset({"attention_mask", "ref_latents", "ref_latents_method"})
    ),
    # The number of tokens and the pooled text are of NewBie and Lumina, which ComfyUI runs by the same class.
    "ZImageTransformer2DModel": Family(
        describe_z_image,
        encode_z_image,
        decode_z_image,
        frozenset({"attention_mask", "num_tokens", "clip_text_pooled"}),
    ),
    # ComfyUI's own model ignores a reference latent unless it is one of Wan-Fun.
    "WanTransformer3DModel": Family(describe_wan, encode_wan, decode_wan, frozenset({"clip_fea", "reference_latent"})),
    # The mask is in the times already.
    "LTX2VideoTransformer3DModel": Family(
        describe_ltx2, encode_ltx2, decode_ltx2, frozenset({"frame_rate", "audio_denoise_mask"})
    ),
}
