"""Sample captions with a bundled model and check the pictures: `python -m training.evaluate shapes-pixart
--captions 200`.

Runs the unmodified diffusers pipeline of src/ditile/assets/<model> (or of --folder) with the defaults of its
generation.json, batches of captions with one seed each. --transformer puts in weights that are still in
training. Prints one row a size and guidance.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image as Pillow

from ditile.cli.evaluate.caption_check import VERDICT_ITEMS, Image, score_pictures

ASSETS = Path(__file__).parent.parent / "src" / "ditile" / "assets"
GUIDANCE = {"PixArtSigmaPipeline": "guidance_scale", "FluxPipeline": "true_cfg_scale"}


def load(folder: Path, transformer: Path | None, dtype: torch.dtype) -> Any:
    """The pipeline of a folder, with other transformer weights if given."""
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype)
    if transformer is not None:
        pipe.transformer = type(pipe.transformer).from_pretrained(transformer, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sample(pipe: Any, captions: list[str], call: dict[str, Any], *, batch: int, seed: int) -> list[Image]:
    """One picture a caption; the noise of picture i depends on the seed and i only."""
    images: list[Image] = []
    for start in range(0, len(captions), batch):
        part = captions[start : start + batch]
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        negative = {"negative_prompt": [call["negative_prompt"]] * len(part)} if "negative_prompt" in call else {}
        out = pipe(prompt=part, generator=generators, output_type="np", **{**call, **negative}).images
        images += list(np.rint(out * 255).astype(np.uint8))
    return images


def sheet(images: list[Image], columns: int = 8) -> Pillow.Image:
    """The pictures side by side, in full rows."""
    rows = [
        np.concatenate(images[i : i + columns], axis=1) for i in range(0, len(images) // columns * columns, columns)
    ]
    return Pillow.fromarray(np.concatenate(rows, axis=0))


def main() -> None:
    """Sample, check, print, and save a contact sheet if asked."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    folder = args.folder or ASSETS / args.model
    pipe = load(folder, args.transformer, torch.float32 if args.fp32 else torch.bfloat16)
    defaults = json.loads((folder / "generation.json").read_text())
    guidance_name = GUIDANCE[type(pipe).__name__]
    captions = (ASSETS / "captions.txt").read_text().splitlines()[: args.captions]
    for size in args.sizes or [f"{defaults['height']}x{defaults['width']}"]:
        height, width = (int(x) for x in size.split("x"))
        for guidance in args.guidance or [defaults[guidance_name]]:
            call = defaults | {"height": height, "width": width, guidance_name: guidance}
            call["num_inference_steps"] = args.steps or defaults["num_inference_steps"]
            cpu = time.process_time()
            images = sample(pipe, captions, call, batch=args.batch, seed=args.seed)
            cpu = (time.process_time() - cpu) / len(images)
            items = score_pictures(images, captions)
            row = {"model": args.model, "pixels": size, "guidance": guidance, "n": len(images)} | items
            print(json.dumps(row | {"cpu_s_per_image": round(cpu, 2)}), flush=True)
            if args.sheet:
                sheet(images[:32]).save(args.sheet, optimize=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"per cent right of {', '.join(VERDICT_ITEMS)}")
    parser.add_argument("model", choices=("shapes-pixart", "shapes-flux"))
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
    parser.add_argument("--sheet", type=Path, help="PNG of the first 32 pictures (of the last row)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
