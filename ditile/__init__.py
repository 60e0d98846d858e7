"""ditile: diffusion transformers over many devices, unchanged to the eye."""

__version__ = "0.1.0"
