"""Put a trained transformer and its parts together: `python -m training.assemble pixart|flux|flux-turbo|wan [--text
FOLDER] [--vae FOLDER]`.

Without --text and --vae these come from the model that is bundled now. The folder in src/ditile/model/assets is
replaced at once, at the end, and keeps its README.md. Text encoders are saved in fp32 (in bf16 a
from_pretrained without dtype fails), the rest in bf16. shapes-flux-turbo is only a transformer: its other parts are
those of shapes-flux.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import CLIPTextModel, PreTrainedTokenizerFast, T5EncoderModel, UMT5EncoderModel

from training.models import BETA_END, BETA_START, FLUX_TOKENS, PIXART_TOKENS, TRAIN_STEPS
from training.motions import FRAMES, SIDE

HERE = Path(__file__).parent
ASSETS = HERE.parent / "src" / "ditile" / "model" / "assets"


def pixart(transformer: Path, tokenizer: Path, t5: Path, vae: Path) -> PixArtSigmaPipeline:
    """The pipeline of shapes-pixart."""
    scheduler = DPMSolverMultistepScheduler(
        num_train_timesteps=TRAIN_STEPS,
        beta_start=BETA_START,
        beta_end=BETA_END,
        prediction_type="v_prediction",
        algorithm_type="dpmsolver++",
        solver_order=2,
    )
    return PixArtSigmaPipeline(
        tokenizer=PreTrainedTokenizerFast.from_pretrained(tokenizer),
        text_encoder=T5EncoderModel.from_pretrained(t5, dtype=torch.float32),
        vae=AutoencoderKL.from_pretrained(vae, torch_dtype=torch.bfloat16),
        transformer=PixArtTransformer2DModel.from_pretrained(transformer, torch_dtype=torch.bfloat16),
        scheduler=scheduler,
    )


def flux(transformer: Path, tokenizer: Path, t5: Path, clip: Path, vae: Path) -> FluxPipeline:
    """The pipeline of shapes-flux."""
    words = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=TRAIN_STEPS, shift=1.5),
        vae=AutoencoderKL.from_pretrained(vae, torch_dtype=torch.bfloat16),
        text_encoder=CLIPTextModel.from_pretrained(clip, dtype=torch.float32),
        tokenizer=words,
        text_encoder_2=T5EncoderModel.from_pretrained(t5, dtype=torch.float32),
        tokenizer_2=words,
        transformer=FluxTransformer2DModel.from_pretrained(transformer, torch_dtype=torch.bfloat16),
    )


def wan(transformer: Path, tokenizer: Path, umt5: Path, vae: Path) -> WanPipeline:
    """The pipeline of shapes-wan."""
    scheduler = UniPCMultistepScheduler(
        num_train_timesteps=TRAIN_STEPS, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0
    )
    return WanPipeline(
        tokenizer=PreTrainedTokenizerFast.from_pretrained(tokenizer),
        text_encoder=UMT5EncoderModel.from_pretrained(umt5, dtype=torch.float32),
        vae=AutoencoderKLWan.from_pretrained(vae, torch_dtype=torch.bfloat16),
        transformer=WanTransformer3DModel.from_pretrained(transformer, torch_dtype=torch.bfloat16),
        scheduler=scheduler,
    )


def call_defaults(kind: str, side: int, guidance: float) -> dict[str, Any]:
    """What generation.json says."""
    common = {"height": side, "width": side, "num_inference_steps": 20}
    if kind == "flux-turbo":
        return common | {"num_inference_steps": 4, "true_cfg_scale": 1.0, "max_sequence_length": FLUX_TOKENS}
    if kind == "wan":
        video = {"num_frames": FRAMES, "fps": 8}
        return common | video | {"guidance_scale": guidance, "negative_prompt": "", "max_sequence_length": 64}
    if kind == "pixart":
        text = {"max_sequence_length": PIXART_TOKENS, "use_resolution_binning": False, "clean_caption": False}
        return common | {"guidance_scale": guidance} | text
    return common | {"true_cfg_scale": guidance, "negative_prompt": "", "max_sequence_length": FLUX_TOKENS}


def assemble(kind: str, transformer: Path, text: Path | None, vae: Path | None) -> Any:
    """The pipeline of a kind from the folders of its parts."""
    bundled = ASSETS / f"shapes-{kind}"
    t5 = text / "t5" if text else bundled / ("text_encoder" if kind == "pixart" else "text_encoder_2")
    tokenizer = (text or bundled) / "tokenizer"
    vae = vae or bundled / "vae"
    if kind == "wan":
        return wan(transformer, tokenizer, text / "umt5" if text else bundled / "text_encoder", vae)
    if kind == "pixart":
        return pixart(transformer, tokenizer, t5, vae)
    return flux(transformer, tokenizer, t5, text / "clip" if text else bundled / "text_encoder", vae)


def forget_paths(folder: Path) -> None:
    """diffusers writes where a part was loaded from into its config."""
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text())
        config.pop("_name_or_path", None)
        path.write_text(json.dumps(config, indent=2) + "\n")


def replace(folder: Path, fresh: Path) -> None:
    """Move a complete new folder into the place of an old one, keeping the old one's README.md."""
    if (folder / "README.md").exists():
        shutil.copy(folder / "README.md", fresh)
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    """Assemble and save."""
    parser = argparse.ArgumentParser(description="assemble a pipeline")
    parser.add_argument("kind", choices=("pixart", "flux", "flux-turbo", "wan"))
    parser.add_argument("--transformer", type=Path, help="default: training/out/<kind>/transformer")
    parser.add_argument("--text", type=Path, help="folder written by training.text")
    parser.add_argument("--vae", type=Path, help="folder written by training.vae")
    parser.add_argument("--side", type=int, help="default height and width, 256, of clips 64")
    parser.add_argument("--guidance", type=float, help="2 by default, of clips 3")
    args = parser.parse_args()
    transformer = args.transformer or HERE / "out" / args.kind / "transformer"
    pipe = assemble("flux" if args.kind == "flux-turbo" else args.kind, transformer, args.text, args.vae)
    folder = ASSETS / f"shapes-{args.kind}"
    fresh = folder.with_name(f".{folder.name}.new")
    if args.kind == "flux-turbo":
        pipe.transformer.save_pretrained(fresh / "transformer")
        pipe.save_config(fresh)
    else:
        pipe.save_pretrained(fresh)
    forget_paths(fresh)
    side, guidance = {"wan": (SIDE, 3.0), "flux-turbo": (128, 1.0)}.get(args.kind, (256, 2.0))
    defaults = call_defaults(args.kind, args.side or side, args.guidance or guidance)
    (fresh / "generation.json").write_text(json.dumps(defaults, indent=2) + "\n")
    replace(folder, fresh)


if __name__ == "__main__":
    main()
