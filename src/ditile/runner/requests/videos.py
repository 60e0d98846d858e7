"""Reads and writes videos as files: MP4 by PyAV, animated WebP and GIF by Pillow, each with a poster, which is a PNG of
the first frame and keeps how the video was made.

Nothing here imports torch. PyAV is imported only to write an MP4 and to read videos other than GIF and WebP.
"""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageSequence

from ditile.distributed import files
from ditile.plan.errors import ModelError
from ditile.plan.extras import require_extra
from ditile.runner.requests.options import GIF_MOST_FPS
from ditile.runner.requests.pictures import DECODE_ERRORS, MAX_PICTURE_BYTES, encode_png
from ditile.runner.sounds import Sound, add_sound_stream, write_samples

Video = NDArray[np.uint8]  # [F, H, W, 3]

DEFAULT_FPS = 16.0
"""The frames a second of a video whose pipeline says nothing about it."""
MAX_FRAMES = 2048
"""The most frames that a video to be read may have."""
SHEET_COLUMNS = 4
"""The number of frames in a row of a spritesheet."""
SHEET_WIDTH = 256
"""The most pixels on the longer side of a spritesheet's frame."""
CRF = "16"
"""The constant rate factor of x264: with this one a loss can hardly be seen."""
_MAX_DENOMINATOR = 1001
"""The largest denominator of a rate; television has rates such as 30000 / 1001."""


def check_encoder(path: Path, fps: float | None) -> None:
    """Raise `ModelError` if the writer for a video's or a sound's path is not installed, or its format has no such
    rate.

    A package is looked for, not imported.
    """
    if path.suffix.lower() == ".gif" and fps is not None and fps > GIF_MOST_FPS:
        raise ModelError(f"fps={fps:g}: a GIF shows {GIF_MOST_FPS} frames a second at most; name it {path.stem}.webp")
    suffix = path.suffix.lower()
    if suffix in (".mp4", ".wav"):
        instead = ""
        if suffix == ".mp4":
            instead = f", or name it {path.stem}.webp or {path.stem}.gif"
        require_extra("video", f"out={str(path)!r}", ["av"], instead)


def build_poster_path(path: Path) -> Path:
    """Build the path of a video's poster."""
    return path.with_suffix(".png")


def convert_to_videos(frames: Any) -> list[Video]:
    """Convert a pipeline's result to uint8 videos.

    Args:
        frames: a list of videos, each a list of Pillow's images, an array [F, H, W, 3] or a tensor
            [F, 3, H, W] of 0 to 1; an array or a tensor of videos along a first dimension; or a single such video.
    """
    # One video has four dimensions, and several have five.
    if isinstance(frames[0], Image.Image) or getattr(frames, "ndim", 5) == 4:
        frames = [frames]
    return [_convert_video(video) for video in frames]


def _convert_video(frames: Any) -> Video:
    if isinstance(frames, list | tuple) and isinstance(frames[0], Image.Image):
        return np.stack([np.asarray(frame.convert("RGB")) for frame in frames])
    if not isinstance(frames, np.ndarray):
        if hasattr(frames[0], "detach"):
            # A tensor may be on a GPU, and of a type that numpy lacks.
            frames = [frame.detach().float().cpu() for frame in frames]
        frames = np.stack(list(frames))
        # Tensors have the channels first; here they move to the end.
        if frames.shape[-1] != 3:
            frames = frames.transpose(0, 2, 3, 1)
    if frames.dtype == np.uint8:
        return cast(Video, frames)
    video: Video = np.rint(frames.astype(np.float32).clip(0, 1) * 255).astype(np.uint8)
    return video


def encode_video(video: Video, format: str, fps: float, texts: Mapping[str, str], sound: Sound | None = None) -> bytes:
    """Encode a video into the bytes of a file.

    Args:
        video: [F, H, W, 3].
        format: "mp4", "webp" or "gif"; an mp4 keeps the texts.
        fps: frames a second.
        texts: how it was made.
        sound: is cut or padded to the length of the video; only an mp4 keeps it.
    """
    if format == "mp4":
        return _encode_mp4(video, fps, texts, sound)
    # Pillow merges equal frames and adds their durations, so a file may have fewer frames than the video.
    images = [Image.fromarray(frame) for frame in video]
    if format == "webp":
        options = {"lossless": True, "duration": _divide_time(len(video), fps, unit_ms=1)}
    else:
        # A GIF counts hundredths of a second.
        options = {"disposal": 1, "duration": _divide_time(len(video), fps, unit_ms=10)}
    encoded = io.BytesIO()
    images[0].save(encoded, format=format, save_all=True, append_images=images[1:], loop=0, **options)
    return encoded.getvalue()


def encode_poster(video: Video, fps: float, texts: Mapping[str, str]) -> bytes:
    """Encode the first frame of a video into the bytes of a PNG, with the texts, the number of frames and the rate."""
    return encode_png(Image.fromarray(video[0]), {**texts, "frames": str(len(video)), "fps": f"{fps:g}"})


def encode_spritesheet(video: Video) -> bytes:
    """Encode up to 16 frames of a video, spread over its length, into the bytes of one PNG: row by row, four in a
    row."""
    count = min(len(video), SHEET_COLUMNS**2)
    frames = []
    for position in np.linspace(0, len(video) - 1, count):
        frame = Image.fromarray(video[round(position)])
        frame.thumbnail((SHEET_WIDTH, SHEET_WIDTH))
        frames.append(frame)
    width, height = frames[0].size
    columns = min(count, SHEET_COLUMNS)
    rows = math.ceil(count / columns)
    sheet = Image.new("RGB", (columns * width, rows * height))
    for k, frame in enumerate(frames):
        row, column = divmod(k, columns)
        sheet.paste(frame, (column * width, row * height))
    return encode_png(sheet, {})


def read_video(path: str | Path, option: str, count: int | None = None) -> list[Image.Image]:
    """Read the frames of a video that an option names, in RGB: a GIF or WebP by Pillow, others by PyAV.

    Args:
        path, option: the file, and the option.
        count: how many frames to read; all by default.

    Raises:
        ModelError: if it cannot be read, has fewer frames than `count`, or more than `MAX_FRAMES` would be read.
    """
    decode = _decode_animation
    if Path(path).suffix.lower() not in (".gif", ".webp"):
        require_extra("video", f"{option}={str(path)!r}", ["av"])
        decode = _decode_stream
    try:
        content = io.BytesIO(files.read_file(path, MAX_PICTURE_BYTES))
        # One more than the limit shows that there are too many.
        frames = [*itertools.islice(decode(content), min(count or MAX_FRAMES + 1, MAX_FRAMES + 1))]
    except DECODE_ERRORS as error:
        raise ModelError(f"{option}={str(path)!r} cannot be read as a video: {files.describe_error(error)}") from error
    if len(frames) > MAX_FRAMES:
        raise ModelError(f"{option}={str(path)!r} has more than {MAX_FRAMES} frames; give a smaller --frames N")
    if not frames or len(frames) < (count or 0):
        raise ModelError(f"{option}={str(path)!r} has {len(frames)} frames, and frames={count or 1}: ask for fewer")
    return frames


def _decode_animation(content: io.BytesIO) -> Iterator[Image.Image]:
    with Image.open(content) as image:
        for frame in ImageSequence.Iterator(image):
            yield frame.convert("RGB")


def _decode_stream(content: io.BytesIO) -> Iterator[Image.Image]:
    require_extra("video", "a video other than GIF and WebP", ["av"])
    import av

    with av.open(content) as container:
        if not container.streams.video:
            raise ValueError("there is no image in it")
        for frame in container.decode(video=0):
            yield frame.to_image()


def _encode_mp4(video: Video, fps: float, texts: Mapping[str, str], sound: Sound | None) -> bytes:
    require_extra("video", "an MP4", ["av"])
    import av

    encoded = io.BytesIO()
    height, width = video.shape[1:3]
    # With this option, packets of both streams alternate in the file, although the whole sound is written first.
    options = {"max_interleave_delta": "0"}
    with av.open(encoded, mode="w", format="mp4", container_options=options) as container:
        container.metadata["comment"] = json.dumps(dict(texts))
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(_MAX_DENOMINATOR))
        stream.width = width
        stream.height = height
        # Players expect colors at half resolution, which needs even sides.
        stream.pix_fmt = "yuv444p" if height % 2 or width % 2 else "yuv420p"
        stream.options = {"crf": CRF}
        if sound is not None:
            sound_stream = add_sound_stream(container, sound)
            write_samples(container, sound_stream, sound.fit_length(len(video) / fps))
        for picture in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return encoded.getvalue()


def _divide_time(count: int, fps: float, unit_ms: int) -> list[int]:
    """Return the milliseconds of each frame of a video, in whole units. Their sum does not drift from the rate."""
    ends = [round(1000 * k / fps / unit_ms) * unit_ms for k in range(count + 1)]
    return [max(unit_ms, end - begin) for begin, end in itertools.pairwise(ends)]
