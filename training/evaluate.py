"""Sample captions with a bundled model and check the images or clips: `python -m training.evaluate shapes-pixart
--captions 200`.

Runs the unmodified diffusers pipeline of src/ditile/model/assets/<model> (or of --folder) with the defaults of its
generation.json, batches of captions with one seed each. --transformer puts in weights that are still in
training. Prints one row a size and guidance.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow

from ditile.runner.load import load
from ditile.runner.model_files import FRAME_RATE
from ditile_lab.quality.caption_check import Image
from training.caption_scores import VERDICT_ITEMS, score_images
from training.motion_check import CLIP_ITEMS, Video, judge_clip, score_clips
from training.motions import sample_motion_caption

ASSETS = Path(__file__).parent.parent / "src" / "ditile" / "model" / "assets"
GUIDANCE = {
    "PixArtSigmaPipeline": "guidance_scale",
    "FluxPipeline": "true_cfg_scale",
    "WanPipeline": "guidance_scale",
}
FRAMES_SHOWN = (0, 2, 4, 6, 8)


def load_pipeline(folder: Path, transformer: Path | None, dtype: torch.dtype) -> Any:
    """The pipeline of a folder, with other transformer weights if given."""
    pipe: Any = load(str(folder), dtype=dtype)
    if transformer is not None:
        pipe.transformer = type(pipe.transformer).from_pretrained(transformer, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def list_captions(model: str, count: int) -> list[str]:
    """The first held-out captions of a model's grammar."""
    if model != "shapes-wan":
        return (ASSETS / "captions.txt").read_text().splitlines()[:count]
    rng = random.Random(1)
    captions = dict[str, None]()
    while len(captions) < count:
        captions[sample_motion_caption(rng, held_out=True)] = None
    return list(captions)


def sample(pipe: Any, captions: list[str], call: dict[str, Any], *, batch: int, seed: int) -> list[Image | Video]:
    """One image or clip a caption; the noise of image i depends on the seed and i only."""
    images: list[Image | Video] = []
    for start in range(0, len(captions), batch):
        part = captions[start : start + batch]
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        own: dict[str, Any] = {"prompt": part, "generator": generators, "output_type": "np"}
        if "negative_prompt" in call:
            own["negative_prompt"] = [call["negative_prompt"]] * len(part)
        out = pipe(**call | own)
        pixels = out.frames if hasattr(out, "frames") else out.images
        images += list(np.rint(pixels * 255).astype(np.uint8))
    return images


def sheet(images: list[Image], columns: int = 8) -> Pillow.Image:
    """The images side by side, in full rows."""
    rows = []
    for start in range(0, len(images) // columns * columns, columns):
        rows.append(np.concatenate(images[start : start + columns], axis=1))
    return Pillow.fromarray(np.concatenate(rows, axis=0))


def clip_sheet(videos: list[Video], columns: int = 2) -> Pillow.Image:
    """Some frames of each clip side by side, in full rows."""
    border = ((1, 1), (1, 1), (0, 0))
    strips = []
    for video in videos:
        frames = [np.pad(video[place], border) for place in FRAMES_SHOWN]
        strips.append(np.concatenate(frames, axis=1))
    return sheet(strips, columns)


def main() -> None:
    """Sample, check, print, and save a contact sheet if asked."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    folder = args.folder or ASSETS / args.model
    dtype = torch.float32 if args.fp32 else torch.bfloat16
    pipe = load_pipeline(folder, args.transformer, dtype)
    defaults = json.loads((folder / "generation.json").read_text())
    defaults.pop(FRAME_RATE, None)
    guidance_name = GUIDANCE[type(pipe).__name__]
    captions = list_captions(args.model, args.captions)
    for size in args.sizes or [f"{defaults['height']}x{defaults['width']}"]:
        height, width = map(int, size.split("x"))
        for guidance in args.guidance or [defaults[guidance_name]]:
            call = defaults | {"height": height, "width": width, guidance_name: guidance}
            call["num_inference_steps"] = args.steps or defaults["num_inference_steps"]
            began = time.process_time()
            images = sample(pipe, captions, call, batch=args.batch, seed=args.seed)
            seconds = (time.process_time() - began) / len(images)
            row = {"model": args.model, "pixels": size, "guidance": guidance, "n": len(images)}
            row |= _report_images(images, captions, args)
            print(json.dumps(row | {"cpu_s_per_image": round(seconds, 2)}), flush=True)


def _report_images(images: list[Image | Video], captions: list[str], args: argparse.Namespace) -> dict[str, float]:
    """The scores of images or clips; also saves the contact sheet, and says what is wrong with each clip, if asked."""
    if args.model != "shapes-wan":
        if args.sheet:
            sheet(images[:32]).save(args.sheet, optimize=True)
        return score_images(images, captions)
    if args.sheet:
        clip_sheet(images[:32]).save(args.sheet, optimize=True)
    if args.verbose:
        for video, caption in zip(images, captions, strict=True):
            verdict = judge_clip(video, caption)
            print(caption, [item for item in CLIP_ITEMS if not getattr(verdict, item)], flush=True)
    return score_clips(images, captions)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"per cent right of {', '.join(VERDICT_ITEMS)}")
    parser.add_argument("model", choices=("shapes-pixart", "shapes-flux", "shapes-flux-turbo", "shapes-wan"))
    parser.add_argument("--folder", type=Path, help="another assembled pipeline")
    parser.add_argument("--transformer", type=Path, help="other transformer weights")
    parser.add_argument("--captions", type=int, default=200)
    parser.add_argument("--sizes", nargs="+", metavar="HxW")
    parser.add_argument("--guidance", nargs="+", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bf16")
    parser.add_argument("--verbose", action="store_true", help="of clips, what is wrong with each")
    parser.add_argument("--sheet", type=Path, help="PNG of the first 32 pictures (of the last row)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
