"""The folder of an evaluation: its job, a row for each image, and their means.

    job.json          facts that all images have in common; another job is refused
    pictures.jsonl    a line for each image: setting, caption, seed, seconds, scores
    pictures/         the images, a folder for each setting
    evaluation.json   the means (`summarize_settings`)

An image is not generated again if its row and its file are there.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from PIL import Image

from ditile.distributed import files
from ditile.plan.errors import LoadError, ModelError
from ditile.runner.model_files import read_json_object
from ditile.runner.requests.pictures import encode_png
from ditile_lab.quality.captions import Caption
from ditile_lab.quality.options import ORIGINAL, EvaluationSetting
from ditile_lab.rows import Row, RowFile, list_values, write_json_file

JOB_FILE = "job.json"
ROWS_FILE = "pictures.jsonl"
IMAGES_FOLDER = "pictures"
FIELD_TYPES = {"plan": str, "cache": str, "caption": int, "prompt": str, "seed": int}
"""The fields that a row must have."""
ImageKey = tuple[EvaluationSetting, int]
"""A setting and the place of a caption."""


class EvaluationFolder:
    """The files of an evaluation.

    Args:
        out: the folder; it need not exist.

    Attributes:
        rows: the file of rows.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.rows = RowFile(out / ROWS_FILE, "plan")

    def image_path(self, setting: EvaluationSetting, place: int) -> Path:
        """Return the file of an image."""
        return self.out / IMAGES_FOLDER / make_setting_slug(setting) / f"{place:05}.png"

    def check_same_job(self, job: Row) -> None:
        """Raise `ModelError` if the folder has images of another job, `LoadError` if its job cannot be read."""
        path = self.out / JOB_FILE
        if not path.exists():
            if self.out.exists() and any(self.out.iterdir()):
                raise ModelError(
                    f"out={str(self.out)!r} has files and no {JOB_FILE}; give a new folder, or an evaluation's"
                )
            return
        stored_job = read_json_object(path)
        for name in sorted({*stored_job, *job}):
            if stored_job.get(name) != job.get(name):
                raise ModelError(
                    f"out={str(self.out)!r} has images of {name}={stored_job.get(name)!r}, and this is "
                    f"{name}={job.get(name)!r}; give another folder"
                )

    def read_rows_on_disk(self, captions: Sequence[Caption], seed: int) -> dict[ImageKey, Row]:
        """Read the rows of images with an existing file.

        Raises:
            ModelError: if there are images of other captions or seeds.
            LoadError: if the file cannot be read.
        """
        rows_on_disk = {}
        for row in self.rows.read():
            if not all(isinstance(row.get(name), cls) for name, cls in FIELD_TYPES.items()):
                raise LoadError(f"{self.rows.path} has a line that is not an image's; give another --out")
            setting = EvaluationSetting(row["plan"], row["cache"])
            place = row["caption"]
            # Fewer captions than before are allowed: rows beyond them stay unchanged.
            if 0 <= place < len(captions):
                expected = (captions[place].text, seed + place)
                if (row["prompt"], row["seed"]) != expected:
                    raise ModelError(
                        f"out={str(self.out)!r} has images of other captions: number {place} is {row['prompt']!r}, "
                        f"seed {row['seed']}, and now {expected[0]!r}, seed {expected[1]}; give another folder"
                    )
            if self.image_path(setting, place).is_file():
                rows_on_disk[setting, place] = row
        return rows_on_disk

    def create_folder(self, job: Row) -> None:
        """Create the folder, and write the file of the job. Raises `ModelError` if it cannot be written."""
        try:
            self.out.mkdir(exist_ok=True)
            if not (self.out / JOB_FILE).exists():
                write_json_file(self.out / JOB_FILE, dict(job))
        except OSError as error:
            raise ModelError(f"out={str(self.out)!r} cannot be written: {error.strerror}") from error

    def write_image_scores(self, judged: Mapping[ImageKey, Row], captions: Sequence[Caption], seed: int) -> None:
        """Write scores into the rows now in the folder, since another process may have added rows."""
        rows_on_disk = self.read_rows_on_disk(captions, seed)
        for key, row in rows_on_disk.items():
            for name in ("scores", "resize"):
                # Settings without images of all captions are not judged.
                if name in judged.get(key, {}):
                    row[name] = judged[key][name]
        # Rows without an image are dropped, so that it is generated again.
        self.rows.replace(rows_on_disk.values())


def save_image_with_texts(image: Image.Image, path: Path, texts: Mapping[str, str]) -> None:
    """Write an image as PNG, with texts about how it was made. Raises `OSError` if it cannot be written."""
    files.write_atomically(path, encode_png(image, texts))


def make_setting_slug(setting: EvaluationSetting) -> str:
    """Return a readable, unique name for a setting's folder."""
    if setting == ORIGINAL:
        return str(setting)
    # A digest tells two settings with the same letters and different signs apart.
    digest = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:8]
    words = re.sub(r"[^\w.]+", "-", str(setting))[:60].strip("-")
    return f"{words}-{digest}"


def list_complete_settings(rows: Iterable[ImageKey], count: int) -> list[EvaluationSetting]:
    """Return the settings with images of the first `count` captions, the original first, others in their order."""
    places: dict[EvaluationSetting, set[int]] = {ORIGINAL: set()}
    for setting, place in rows:
        places.setdefault(setting, set()).add(place)
    return [setting for setting, caption_places in places.items() if caption_places >= set(range(count))]


def summarize_settings(rows: Mapping[ImageKey, Row], settings: Iterable[EvaluationSetting], count: int) -> list[Row]:
    """Summarize each setting: means over captions of scores and shares, medians of seconds and of their ratios."""
    summaries = []
    for setting in settings:
        setting_rows = [rows[setting, place] for place in range(count)]
        ratios = []
        for place, row in enumerate(setting_rows):
            # The original's seconds are from the same turn, or from its own session if there were no turns.
            original_seconds = row["original_s"] or rows[ORIGINAL, place]["seconds"]
            ratios.append(row["seconds"] / original_seconds)
        median_ratio = statistics.median(ratios)
        scores = list_values(setting_rows, "scores")
        summary = {
            "setting": str(setting),
            "plan": setting.plan,
            "cache": setting.cache,
            "world": setting.world_size,
            "pictures": count,
            "seconds": statistics.median(list_values(setting_rows, "seconds")),
            "latency_ratio": median_ratio,
            "latency_lowest": min(ratios),
            "latency_highest": max(ratios),
            "speedup": 1 / median_ratio,
            "blocks_saved": statistics.fmean(list_values(setting_rows, "blocks_saved")),
        }
        for name in scores[0]:
            summary[name] = statistics.fmean(list_values(scores, name))
        summary["psnr_lowest"] = min(list_values(scores, "psnr"))
        summaries.append(summary)
    return summaries
