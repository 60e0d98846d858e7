"""Captions to what a transformer is conditioned on, by frozen text encoders."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import CLIPTextModel, PreTrainedTokenizerFast, T5EncoderModel


@dataclass(frozen=True, slots=True)
class Conditions:
    """Text states [B, L, D], their mask [B, L] (PixArt only) and the pooled state [B, D] (FLUX only), in bf16."""

    text: torch.Tensor
    mask: torch.Tensor | None
    pooled: torch.Tensor | None


class TextEncoders:
    """A tokenizer and the frozen encoders of one assembled model's folder."""

    def __init__(self, folder: Path, *, tokens: int, masked: bool, dtype: torch.dtype) -> None:
        # PixArt masks its padding and has T5 alone; FLUX has CLIP first.
        t5 = "text_encoder"
        self.clip = None
        if not masked:
            t5 = "text_encoder_2"
            self.clip = CLIPTextModel.from_pretrained(folder / "text_encoder").eval()
        self.dtype = dtype
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        self.t5 = T5EncoderModel.from_pretrained(folder / t5).eval()
        self.tokens = tokens
        self.masked = masked

    @torch.no_grad()
    def __call__(self, captions: list[str]) -> Conditions:
        batch = self.tokenizer(
            captions, padding="max_length", max_length=self.tokens, truncation=True, return_tensors="pt"
        )
        if self.masked:
            mask = batch.attention_mask
            text = self.t5(batch.input_ids, attention_mask=mask).last_hidden_state
            return Conditions(text, mask.bfloat16(), None)
        text = self.t5(batch.input_ids).last_hidden_state
        assert self.clip is not None
        return Conditions(text, None, self.clip(batch.input_ids).pooler_output)


def drop(captions: list[str], rate: float) -> list[str]:
    """Replace some captions by the empty one, so that guidance has an unconditional prediction."""
    kept = torch.rand(len(captions)) >= rate
    return [caption if keep else "" for caption, keep in zip(captions, kept.tolist(), strict=True)]
