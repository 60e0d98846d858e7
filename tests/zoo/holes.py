"""Which rows which families cannot hold, and why."""

from __future__ import annotations

from typing import NamedTuple

from tests.zoo.own import OWN
from tests.zoo.rows import EVERY

HYBRIDS = (
    "ltx-2", "qwen-image-2.1", "z-image", "wan-2.2", "krea-2", "qwen-image", "qwen-image-edit", "flux-2", "wan-2.1",
    "flux",
)  # fmt: skip
"""An entry of each of the ten families that are used most."""

PATCHES = ("pipefusion", "stale", "cache, pipefusion")
BLOCKS = (*PATCHES, "ulysses", "ring", "gather", "distrifusion", "tensor", "cache, ulysses", "proof")
"""The rows that need to know what a token is."""


class Hole(NamedTuple):
    """Rows that some entries cannot hold, and that are refused before the first step, because such an entry..."""

    reason: str
    names: str
    rows: tuple[str, ...] = BLOCKS


TABLE = (
    Hole(
        "makes images without guidance, in one call of one row",
        """
        qwen-image-2.1-edit flux-2 flux-2-klein-edit flux-2-klein-kv flux-img2img flux-kontext flux-fill
        flux-inpaint flux-control flux-controlnet flux-controlnet-inpaint ideogram-4 kandinsky-6-super-resolution
        sana-sprint ace-step-turbo prx-distilled flux-modular minimax-h3 minimax-h3-keyframes minimax-h3-references
        """,
        ("cfg",),
    ),
    Hole(
        "has images of a batch at places of their own in the sequence, unlike in each branch of guidance",
        "z-image-omni",
        ("proof",),
    ),
    Hole(
        "predicts at the places of its keyframes or references, which are never stepped, so the proof finds them uncut",
        "minimax-h3-keyframes minimax-h3-references",
        ("proof",),
    ),
    Hole(
        "has guidance that remembers earlier predictions, and would be given one for each patch",
        "hunyuan-image",
        ("stale", "cache, pipefusion"),
    ),
    Hole("mixes tokens of patches behind the blocks, in its guidance", "ace-step", PATCHES),
    Hole("pads images that are not square to the tokens of the largest", "hidream"),
    Hole("makes other numbers of rows than images", "cosmos cosmos-video-to-world", ("cfg", "data")),
    Hole("calls a second transformer in its loop, which needs the whole fresh latents", "ideogram-4", PATCHES),
    Hole("has experts that choose among all tokens", "nucleus-moe"),
    Hole(
        "counts the tokens of the first frame, or of frames before, within its blocks",
        "hunyuan-video-image-to-video hunyuan-video-framepack helios",
    ),
    Hole("computes attention in a way of its own", "kandinsky-6-super-resolution"),
    Hole("scales attention by the number of tokens that a block is given", "lumina-next"),
    Hole("has blocks in the first half that hand more than tokens to those of the second", "hunyuan-dit"),
    Hole(
        "has convolutions over tokens in its blocks, and linear attention",
        "sana sana-sprint sana-video sana-image-to-video sana-wm",
    ),
    Hole("has attention that leaves out padded text", "mochi"),
    Hole(
        "has a loop of its own over timesteps of frames",
        "skyreels-v2-diffusion-forcing skyreels-v2-diffusion-forcing-blocks",
        (*PATCHES, "cache, ulysses", "cfg", "data", "distrifusion", "ring", "gather", "tensor", "ulysses"),
    ),
    Hole(
        "steps a part of the latents for each number of steps, or more than once",
        "cosmos cosmos-video-to-world",
        PATCHES,
    ),
    Hole("calls its lists of blocks in turns, on frames and on places", "latte"),
    Hole("keeps keys of earlier chunks in its blocks", "any-flow-far"),
    Hole(
        "gives its transformer what a ControlNet adds by the number of the block, of unknown rows",
        "z-image-controlnet",
        ("cfg", "data"),
    ),
    Hole("returns several tensors", "any-flow-far", ("cfg", "data")),
    Hole("returns several tensors", "cosmos-3 cosmos-3-image-to-video", ("cfg",)),
    Hole("decodes with its last blocks, which see more than its first", "motif-video motif-image-to-video"),
    Hole("takes all of a call as one list of tokens without a batch", "cosmos-3 cosmos-3-image-to-video"),
    Hole("updates features of pairs between its blocks", "proteina"),
    Hole("goes on with a part of its latents in mid-run", "chrono-edit-reasoning", (*PATCHES, "distrifusion")),
    Hole(
        "predicts at the places of its images, or steps them like latents and puts them back",
        "minimax-h3-keyframes minimax-h3-references joyimage-edit joyimage-edit-plus",
        ("references",),
    ),
    Hole("keeps the keys of its images itself, exactly", "qwen-image-2.1-edit flux-2-klein-kv", ("references",)),
    Hole("has two schedulers, and none of the name that the loop knows", "proteina", ("cfg", "data")),
)
REFERRING = """
    flux-kontext flux-kontext-inpaint qwen-image-edit qwen-image-edit-2509 qwen-image-edit-2511 qwen-image-edit-inpaint
    flux-2-klein-edit z-image-omni flux-3-edit longcat-image-edit
"""
"""Entries that hold `references`, of those that refer to images; the others have a hole."""
HOLES = {(name, row): hole for hole in TABLE for name in hole.names.split() for row in hole.rows}


def has_row(name: str, row: str) -> bool:
    """Whether a row is asked of an entry."""
    if row == "hybrid":
        return name in HYBRIDS or name in OWN
    if row == "references":
        return name in REFERRING.split() or (name, row) in HOLES
    return row != "data" or EVERY[name].two_images is not None


def find_hole(name: str, row: str) -> Hole | None:
    """Why an entry cannot hold a row; None if it can."""
    return HOLES.get((name, "pipefusion" if row == "hybrid" else row))
