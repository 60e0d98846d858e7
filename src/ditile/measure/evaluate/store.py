"""The folder of an evaluation: its job, a row for each picture, and their means.

    job.json          what all pictures have in common; another job is refused
    pictures.jsonl    a line for each picture: setting, caption, seed, seconds, scores
    pictures/         the pictures, a folder for each setting
    evaluation.json   the means (`summarize_settings`), which `ditile generate --min-psnr` reads

A picture is not drawn again if its row and its file are there.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ditile.distributed import files
from ditile.measure.evaluate.captions import Caption
from ditile.measure.evaluate.options import ORIGINAL, EvaluationSetting
from ditile.plan.errors import LoadError, ModelError

JOB_FILE = "job.json"
ROWS_FILE = "pictures.jsonl"
PICTURES_FOLDER = "pictures"
MAX_ROWS_BYTES = 2**30
IN_A_ROW = {"plan": str, "cache": str, "caption": int, "prompt": str, "seed": int}
"""What a row must have, and its types."""
PictureRow = dict[str, Any]
PictureKey = tuple[EvaluationSetting, int]
"""A setting and the place of a caption."""


class EvaluationFolder:
    """The files of an evaluation.

    Args:
        out: the folder; it need not exist.
    """

    def __init__(self, out: Path) -> None:
        self.out = out

    def picture_path(self, setting: EvaluationSetting, place: int) -> Path:
        """The file of a picture."""
        return self.out / PICTURES_FOLDER / make_setting_slug(setting) / f"{place:05}.png"

    def check_same_job(self, job: Mapping[str, Any]) -> None:
        """Raises `ModelError` if the folder has pictures of another job, `LoadError` if that cannot be read."""
        path = self.out / JOB_FILE
        if not path.exists():
            if self.out.exists() and any(self.out.iterdir()):
                raise ModelError(
                    f"out={str(self.out)!r} has files and no {JOB_FILE}; give a new folder, or an evaluation's"
                )
            return
        try:
            stored_job = files.parse_json(files.read_text(path))
        except (OSError, ValueError) as error:
            raise LoadError(f"{path} is no readable JSON: {' '.join(str(error).split())}") from error
        if not isinstance(stored_job, dict):
            raise LoadError(f"{path} is no job of an evaluation; give another folder")
        for name in sorted({*stored_job, *job}):
            if stored_job.get(name) != job.get(name):
                raise ModelError(
                    f"out={str(self.out)!r} has pictures of {name}={stored_job.get(name)!r}, and this is "
                    f"{name}={job.get(name)!r}; give another folder"
                )

    def read_rows_on_disk(self, captions: Sequence[Caption], seed: int) -> dict[PictureKey, PictureRow]:
        """The rows of pictures whose files exist. A line that was cut off is ignored.

        Raises:
            ModelError: if there are pictures of other captions or seeds.
            LoadError: if the file cannot be read.
        """
        path = self.out / ROWS_FILE
        rows_on_disk: dict[PictureKey, PictureRow] = {}
        try:
            lines = files.read_file(path, MAX_ROWS_BYTES).decode().splitlines() if path.exists() else []
        except (OSError, ValueError) as error:
            raise LoadError(f"{path} cannot be read: {error}") from error
        for row in filter(None, map(_parse_picture_row, lines)):
            setting = EvaluationSetting(row["plan"], row["cache"])
            place = row["caption"]
            expected = [captions[place].text, seed + place] if place < len(captions) else [row["prompt"], row["seed"]]
            if [row["prompt"], row["seed"]] != expected:
                raise ModelError(
                    f"out={str(self.out)!r} has pictures of other captions: number {place} is {row['prompt']!r}, seed "
                    f"{row['seed']}, and now {expected[0]!r}, seed {expected[1]}; give another folder"
                )
            if self.picture_path(setting, place).is_file():
                rows_on_disk[setting, place] = row
        return rows_on_disk

    def create_folder(self, job: Mapping[str, Any]) -> None:
        """Makes the folder, and writes the file of the job.

        Raises:
            ModelError: if it cannot be written.
        """
        try:
            self.out.mkdir(exist_ok=True)
            if not (self.out / JOB_FILE).exists():
                files.write_json_file(self.out / JOB_FILE, dict(job))
        except OSError as error:
            raise ModelError(f"out={str(self.out)!r} cannot be written: {error.strerror}") from error

    def append_picture_rows(self, rows: Iterable[PictureRow]) -> None:
        """Appends the rows of pictures whose files exist."""
        path = self.out / ROWS_FILE
        has_cut_line = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * has_cut_line + "".join(json.dumps(row) + "\n" for row in rows))

    def write_picture_scores(
        self, judged: Mapping[PictureKey, PictureRow], captions: Sequence[Caption], seed: int
    ) -> None:
        """Writes scores into the rows that the folder has now, to which another process may have added rows."""
        rows_on_disk = self.read_rows_on_disk(captions, seed)
        for key in rows_on_disk.keys() & judged.keys():
            rows_on_disk[key] |= {name: judged[key][name] for name in ("scores", "resize")}
        files.write_atomically(self.out / ROWS_FILE, "".join(json.dumps(row) + "\n" for row in rows_on_disk.values()))


def make_setting_slug(setting: EvaluationSetting) -> str:
    """The name of a setting's folder, which is readable and unique."""
    if setting == ORIGINAL:
        return str(setting)
    digest = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:8]
    return re.sub(r"[^\w.]+", "-", str(setting))[:60].strip("-") + f"-{digest}"


def list_complete_settings(rows: Iterable[PictureKey], count: int) -> list[EvaluationSetting]:
    """The settings with pictures of the first `count` captions, the original first, others as they come."""
    places: dict[EvaluationSetting, set[int]] = {ORIGINAL: set()}
    for setting, place in rows:
        places.setdefault(setting, set()).add(place)
    return [setting for setting, caption_places in places.items() if caption_places >= set(range(count))]


def compute_latency_ratio(row: PictureRow, rows: Mapping[PictureKey, PictureRow]) -> float:
    """The seconds of a picture over those of the original in the same turn, or else in the original's own row."""
    original = row["original_s"] or rows[ORIGINAL, row["caption"]]["seconds"]
    return float(row["seconds"] / original)


def summarize_settings(
    rows: Mapping[PictureKey, PictureRow], settings: Iterable[EvaluationSetting], count: int
) -> list[PictureRow]:
    """A row for each setting: means over captions of scores and shares, medians of seconds and of their ratios."""
    summaries: list[PictureRow] = []
    for setting in settings:
        setting_rows = [rows[setting, place] for place in range(count)]
        ratios = [compute_latency_ratio(row, rows) for row in setting_rows]
        scores = {
            name: statistics.fmean(row["scores"][name] for row in setting_rows) for name in setting_rows[0]["scores"]
        }
        summaries.append(
            {
                "setting": str(setting),
                "plan": setting.plan,
                "cache": setting.cache,
                "world": setting.world_size,
                "pictures": count,
                "seconds": statistics.median(row["seconds"] for row in setting_rows),
                "latency_ratio": statistics.median(ratios),
                "latency_lowest": min(ratios),
                "latency_highest": max(ratios),
                "speedup": 1 / statistics.median(ratios),
                "blocks_saved": statistics.fmean(row["blocks_saved"] for row in setting_rows),
                **scores,
                "psnr_lowest": min(row["scores"]["psnr"] for row in setting_rows),
            }
        )
    return summaries


def select_pareto_front(rows: Iterable[PictureRow]) -> list[PictureRow]:
    """The settings that no other beats in both latency and PSNR, the fastest first."""
    pareto_rows: list[PictureRow] = []
    for row in sorted(rows, key=lambda row: (row["latency_ratio"], -row["psnr"])):
        if not pareto_rows or row["psnr"] > pareto_rows[-1]["psnr"]:
            pareto_rows.append(row)
    return pareto_rows


def _parse_picture_row(line: str) -> PictureRow | None:
    """A row, or None for a line that was cut off."""
    try:
        row = files.parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in IN_A_ROW.items()):
        return None
    return row if row["caption"] >= 0 else None
