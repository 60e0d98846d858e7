"""diffusers' transformers by name: which lists have their blocks, in order of execution, and how these pass tokens on.

Lists that prepare tokens once (refiners of text or noise, control branches) run ahead of the chain and are not in it.
Where a joint sequence of both streams goes through a block, that sequence counts as the image, and there is no text.
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
class TransformerEntry:
    """A class of transformers.

    Attributes:
        lists: path of a `ModuleList` -> how its blocks pass tokens on.
        apart: path of a list -> the attribute of the transformer with the number of its last blocks that are called on
            another stream, and so are not in the chain.
        mirrored: whether the last blocks read what the first ones returned, the last block that of the first.
        has_rows: whether the first dimension of the tokens, and of all that goes with them, is the batch.
        note: what else a cache must know.
        refusal: why no block may be left out; empty where they may.
    """

    lists: Mapping[str, Flow] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    mirrored: bool = False
    has_rows: bool = True
    note: str = ""
    refusal: str = ""


def define_one_list(flow: Flow, name: str = "transformer_blocks", note: str = "") -> TransformerEntry:
    """A row with one list."""
    return TransformerEntry(lists={name: flow}, note=note)


def define_two_lists(double: Flow, single: Flow, note: str = "") -> TransformerEntry:
    """A row with double and single blocks."""
    return TransformerEntry(lists={"transformer_blocks": double, "single_transformer_blocks": single}, note=note)


_CHUNKS = "a call of the pipeline denoises one chunk after the other"
_KEYS = "a call that fills a cache of keys (kv_cache) must compute every block"
_BETWEEN = "its forward adds to the tokens between blocks"

TRANSFORMER_TABLE: Mapping[str, TransformerEntry] = {
    "AceStepTransformer1DModel": define_one_list(IMAGE, "layers"),
    "AllegroTransformer3DModel": define_one_list(IMAGE),
    "AnyFlowFARTransformer3DModel": TransformerEntry(
        refusal="each block keeps keys of earlier chunks for the next ones"
    ),
    "AnyFlowTransformer3DModel": define_one_list(IMAGE, "blocks"),
    "AuraFlowTransformer2DModel": TransformerEntry(
        lists={"joint_transformer_blocks": TEXT_IMAGE, "single_transformer_blocks": JOINT}
    ),
    "BriaFibo2Transformer2DModel": define_one_list(Flow(image="x"), "layers"),
    "BriaFiboTransformer2DModel": define_two_lists(TEXT_IMAGE, JOINT, "each block is given new features of the text"),
    "BriaTransformer2DModel": define_two_lists(TEXT_IMAGE, TEXT_IMAGE),
    "ChromaTransformer2DModel": define_two_lists(TEXT_IMAGE, JOINT),
    "ChronoEditTransformer3DModel": define_one_list(IMAGE, "blocks"),
    "CogVideoXTransformer3DModel": define_one_list(IMAGE_TEXT),
    "CogView3PlusTransformer2DModel": define_one_list(IMAGE_TEXT),
    "CogView4Transformer2DModel": define_one_list(IMAGE_TEXT),
    "ConsisIDTransformer3DModel": define_one_list(IMAGE_TEXT, note=_BETWEEN),
    "Cosmos3OmniTransformer": TransformerEntry(
        lists={"layers": Flow(("text", "image"), "gen_seq", "und_seq")}, has_rows=False, note="tokens have no batch"
    ),
    "CosmosTransformer3DModel": define_one_list(IMAGE),
    "DiTTransformer2DModel": define_one_list(JOINT),
    "EasyAnimateTransformer3DModel": define_one_list(IMAGE_TEXT),
    "ErnieImageTransformer2DModel": TransformerEntry(
        lists={"layers": Flow(image="x", text=None)}, has_rows=False, note="tokens are [S, B, C]"
    ),
    "Flux2Transformer2DModel": define_two_lists(TEXT_IMAGE, JOINT, _KEYS),
    "Flux3Transformer2DModel": define_one_list(TEXT_IMAGE, "single_transformer_blocks"),
    "FluxTransformer2DModel": define_two_lists(TEXT_IMAGE, TEXT_IMAGE),
    "GlmImageTransformer2DModel": define_one_list(IMAGE_TEXT, note=_KEYS),
    "HeliosTransformer3DModel": define_one_list(IMAGE, "blocks", _CHUNKS),
    "HiDreamImageTransformer2DModel": TransformerEntry(
        lists={"double_stream_blocks": IMAGE_TEXT, "single_stream_blocks": JOINT},
        note="each block is given more text, and what it returns of that is dropped",
    ),
    "HunyuanDiT2DModel": TransformerEntry(
        lists={"blocks": IMAGE}, mirrored=True, note="the last blocks read what the first return"
    ),
    "HunyuanImageTransformer2DModel": define_two_lists(IMAGE_TEXT, IMAGE_TEXT),
    "HunyuanVideo15Transformer3DModel": define_one_list(IMAGE_TEXT),
    "HunyuanVideoFramepackTransformer3DModel": define_two_lists(IMAGE_TEXT, IMAGE_TEXT, _CHUNKS),
    "HunyuanVideoTransformer3DModel": define_two_lists(IMAGE_TEXT, IMAGE_TEXT),
    "Ideogram4Transformer2DModel": define_one_list(JOINT, "layers"),
    "JoyImageEditPlusTransformer3DModel": define_one_list(IMAGE_TEXT, "double_blocks"),
    "JoyImageEditTransformer3DModel": define_one_list(IMAGE_TEXT, "double_blocks"),
    "Kandinsky5Transformer3DModel": define_one_list(
        Flow(image="visual_embed", text="text_embed"), "visual_transformer_blocks"
    ),
    "Kandinsky6SRTransformer3DModel": define_one_list(JOINT, "visual_transformer_blocks"),
    "Kandinsky6Transformer3DModel": define_one_list(
        Flow(("image", "text"), "vis", "aud"), "visual_transformer_blocks", "the second stream is sound, or None"
    ),
    "Krea2Transformer2DModel": define_one_list(JOINT),
    "LTX2VideoTransformer3DModel": define_one_list(
        Flow(("image", "text"), text="audio_hidden_states"), note="the second stream is sound"
    ),
    "LTXVideoTransformer3DModel": define_one_list(IMAGE),
    "LatteTransformer3DModel": TransformerEntry(refusal="two lists are called in turns, on frames and on places"),
    "LongCatAudioDiTTransformer": define_one_list(Flow(text="cond"), "blocks"),
    "LongCatImageTransformer2DModel": define_two_lists(TEXT_IMAGE, TEXT_IMAGE),
    "Lumina2Transformer2DModel": define_one_list(JOINT, "layers"),
    "LuminaNextDiT2DModel": define_one_list(IMAGE, "layers"),
    "MiniMaxH3Transformer3DModel": define_one_list(JOINT),
    "MiniMaxMusic3Transformer1DModel": define_one_list(JOINT),
    "MochiTransformer3DModel": define_one_list(IMAGE_TEXT),
    "MotifVideoTransformer3DModel": TransformerEntry(
        lists={"transformer_blocks": IMAGE_TEXT, "single_transformer_blocks": IMAGE_TEXT},
        apart={"single_transformer_blocks": "num_decoder_layers"},
        note="the last single blocks decode: they are always computed",
    ),
    "NucleusMoEImageTransformer2DModel": define_one_list(IMAGE),
    "OmniGenTransformer2DModel": define_one_list(JOINT, "layers"),
    "OvisImageTransformer2DModel": define_two_lists(TEXT_IMAGE, TEXT_IMAGE),
    "PRXTransformer2DModel": define_one_list(IMAGE, "blocks"),
    "PixArtTransformer2DModel": define_one_list(IMAGE),
    "PriorTransformer": define_one_list(JOINT),
    "QwenImage21Transformer2DModel": TransformerEntry(
        lists={"transformer_blocks": JOINT}, has_rows=False, note=f"modulation has a row more than tokens; {_KEYS}"
    ),
    "QwenImageTransformer2DModel": define_one_list(TEXT_IMAGE),
    "RFD4ProteinaTransformer": TransformerEntry(
        refusal="features of pairs are updated between blocks from what these return"
    ),
    "SD3Transformer2DModel": define_one_list(TEXT_IMAGE),
    "SanaTransformer2DModel": define_one_list(IMAGE),
    "SanaVideoTransformer3DModel": define_one_list(IMAGE),
    "SanaWMLTX2RefinerTransformer3DModel": define_one_list(IMAGE, note=_KEYS),
    "SanaWMTransformer3DModel": define_one_list(Flow(image="x", text="y"), "blocks"),
    "SkyReelsV2Transformer3DModel": define_one_list(IMAGE, "blocks"),
    "StableAudio3DiTModel": define_one_list(Flow(text="context")),
    "StableAudioDiTModel": define_one_list(IMAGE),
    "Transformer2DModel": define_one_list(IMAGE),
    "UVit2DModel": define_one_list(IMAGE, "transformer_layers"),
    "WanAnimate2Transformer3DModel": TransformerEntry(
        refusal="its calls do not all run the same blocks, and keep keys of a first one"
    ),
    "WanAnimateTransformer3DModel": define_one_list(IMAGE, "blocks", _BETWEEN),
    "WanTransformer3DModel": define_one_list(IMAGE, "blocks"),
    "WanVACETransformer3DModel": define_one_list(IMAGE, "blocks", _BETWEEN),
    "ZImageTransformer2DModel": define_one_list(Flow(image="x", text=None), "layers"),
}


def find_diffusers_class(name: str) -> type[nn.Module] | None:
    """The class of that name in the diffusers that is installed; None if it has none."""
    attribute = getattr(diffusers, name, None) or getattr(transformers, name, None)
    return attribute if isinstance(attribute, type) and issubclass(attribute, nn.Module) else None


def find_table_entry(transformer: type[nn.Module]) -> TransformerEntry | None:
    """The row of a class, or of the nearest of its bases that is diffusers' own class of that name."""
    for cls in transformer.__mro__:
        if cls.__name__ in TRANSFORMER_TABLE and find_diffusers_class(cls.__name__) is cls:
            return TRANSFORMER_TABLE[cls.__name__]
    return None
