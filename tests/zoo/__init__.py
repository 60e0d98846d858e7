"""Real pipelines of diffusers with tiny random weights: every kind that calls a diffusion transformer, offline."""

from __future__ import annotations

from tests.zoo import conditions, modular, more_pictures, more_videos, pictures, sounds, videos
from tests.zoo.entry import VARIANTS, Entry

__all__ = ["LEFT_OUT", "VARIANTS", "ZOO", "Entry"]

MODULES = (pictures, more_pictures, conditions, videos, more_videos, sounds, modular)
ENTRIES = [one for module in MODULES for one in module.ENTRIES]
ZOO: dict[str, Entry] = {one.name: one for one in sorted(ENTRIES, key=lambda one: one.use_rank)}
assert len(ZOO) == len(ENTRIES)

REASONS = {
    "calls the transformer as the pipeline without a mask or a picture to begin with does, which is here": """
        CogVideoXVideoToVideoPipeline EasyAnimateInpaintPipeline
        SanaSprintImg2ImgPipeline SkyReelsV2DiffusionForcingVideoToVideoPipeline StableAudio3AudioToAudioPipeline
        StableAudio3InpaintPipeline
        SkyReelsV2DiffusionForcingImageToVideoPipeline LTXI2VLongMultiPromptPipeline LucyEditPipeline
        BriaFiboEditPipeline HunyuanImageRefinerPipeline LTX2InContextPipeline LTX2HDRPipeline LTX2DFRPipeline
        LTX2DFRTemporalRefinePipeline HeliosPyramidPipeline VisualClozePipeline VisualClozeGenerationPipeline
    """,
    "gives the transformer a picture as more channels, as flux-control, which is here, does": """
        CogVideoXFunControlPipeline CogView4ControlPipeline EasyAnimateControlPipeline FluxControlImg2ImgPipeline
        FluxControlInpaintPipeline
    """,
    "adds what another model says behind blocks, as flux-controlnet, which is here, does": """
        FluxControlNetImg2ImgPipeline HunyuanDiTControlNetPipeline SanaControlNetPipeline Cosmos2_5_TransferPipeline
        ZImageControlNetInpaintPipeline
    """,
    "replaces attention by that of perturbed guidance in some blocks": """
        HunyuanDiTPAGPipeline PixArtSigmaPAGPipeline SanaPAGPipeline StableDiffusion3PAGImg2ImgPipeline
        StableDiffusion3PAGPipeline
    """,
    "needs torchvision, which the tests do without": "OmniGenPipeline",
    "fails where latents are asked for, and makes pictures of 1024 x 1024 pixels": "QwenImageLayeredPipeline",
    "needs OpenCV, which the tests do without": "ConsisIDPipeline",
    "makes tokens of a codebook, and has no scheduler of latents": """
        AmusedImg2ImgPipeline AmusedInpaintPipeline AmusedPipeline VQDiffusionPipeline
    """,
}
# Pipeline classes that are not here, and why.
LEFT_OUT: dict[str, str] = {name: reason for reason, names in REASONS.items() for name in names.split()}
