"""Tokenizer, T5 encoder and CLIP text model, trained to parse captions and then frozen: `python -m
training.text --seed 0`.

From the T5 state of every word the word itself and the attributes of the thing it belongs to must be readable
by a linear map, from CLIP's pooled state the attributes of the whole scene. Binding colours and places to
things is thus learnt before any picture is seen, in about a minute and a half of one core. Writes
training/out/text/{tokenizer,t5,clip}.
"""

import argparse
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from ditile_lab.quality.caption_check import (
    BACKGROUNDS,
    COLORS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    Thing,
)
from training.scenes import describe_scene, sample_scene

OUT = Path(__file__).parent / "out" / "text"
LENGTH = 32
WIDTH = 128
SPECIAL = ["<pad>", "</s>", "<unk>"]
SPARE = [
    "an",
    "and",
    "checkered",
    "cross",
    "in",
    "plain",
    "star",
]  # in the vocabulary of the bundled models, not in their captions
THING = {"shape": len(SHAPES), "color": len(COLORS), "size": len(SIZES), "x": 3, "y": 3}
SCENE = {"background": len(BACKGROUNDS), "texture": len(TEXTURES)}
IGNORE = -100


@dataclass(frozen=True, slots=True)
class Examples:
    """Token ids and mask [N, L]; labels a word [N, L]; labels a scene [N]."""

    ids: torch.Tensor
    mask: torch.Tensor
    words: dict[str, torch.Tensor]
    scenes: dict[str, torch.Tensor]


def vocabulary() -> list[str]:
    """Special tokens, then all words in alphabetical order."""
    phrases = [
        *PLACES,
        *RELATIONS,
        *SHAPES,
        *COLORS,
        *SIZES,
        *BACKGROUNDS,
        *TEXTURES,
        "a",
        "on",
        "background",
        *SPARE,
    ]
    return SPECIAL + sorted({word for phrase in phrases for word in phrase.split()})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, `</s>` at the end."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary())}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=LENGTH,
    )


def make_encoders() -> tuple[T5EncoderModel, CLIPTextModel]:
    """Fresh encoders, 0.50 and 0.27 million parameters."""
    shared = {"vocab_size": len(vocabulary()), "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1}
    t5 = T5Config(
        vocab_size=len(vocabulary()),
        d_model=WIDTH,
        d_kv=32,
        num_heads=4,
        d_ff=256,
        num_layers=3,
        num_decoder_layers=1,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=32,
    )
    clip = CLIPTextConfig(
        hidden_size=WIDTH,
        intermediate_size=256,
        projection_dim=WIDTH,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=2,
        **shared,
    )
    return T5EncoderModel(t5), CLIPTextModel(clip)


def make_examples(tokenizer: PreTrainedTokenizerFast, scenes: list[Scene]) -> Examples:
    """Labels of scenes for both encoders."""
    batch = tokenizer(
        [describe_scene(s) for s in scenes],
        padding="max_length",
        max_length=LENGTH,
        truncation=True,
        return_tensors="pt",
    )
    words = _stack_labels(map(_word_labels, scenes))
    words["word"] = batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORE)
    return Examples(batch.input_ids, batch.attention_mask, words, _stack_labels(map(_scene_labels, scenes)))


def _stack_labels(rows: Iterable[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The labels of all scenes, by name."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(value)
    return {key: torch.tensor(labels) for key, labels in values.items()}


class Reader(nn.Module):
    """A linear map from a state to each label."""

    def __init__(self, classes: dict[str, int]) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({key: nn.Linear(WIDTH, n) for key, n in classes.items()})

    def loss(self, states: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum of the cross entropies, states [..., D]."""
        losses = []
        for key, head in self.heads.items():
            losses.append(functional.cross_entropy(head(states).flatten(0, -2), labels[key].flatten()))
        return torch.stack(losses).sum()

    @torch.no_grad()
    def accuracy(self, states: torch.Tensor, labels: dict[str, torch.Tensor]) -> dict[str, float]:
        """Share right of each label."""
        shares = {}
        for key, head in self.heads.items():
            is_right = head(states).argmax(-1) == labels[key]
            has_label = labels[key] != IGNORE
            shares[key] = round(is_right[has_label].float().mean().item(), 4)
        return shares


def train(steps: int, seed: int) -> dict[str, dict[str, float]]:
    """Train both, save them, and return the accuracies on held-out captions."""
    rng = random.Random(seed)
    tokenizer = make_tokenizer()
    t5, clip = make_encoders()
    data = make_examples(tokenizer, [sample_scene(rng, held_out=False) for _ in range(20_000)])
    word_reader = Reader({"word": len(tokenizer)} | THING | SCENE)
    classes = {}
    for index in (0, 1):
        classes |= {f"{key}{index}": count for key, count in THING.items()}
    scene_reader = Reader(classes | SCENE | {"things": 2})
    modules = nn.ModuleList([t5, clip, word_reader, scene_reader])
    adam = torch.optim.AdamW(modules.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(steps):
        adam.param_groups[0]["lr"] = 2e-3 * min(1.0, step / 50) * max(0.02, 1 - step / steps)
        pick = torch.randint(len(data.ids), (64,))
        ids = data.ids[pick]
        # PixArt masks the padding, FLUX does not: the encoder learns both.
        mask = data.mask[pick] if step % 2 else None
        states = t5(ids, attention_mask=mask).last_hidden_state
        loss = word_reader.loss(states, _pick_labels(data.words, pick))
        pooled = clip(ids).pooler_output
        loss = loss + 0.5 * scene_reader.loss(pooled, _pick_labels(data.scenes, pick))
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        adam.step()
    for name, part in (("tokenizer", tokenizer), ("t5", t5), ("clip", clip)):
        part.save_pretrained(OUT / name)
    test = make_examples(tokenizer, [sample_scene(rng, held_out=True) for _ in range(1000)])
    with torch.no_grad():
        states = t5(test.ids).last_hidden_state
        pooled = clip(test.ids).pooler_output
    return {
        "t5": word_reader.accuracy(states, test.words),
        "clip": scene_reader.accuracy(pooled, test.scenes),
    }


def _pick_labels(labels: Mapping[str, torch.Tensor], pick: torch.Tensor) -> dict[str, torch.Tensor]:
    return {key: values[pick] for key, values in labels.items()}


def _thing_labels(thing: Thing) -> dict[str, int]:
    return {
        "shape": SHAPES.index(thing.shape),
        "color": list(COLORS).index(thing.color),
        "size": list(SIZES).index(thing.size),
        "x": _number_third(thing.x),
        "y": _number_third(thing.y),
    }


def _number_third(place: float) -> int:
    """0, 1 or 2: before, near or after the middle."""
    if place < 0.4:
        return 0
    return 2 if place > 0.6 else 1


def _backdrop_labels(scene: Scene) -> dict[str, int]:
    return {"background": list(BACKGROUNDS).index(scene.background), "texture": TEXTURES.index(scene.texture)}


def _word_labels(scene: Scene) -> dict[str, list[int]]:
    """Words of a thing carry its labels, the background's words and the end token those of the background."""
    rows = {key: [IGNORE] * LENGTH for key in THING | SCENE}
    words = describe_scene(scene).split()
    # A thing has four words: the article, size, colour and shape.
    starts = [0, 4 + len(scene.where.split())]
    spans = []
    for start, thing in zip(starts, scene.things, strict=False):
        spans.append((start, start + 4, _thing_labels(thing)))
    # The background's words: its colour, its texture if it has one, and "background"; then the end token.
    backdrop = len(words) - 2
    if scene.texture != "plain":
        backdrop -= 1
    spans.append((backdrop, len(words) + 1, _backdrop_labels(scene)))
    for start, end, labels in spans:
        for key, value in labels.items():
            rows[key][start:end] = [value] * (end - start)
    return rows


def _scene_labels(scene: Scene) -> dict[str, int]:
    labels = {}
    # A second thing that is not there has no labels.
    for index in (0, 1):
        labels |= {f"{key}{index}": IGNORE for key in THING}
    labels |= _backdrop_labels(scene)
    labels["things"] = len(scene.things) - 1
    for index, thing in enumerate(scene.things):
        labels |= {f"{key}{index}": value for key, value in _thing_labels(thing).items()}
    return labels


def main() -> None:
    """Train and print the accuracies."""
    parser = argparse.ArgumentParser(description="train the text encoders")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    for name, accuracy in train(args.steps, args.seed).items():
        print(name, accuracy)


if __name__ == "__main__":
    main()
