"""The sound of a pipeline's result, and its files: AAC in the MP4 of its video, or a WAV of its own; both by PyAV."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ditile.plan.errors import ModelError
from ditile.plan.extras import require_extra

SOUND_FIELDS = ("audio", "audios")
"""The names of the field that holds sounds: in a result with videos, and in a result of only sounds."""
AAC_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 64_000, 88_200, 96_000)
"""The sample rates that AAC has. A sound of another rate is resampled."""
_LAYOUTS = {1: "mono", 2: "stereo"}
# The vocoder comes first: it may make more samples than the VAE's spectrogram describes. None is the pipeline itself.
_OWNERS = ("vocoder", None, "audio_vae", "vae")
_RATE_NAMES = ("output_sampling_rate", "audio_sample_rate", "audio_sampling_rate", "sampling_rate", "sample_rate")


@dataclass(frozen=True)
class Sound:
    """A sound as it left its pipeline: samples [C, S] from -1 to 1, and the rate, 0 if the pipeline tells none."""

    samples: NDArray[np.float32]
    rate: int

    def check_samples(self) -> None:
        """Raise `ModelError` unless the sound can be written to a file."""
        num_channels, num_samples = self.samples.shape
        described = f"a sound of {num_channels} x {num_samples} samples at {self.rate} Hz"
        if num_samples == 0:
            raise ModelError(f"{described} is empty; ask for a longer one")
        if num_channels not in _LAYOUTS:
            raise ModelError(f"{described} has {num_channels} channels, and 1 or 2 are written")
        if self.rate < 1:
            raise ModelError(f"{described}: its pipeline does not tell the sample rate")
        num_invalid = int(np.count_nonzero(~np.isfinite(self.samples)))
        if num_invalid:
            raise ModelError(
                f"{described} has {num_invalid} that are NaN or infinite; decode it in float32 or bfloat16"
            )

    def fit_length(self, seconds: float) -> Sound:
        """Return the sound with a length in seconds: its end is cut off, or followed by silence."""
        count = round(seconds * self.rate)
        missing = max(0, count - self.samples.shape[1])
        return Sound(np.pad(self.samples[:, :count], ((0, 0), (0, missing))), self.rate)


def list_sounds(pipe: Any, result: Any) -> list[Sound]:
    """List the sounds of a pipeline's result; none if it is mute."""
    for name in SOUND_FIELDS:
        waveforms = getattr(result, name, None)
        if waveforms is not None:
            rate = getattr(result, "sampling_rate", None) or find_sample_rate(pipe)
            sounds = []
            for waveform in waveforms:
                if hasattr(waveform, "detach"):
                    # It may be on a GPU, and of a type that numpy lacks.
                    waveform = waveform.detach().float().cpu().numpy()
                sounds.append(Sound(np.atleast_2d(np.asarray(waveform, np.float32)), rate))
            return sounds
    return []


def find_sample_rate(pipe: Any) -> int:
    """Return the sample rate of a pipeline's sounds, as the vocoder, the pipeline or a VAE tells it; 0 if none does."""
    for owner_name in _OWNERS:
        owner = pipe
        if owner_name is not None:
            owner = getattr(getattr(pipe, owner_name, None), "config", None)
        for name in _RATE_NAMES:
            rate = getattr(owner, name, None)
            if isinstance(rate, int):
                return rate
    return 0


def encode_wav(sound: Sound, texts: Mapping[str, str]) -> bytes:
    """Encode a sound as a WAV of 16 bits, with texts about how it was made as its comment."""
    require_extra("video", "a WAV", ["av"])
    import av

    sound.check_samples()
    encoded = io.BytesIO()
    with av.open(encoded, mode="w", format="wav") as container:
        container.metadata["comment"] = json.dumps(dict(texts))
        stream = container.add_stream("pcm_s16le", rate=sound.rate, layout=_LAYOUTS[len(sound.samples)])
        write_samples(container, stream, sound)
    return encoded.getvalue()


def add_sound_stream(container: Any, sound: Sound) -> Any:
    """Add a stream of AAC for a sound to an MP4. Raises `ModelError` if it cannot hold the sound."""
    sound.check_samples()
    if not AAC_RATES[0] <= sound.rate <= AAC_RATES[-1]:
        raise ModelError(
            f"a sound at {sound.rate} Hz: AAC holds {AAC_RATES[0]} to {AAC_RATES[-1]} Hz; name the video .webp or .gif "
            "to write it without"
        )
    rate = min(rate for rate in AAC_RATES if rate >= sound.rate)
    return container.add_stream("aac", rate=rate, layout=_LAYOUTS[len(sound.samples)])


def write_samples(container: Any, stream: Any, sound: Sound) -> None:
    """Encode a sound into a stream, and write it."""
    require_extra("video", "a sound", ["av"])
    import av

    samples = np.ascontiguousarray(sound.samples.clip(-1, 1))
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=_LAYOUTS[len(samples)])
    frame.sample_rate = sound.rate
    frame.time_base = Fraction(1, sound.rate)
    frame.pts = 0
    container.mux(stream.encode(frame))
    container.mux(stream.encode())


def read_wav_texts(path: Path) -> dict[str, str]:
    """Read the texts about how a sound was made. Empty if there is no such file, or it has no texts."""
    require_extra("video", f"a file of prompts for sounds, such as {str(path)!r},", ["av"])
    import av

    try:
        with av.open(path) as container:
            texts: dict[str, str] = json.loads(container.metadata.get("comment", "{}"))
            return texts
    except (OSError, ValueError):
        return {}
