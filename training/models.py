"""The two transformers: sizes, initial weights, and what one training step asks of them."""

import math
from typing import Protocol

import torch
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel
from torch import nn

from training.conditions import Conditions
from training.latents import CHANNELS

WIDTH = 128
HEADS = 4
TRAIN_STEPS = 1000
BETA_START = 1e-4
BETA_END = 0.02
PIXART_TOKENS = 24
FLUX_TOKENS = 32


class Kind(Protocol):
    """One family: the model, and the loss of a batch of latents [B, C, h, w] under its noise schedule."""

    name: str
    text_tokens: int
    masked: bool
    model: nn.Module

    def loss(self, latents: torch.Tensor, conditions: Conditions) -> torch.Tensor: ...


class PixArt:
    """PixArt-Sigma blocks, v-prediction on the linear beta schedule (Salimans & Ho, arXiv 2202.00512)."""

    name = "pixart"
    text_tokens = PIXART_TOKENS
    masked = True

    def __init__(self) -> None:
        self.model = PixArtTransformer2DModel(
            num_attention_heads=HEADS,
            attention_head_dim=WIDTH // HEADS,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=12,
            cross_attention_dim=WIDTH,
            sample_size=32,
            patch_size=2,
            caption_channels=WIDTH,
            interpolation_scale=1,
            use_additional_conditions=False,
        )
        _init_pixart(self.model)
        betas = torch.linspace(BETA_START, BETA_END, TRAIN_STEPS, dtype=torch.float64)
        self.signal = torch.cumprod(1 - betas, 0).float()

    def loss(self, latents: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """Mean squared error of v at stratified, uniform time steps."""
        batch = len(latents)
        t = (_stratified(batch) * TRAIN_STEPS).long().clamp(0, TRAIN_STEPS - 1)
        a = self.signal[t].view(-1, 1, 1, 1)
        noise = torch.randn_like(latents)
        noisy = a.sqrt() * latents + (1 - a).sqrt() * noise
        target = a.sqrt() * noise - (1 - a).sqrt() * latents
        out = self.model(
            noisy.to(self.model.dtype),
            encoder_hidden_states=conditions.text,
            encoder_attention_mask=conditions.mask,
            timestep=t,
            return_dict=False,
        )[0]
        return (out.float() - target).pow(2).mean()


class Flux:
    """FLUX double and single blocks, rectified flow (arXiv 2403.03206) with logit-normal times."""

    name = "flux"
    text_tokens = FLUX_TOKENS
    masked = False

    def __init__(self) -> None:
        self.model = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * CHANNELS,
            num_layers=4,
            num_single_layers=8,
            attention_head_dim=WIDTH // HEADS,
            num_attention_heads=HEADS,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )
        _init_flux(self.model)

    def loss(self, latents: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """Mean squared error of the velocity; larger pictures get more noise, as neighbours tell more."""
        batch, _, h, w = latents.shape
        shift = 0.2 + 0.25 * math.log(h * w / 1024)
        sigma = torch.sigmoid(torch.special.ndtri(_stratified(batch).clamp(1e-4, 1 - 1e-4)) * 1.2 + shift)
        noise = torch.randn_like(latents)
        s = sigma.view(-1, 1, 1, 1)
        out = self.model(
            pack((1 - s) * latents + s * noise).to(self.model.dtype),
            encoder_hidden_states=conditions.text,
            pooled_projections=conditions.pooled,
            timestep=sigma.to(self.model.dtype),
            img_ids=image_ids(h // 2, w // 2),
            txt_ids=torch.zeros(self.text_tokens, 3),
            return_dict=False,
        )[0]
        return (out.float() - pack(noise - latents)).pow(2).mean()


def make(name: str) -> Kind:
    """A freshly initialised model of the family."""
    kinds: dict[str, type[PixArt] | type[Flux]] = {"pixart": PixArt, "flux": Flux}
    return kinds[name]()


def pack(x: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] to FLUX's tokens [B, h/2 * w/2, 4 C]."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, c * 4)


def image_ids(rows: int, columns: int) -> torch.Tensor:
    """FLUX's positions of image tokens [rows * columns, 3], as its pipeline makes them."""
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)[None]
    return ids.view(-1, 3)


def _stratified(batch: int) -> torch.Tensor:
    return (torch.arange(batch) + torch.rand(batch)) / batch


@torch.no_grad()
def _init_pixart(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.zero_()
        elif name.endswith("attn2.to_out.0.weight") or name == "proj_out.weight":
            p.zero_()  # a block starts without the text, the model without an opinion
        elif "adaln_single" in name:
            p.normal_(std=0.02)
        elif "transformer_blocks" in name and p.ndim == 2 and name.endswith("weight"):
            nn.init.xavier_uniform_(p)
    for block in model.transformer_blocks:
        _mimetic(block.attn1)


def _mimetic(attention: nn.Module) -> None:
    """Self-attention starts as what trained models show: local, and subtracting the mean (arXiv 2305.09828)."""
    attention.to_k.weight.copy_(attention.to_q.weight + 0.3 * attention.to_k.weight)
    q, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH))
    attention.to_v.weight.copy_(0.6 * q + 0.3 * attention.to_v.weight)
    attention.to_out[0].weight.copy_(0.3 * attention.to_out[0].weight - 0.6 * q.T)


@torch.no_grad()
def _init_flux(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if name.endswith("bias") or name.startswith(("proj_out", "norm_out")):
            p.zero_()
        elif ".norm" in name and "linear" in name:
            p.normal_(std=0.01)
        elif p.ndim == 2:
            nn.init.xavier_uniform_(p)
