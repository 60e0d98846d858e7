"""Real diffusers pipelines with tiny random weights, the same on every rank."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["a", "the", "red", "green", "blue", "circle", "square", "ring", "left", "right", "above", "below", "large"]
WORDS += ["small", "on", "of", "and"]
WIDTH = 32


def tokenizer(length: int = 16) -> transformers.PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


def t5(width: int = WIDTH) -> transformers.T5EncoderModel:
    config = transformers.T5Config(
        vocab_size=64, d_model=width, d_kv=8, num_heads=4, d_ff=64, num_layers=1, num_decoder_layers=1,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, pad_token_id=0, eos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.T5EncoderModel(config).eval()


def clip(cls: type = transformers.CLIPTextModel) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=64, projection_dim=WIDTH, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, pad_token_id=0, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    return cls(config).eval()


def vae(channels: int = 4) -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2, block_out_channels=(8, 16), layers_per_block=1,
        latent_channels=channels, norm_num_groups=4, sample_size=32, scaling_factor=1.0, shift_factor=0.1,
        use_quant_conv=False, use_post_quant_conv=False,
    ).eval()  # fmt: skip


def randomise(model: torch.nn.Module, seed: int = 0, gain: float = 1.6) -> torch.nn.Module:
    """No zero-initialised gate or head may hide a block's output; attention must matter; latents stay near 1.

    The gain is that of each matrix: attention matters more with a larger one, and so does the last bit of a number.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            wanted = 0.4 if name == "proj_out.weight" else gain
            parameter.data = noise * wanted / parameter[0].numel() ** 0.5
        else:
            parameter.data = noise * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return model.eval()


def flux(double: int = 2, single: int = 3, *, guidance: bool = False) -> diffusers.FluxPipeline:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=double, num_single_layers=single, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, guidance_embeds=guidance,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    return quiet(
        diffusers.FluxPipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.5),
            vae=vae(),
            text_encoder=clip(),
            tokenizer=tokenizer(),
            text_encoder_2=t5(),
            tokenizer_2=tokenizer(),
            transformer=randomise(transformer),
        )  # fmt: skip
    )


def pixart(blocks: int = 4, *, alpha: bool = False) -> Any:
    torch.manual_seed(0)
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=blocks,
        cross_attention_dim=WIDTH, sample_size=32, patch_size=2, caption_channels=WIDTH, interpolation_scale=1,
        use_additional_conditions=False,
    )  # fmt: skip
    cls = diffusers.PixArtAlphaPipeline if alpha else diffusers.PixArtSigmaPipeline
    return quiet(
        cls(
            tokenizer=tokenizer(),
            text_encoder=t5(),
            vae=vae(),
            transformer=randomise(transformer, gain=1.0),
            scheduler=diffusers.DPMSolverMultistepScheduler(beta_end=0.004),  # an untrained epsilon is divided by alpha
        )  # fmt: skip
    )


def sd3(blocks: int = 4, dual: tuple[int, ...] = (0, 1)) -> diffusers.StableDiffusion3Pipeline:
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_layers=blocks, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=2 * WIDTH, caption_projection_dim=WIDTH, pooled_projection_dim=2 * WIDTH, out_channels=4,
        pos_embed_max_size=32, dual_attention_layers=dual, qk_norm="rms_norm" if dual else None,
    )  # fmt: skip
    return quiet(
        diffusers.StableDiffusion3Pipeline(
            transformer=randomise(transformer),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=vae(),
            text_encoder=clip(transformers.CLIPTextModelWithProjection),
            tokenizer=tokenizer(),
            text_encoder_2=clip(transformers.CLIPTextModelWithProjection),
            tokenizer_2=tokenizer(),
            text_encoder_3=t5(2 * WIDTH),
            tokenizer_3=tokenizer(),
        )  # fmt: skip
    )


def stable_diffusion(cls: type = diffusers.StableDiffusionPipeline, channels: int = 4) -> Any:
    """A U-Net pipeline, of which ditile knows nothing."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=channels, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=WIDTH, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    return quiet(
        cls(
            vae=vae(),
            text_encoder=clip(),
            tokenizer=tokenizer(),
            unet=randomise(unet, gain=1.0),
            scheduler=diffusers.PNDMScheduler(beta_end=0.004, skip_prk_steps=True),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )  # fmt: skip
    )


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


FAMILIES: dict[str, Any] = {"flux": flux, "pixart": pixart, "sd3": sd3}


def arguments(family: str, **changes: Any) -> dict[str, Any]:
    """Call arguments of a family: 4 steps, latents out, guidance on."""
    call: dict[str, Any] = {"prompt": "a red circle", "num_inference_steps": 4, "output_type": "latent"}
    call |= {"height": 32, "width": 24, "max_sequence_length": 12}
    if family != "flux":
        call["guidance_scale"] = 3.0
    if family == "pixart":
        call |= {"use_resolution_binning": False, "clean_caption": False}
    call |= changes
    seed = call.pop("seed", 7)
    if "generator" not in call:
        call["generator"] = torch.Generator().manual_seed(seed)
    return call
