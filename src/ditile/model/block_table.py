"""diffusers' transformers by name: the lists of their blocks, in order of execution, and how these pass tokens on.

The table of anatomies covers most classes. The rest is written by hand: classes that were never derived, notes, and
blocks that must not be skipped. Lists that prepare tokens once (refiners of text or noise, control branches) run ahead
of the chain and are not in it. Where a joint sequence of both streams goes through a block, that sequence counts as the
image, and there is no text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import diffusers
from diffusers.models import transformers
from torch import nn

from ditile.model.source import TEXT_PARAMETERS
from ditile.plan.model_spec import Flow

IMAGE_TEXT = Flow(("image", "text"))
IMAGE = Flow()
JOINT = Flow(text=None)

AnatomyRow = Mapping[str, Any]
"""An anatomy as JSON, see `anatomies.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerEntry:
    """A class of transformers.

    Attributes:
        lists: path of a `ModuleList` -> the flow of its blocks.
        apart: path of a list -> the attribute of the transformer with the number of its last blocks that are called on
            another stream, and so are not in the chain.
        mirrored: whether the last blocks read the results of the first ones, in reverse order: the last block reads the
            result of the first.
        has_rows: whether the first dimension of the tokens, and of all that goes with them, is the batch.
        note: other facts that a cache must know.
        refusal: why no block may be skipped; empty if blocks may be.
    """

    lists: Mapping[str, Flow] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    mirrored: bool = False
    has_rows: bool = True
    note: str = ""
    refusal: str = ""


def define_one_list(flow: Flow, name: str = "transformer_blocks", note: str = "") -> TransformerEntry:
    """Define a row with one list."""
    return TransformerEntry(lists={name: flow}, note=note)


_CHUNKS = "a call of the pipeline denoises one chunk after the other"
_KEYS = "a call that fills a cache of keys (kv_cache) must compute every block"
_BETWEEN = "its forward adds to the tokens between blocks"

_NOTES = {
    "BriaFiboTransformer2DModel": TransformerEntry(note="each block is given new features of the text"),
    "ErnieImageTransformer2DModel": TransformerEntry(has_rows=False, note="tokens are [S, B, C]"),
    "Flux2Transformer2DModel": TransformerEntry(note=_KEYS),
    "GlmImageTransformer2DModel": TransformerEntry(note=_KEYS),
    "HiDreamImageTransformer2DModel": TransformerEntry(
        note="each block is given more text, and what it returns of that is dropped"
    ),
    "Kandinsky6Transformer3DModel": TransformerEntry(note="the second stream is sound, or None"),
    "LTX2VideoTransformer3DModel": TransformerEntry(note="the second stream is sound"),
    "QwenImage21Transformer2DModel": TransformerEntry(
        has_rows=False, note=f"modulation has a row more than tokens; {_KEYS}"
    ),
    "WanAnimateTransformer3DModel": TransformerEntry(note=_BETWEEN),
    "WanVACETransformer3DModel": TransformerEntry(note=_BETWEEN),
}
"""Facts about classes with an anatomy, besides their lists."""

_WITHOUT_ANATOMY = {
    "AnyFlowFARTransformer3DModel": TransformerEntry(
        refusal="each block keeps keys of earlier chunks for the next ones"
    ),
    "ConsisIDTransformer3DModel": define_one_list(IMAGE_TEXT, note=_BETWEEN),
    "Cosmos3OmniTransformer": TransformerEntry(
        lists={"layers": Flow(("text", "image"), "gen_seq", "und_seq")}, has_rows=False, note="tokens have no batch"
    ),
    "HeliosTransformer3DModel": define_one_list(IMAGE, "blocks", _CHUNKS),
    "HunyuanDiT2DModel": TransformerEntry(
        lists={"blocks": IMAGE}, mirrored=True, note="the last blocks read what the first return"
    ),
    "HunyuanVideoFramepackTransformer3DModel": TransformerEntry(
        lists={"transformer_blocks": IMAGE_TEXT, "single_transformer_blocks": IMAGE_TEXT}, note=_CHUNKS
    ),
    "Kandinsky6SRTransformer3DModel": define_one_list(JOINT, "visual_transformer_blocks"),
    "LatteTransformer3DModel": TransformerEntry(refusal="two lists are called in turns, on frames and on places"),
    "LuminaNextDiT2DModel": define_one_list(IMAGE, "layers"),
    "MiniMaxMusic3Transformer1DModel": define_one_list(JOINT),
    "MochiTransformer3DModel": define_one_list(IMAGE_TEXT),
    "MotifVideoTransformer3DModel": TransformerEntry(
        lists={"transformer_blocks": IMAGE_TEXT, "single_transformer_blocks": IMAGE_TEXT},
        apart={"single_transformer_blocks": "num_decoder_layers"},
        note="the last single blocks decode: they are always computed",
    ),
    "NucleusMoEImageTransformer2DModel": define_one_list(IMAGE),
    "OmniGenTransformer2DModel": define_one_list(JOINT, "layers"),
    "PriorTransformer": define_one_list(JOINT),
    "RFD4ProteinaTransformer": TransformerEntry(
        refusal="features of pairs are updated between blocks from what these return"
    ),
    "SanaTransformer2DModel": define_one_list(IMAGE),
    "SanaVideoTransformer3DModel": define_one_list(IMAGE),
    "SanaWMLTX2RefinerTransformer3DModel": define_one_list(IMAGE, note=_KEYS),
    "SanaWMTransformer3DModel": define_one_list(Flow(image="x", text="y"), "blocks"),
    "Transformer2DModel": define_one_list(IMAGE),
    "UVit2DModel": define_one_list(IMAGE, "transformer_layers"),
    "WanAnimate2Transformer3DModel": TransformerEntry(
        refusal="its calls do not all run the same blocks, and keep keys of a first one"
    ),
}


@functools.cache
def read_anatomy_rows() -> Mapping[str, list[AnatomyRow]]:
    """Read `anatomies.json`: class name -> a row for each set of block classes in its configs."""
    text = resources.files("ditile.model").joinpath("anatomies.json").read_text("utf-8")
    rows: Mapping[str, list[AnatomyRow]] = json.loads(text)
    return rows


@functools.cache
def read_transformer_table() -> Mapping[str, TransformerEntry]:
    """Read the table: class name -> its blocks."""
    # A class that is derived later is in both tables; its anatomy counts.
    table = dict(_WITHOUT_ANATOMY)
    for name, rows in read_anatomy_rows().items():
        # Rows of a class differ in the classes of its blocks, and not in its lists.
        lists = {path: _read_flow(blocks) for path, blocks in rows[0]["lists"].items()}
        table[name] = replace(_NOTES.get(name, TransformerEntry()), lists=lists)
    return table


def _read_flow(blocks: AnatomyRow) -> Flow:
    """Return the flow of a list in an anatomy; a text that blocks do not return is an argument among others."""
    whole_texts = [name for name in (*TEXT_PARAMETERS, "cond") if name in blocks["arguments"]]
    text = blocks["text"] or next(iter(whole_texts), None)
    return Flow(tuple(blocks["returns"]), blocks["image"], text)


def find_diffusers_class(name: str) -> type[nn.Module] | None:
    """Return the class with this name in the installed diffusers; None if there is none."""
    # Some transformers are not exported at the top level.
    attribute = getattr(diffusers, name, None) or getattr(transformers, name, None)
    if isinstance(attribute, type) and issubclass(attribute, nn.Module):
        return attribute
    return None


def find_table_entry(transformer: type[nn.Module]) -> TransformerEntry | None:
    """Return the row of a class, or of its nearest base that is diffusers' own class."""
    table = read_transformer_table()
    for cls in transformer.__mro__:
        # A class from elsewhere may have the name of one of diffusers' classes.
        if cls.__name__ in table and find_diffusers_class(cls.__name__) is cls:
            return table[cls.__name__]
    return None
