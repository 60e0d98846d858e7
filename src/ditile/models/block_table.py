"""diffusers' transformers by name: which lists hold their blocks, in order of execution, and how these pass tokens on.

Lists that prepare tokens once (refiners of text or noise, control branches) run ahead of the chain and are not in it.
Where a sequence of both streams goes through a block as one, that sequence is the image and there is no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import diffusers
from diffusers.models import transformers
from torch import nn

from ditile.plan.spec import Flow

IMAGE_TEXT = Flow(("image", "text"))
TEXT_IMAGE = Flow(("text", "image"))
IMAGE = Flow()
JOINT = Flow(text=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A class of transformers.

    Attributes:
        lists: path of a `ModuleList` -> how its blocks pass tokens on.
        apart: path of such a list -> the attribute of the transformer that says how many of its last blocks are called
            on another stream, and so are not in the chain.
        mirrored: whether the last blocks read what the first ones returned, the last that of the first.
        has_rows: whether the first dimension of the tokens is the batch, and that of all that goes with them.
        note: what else a cache must know.
        refusal: why no block may be left out; empty where they may.
    """

    lists: Mapping[str, Flow] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    mirrored: bool = False
    has_rows: bool = True
    note: str = ""
    refusal: str = ""


def one(flow: Flow, name: str = "transformer_blocks", note: str = "") -> Row:
    """A row with one list."""
    return Row(lists={name: flow}, note=note)


def two(double: Flow, single: Flow, note: str = "") -> Row:
    """A row with double and single blocks."""
    return Row(lists={"transformer_blocks": double, "single_transformer_blocks": single}, note=note)


_CHUNKS = "a call of the pipeline denoises one chunk after the other"
_KEYS = "a call that fills a cache of keys (kv_cache) must compute every block"
_BETWEEN = "its forward adds to the tokens between blocks"

TABLE: Mapping[str, Row] = {
    "AceStepTransformer1DModel": one(IMAGE, "layers"),
    "AllegroTransformer3DModel": one(IMAGE),
    "AnyFlowFARTransformer3DModel": Row(refusal="each block keeps keys of earlier chunks for the next ones"),
    "AnyFlowTransformer3DModel": one(IMAGE, "blocks"),
    "AuraFlowTransformer2DModel": Row(
        lists={"joint_transformer_blocks": TEXT_IMAGE, "single_transformer_blocks": JOINT}
    ),
    "BriaFibo2Transformer2DModel": one(Flow(image="x"), "layers"),
    "BriaFiboTransformer2DModel": two(TEXT_IMAGE, JOINT, "each block is given new features of the text"),
    "BriaTransformer2DModel": two(TEXT_IMAGE, TEXT_IMAGE),
    "ChromaTransformer2DModel": two(TEXT_IMAGE, JOINT),
    "ChronoEditTransformer3DModel": one(IMAGE, "blocks"),
    "CogVideoXTransformer3DModel": one(IMAGE_TEXT),
    "CogView3PlusTransformer2DModel": one(IMAGE_TEXT),
    "CogView4Transformer2DModel": one(IMAGE_TEXT),
    "ConsisIDTransformer3DModel": one(IMAGE_TEXT, note=_BETWEEN),
    "Cosmos3OmniTransformer": Row(
        lists={"layers": Flow(("text", "image"), "gen_seq", "und_seq")}, has_rows=False, note="tokens have no batch"
    ),
    "CosmosTransformer3DModel": one(IMAGE),
    "DiTTransformer2DModel": one(JOINT),
    "EasyAnimateTransformer3DModel": one(IMAGE_TEXT),
    "ErnieImageTransformer2DModel": Row(
        lists={"layers": Flow(image="x", text=None)}, has_rows=False, note="tokens are [S, B, C]"
    ),
    "Flux2Transformer2DModel": two(TEXT_IMAGE, JOINT, _KEYS),
    "Flux3Transformer2DModel": one(TEXT_IMAGE, "single_transformer_blocks"),
    "GlmImageTransformer2DModel": one(IMAGE_TEXT, note=_KEYS),
    "HeliosTransformer3DModel": one(IMAGE, "blocks", _CHUNKS),
    "HiDreamImageTransformer2DModel": Row(
        lists={"double_stream_blocks": IMAGE_TEXT, "single_stream_blocks": JOINT},
        note="each block is given more text, and what it returns of that is dropped",
    ),
    "HunyuanDiT2DModel": Row(lists={"blocks": IMAGE}, mirrored=True, note="the last blocks read what the first return"),
    "HunyuanImageTransformer2DModel": two(IMAGE_TEXT, IMAGE_TEXT),
    "HunyuanVideo15Transformer3DModel": one(IMAGE_TEXT),
    "HunyuanVideoFramepackTransformer3DModel": two(IMAGE_TEXT, IMAGE_TEXT, _CHUNKS),
    "HunyuanVideoTransformer3DModel": two(IMAGE_TEXT, IMAGE_TEXT),
    "Ideogram4Transformer2DModel": one(JOINT, "layers"),
    "JoyImageEditPlusTransformer3DModel": one(IMAGE_TEXT, "double_blocks"),
    "JoyImageEditTransformer3DModel": one(IMAGE_TEXT, "double_blocks"),
    "Kandinsky5Transformer3DModel": one(Flow(image="visual_embed", text="text_embed"), "visual_transformer_blocks"),
    "Kandinsky6SRTransformer3DModel": one(JOINT, "visual_transformer_blocks"),
    "Kandinsky6Transformer3DModel": one(
        Flow(("image", "text"), "vis", "aud"), "visual_transformer_blocks", "the second stream is sound, or None"
    ),
    "Krea2Transformer2DModel": one(JOINT),
    "LTX2VideoTransformer3DModel": one(
        Flow(("image", "text"), text="audio_hidden_states"), note="the second stream is sound"
    ),
    "LTXVideoTransformer3DModel": one(IMAGE),
    "LatteTransformer3DModel": Row(refusal="two lists are called in turns, on frames and on places"),
    "LongCatAudioDiTTransformer": one(Flow(text="cond"), "blocks"),
    "LongCatImageTransformer2DModel": two(TEXT_IMAGE, TEXT_IMAGE),
    "Lumina2Transformer2DModel": one(JOINT, "layers"),
    "LuminaNextDiT2DModel": one(IMAGE, "layers"),
    "MiniMaxH3Transformer3DModel": one(JOINT),
    "MiniMaxMusic3Transformer1DModel": one(JOINT),
    "MochiTransformer3DModel": one(IMAGE_TEXT),
    "MotifVideoTransformer3DModel": Row(
        lists={"transformer_blocks": IMAGE_TEXT, "single_transformer_blocks": IMAGE_TEXT},
        apart={"single_transformer_blocks": "num_decoder_layers"},
        note="the last single blocks decode: they are always computed",
    ),
    "NucleusMoEImageTransformer2DModel": one(IMAGE),
    "OmniGenTransformer2DModel": one(JOINT, "layers"),
    "OvisImageTransformer2DModel": two(TEXT_IMAGE, TEXT_IMAGE),
    "PRXTransformer2DModel": one(IMAGE, "blocks"),
    "PriorTransformer": one(JOINT),
    "QwenImage21Transformer2DModel": Row(
        lists={"transformer_blocks": JOINT}, has_rows=False, note=f"modulation has a row more than tokens; {_KEYS}"
    ),
    "QwenImageTransformer2DModel": one(TEXT_IMAGE),
    "RFD4ProteinaTransformer": Row(refusal="features of pairs are updated between blocks from what these return"),
    "SanaTransformer2DModel": one(IMAGE),
    "SanaVideoTransformer3DModel": one(IMAGE),
    "SanaWMLTX2RefinerTransformer3DModel": one(IMAGE, note=_KEYS),
    "SanaWMTransformer3DModel": one(Flow(image="x", text="y"), "blocks"),
    "SkyReelsV2Transformer3DModel": one(IMAGE, "blocks"),
    "StableAudio3DiTModel": one(Flow(text="context")),
    "StableAudioDiTModel": one(IMAGE),
    "Transformer2DModel": one(IMAGE),
    "UVit2DModel": one(IMAGE, "transformer_layers"),
    "WanAnimate2Transformer3DModel": Row(
        refusal="its calls do not all run the same blocks, and keep keys of a first one"
    ),
    "WanAnimateTransformer3DModel": one(IMAGE, "blocks", _BETWEEN),
    "WanTransformer3DModel": one(IMAGE, "blocks"),
    "WanVACETransformer3DModel": one(IMAGE, "blocks", _BETWEEN),
    "ZImageTransformer2DModel": one(Flow(image="x", text=None), "layers"),
}


def class_of(name: str) -> type[nn.Module] | None:
    """The class of that name in the diffusers that is installed; None if it has none."""
    found = getattr(diffusers, name, None) or getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def row_of(transformer: type[nn.Module]) -> Row | None:
    """The row of a class, or of the nearest of its bases that is diffusers' own class of that name."""
    for cls in transformer.__mro__:
        if cls.__name__ in TABLE and class_of(cls.__name__) is cls:
            return TABLE[cls.__name__]
    return None
