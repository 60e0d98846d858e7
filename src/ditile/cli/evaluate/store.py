"""The folder of an evaluation: its job, a row for each picture, and what they come to.

    job.json          what all pictures have in common; another job is refused
    pictures.jsonl    a line for each picture: setting, caption, seed, seconds, scores
    pictures/         the pictures, a folder for each setting
    evaluation.json   the means (`summed_up`), which `ditile generate --min-psnr` reads

A picture is there if its row and its file are, and is not drawn again.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ditile.cli import files
from ditile.cli.evaluate.captions import Caption
from ditile.cli.evaluate.options import ORIGINAL, Setting
from ditile.errors import LoadError, ModelError

JOB, ROWS, PICTURES = "job.json", "pictures.jsonl", "pictures"
Row = dict[str, Any]
Key = tuple[Setting, int]
"""A setting and the place of a caption."""


class Store:
    """What a folder has.

    Args:
        out: the folder; it need not be there.
    """

    def __init__(self, out: Path) -> None:
        self.out = out

    def path(self, setting: Setting, place: int) -> Path:
        """The file of a picture."""
        return self.out / PICTURES / slug(setting) / f"{place:05}.png"

    def check(self, job: Mapping[str, Any]) -> None:
        """Raises `ModelError` if the folder has pictures of another job, `LoadError` if that cannot be read."""
        path = self.out / JOB
        if not path.exists():
            if self.out.exists() and any(self.out.iterdir()):
                raise ModelError(f"out={str(self.out)!r} has files and no {JOB}; give a new folder, or an evaluation's")
            return
        try:
            there = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise LoadError(f"{path} is no readable JSON: {' '.join(str(error).split())}") from error
        for name in sorted({*there, *job}):
            if there.get(name) != job.get(name):
                raise ModelError(
                    f"out={str(self.out)!r} has pictures of {name}={there.get(name)!r}, and this is "
                    f"{name}={job.get(name)!r}; give another folder"
                )

    def rows(self, captions: Sequence[Caption], seed: int) -> dict[Key, Row]:
        """The rows of pictures that are there. A last line that was cut off is left out.

        Raises:
            ModelError: if there are pictures of other captions or seeds.
        """
        path = self.out / ROWS
        found: dict[Key, Row] = {}
        for row in filter(None, map(_row, path.read_text("utf-8").splitlines() if path.exists() else ())):
            setting, place = Setting(row["plan"], row["cache"]), row["caption"]
            asked = [captions[place].text, seed + place] if place < len(captions) else [row["prompt"], row["seed"]]
            if [row["prompt"], row["seed"]] != asked:
                raise ModelError(
                    f"out={str(self.out)!r} has pictures of other captions: number {place} is {row['prompt']!r}, seed "
                    f"{row['seed']}, and now {asked[0]!r}, seed {asked[1]}; give another folder"
                )
            if self.path(setting, place).is_file():
                found[setting, place] = row
        return found

    def begin(self, job: Mapping[str, Any]) -> None:
        """Makes the folder, and says what it is of.

        Raises:
            ModelError: if it cannot be written.
        """
        try:
            self.out.mkdir(exist_ok=True)
            if not (self.out / JOB).exists():
                files.write_json(self.out / JOB, dict(job))
        except OSError as error:
            raise ModelError(f"out={str(self.out)!r} cannot be written: {error.strerror}") from error

    def add(self, rows: Iterable[Row]) -> None:
        """Adds rows of pictures that are there."""
        path = self.out / ROWS
        cut = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + "".join(json.dumps(row) + "\n" for row in rows))

    def score(self, judged: Mapping[Key, Row], captions: Sequence[Caption], seed: int) -> None:
        """Writes the scores of pictures into their rows as the folder has them now: others may have added theirs."""
        there = self.rows(captions, seed)
        for key in there.keys() & judged.keys():
            there[key] |= {name: judged[key][name] for name in ("scores", "resize")}
        files.write(self.out / ROWS, "".join(json.dumps(row) + "\n" for row in there.values()))


def slug(setting: Setting) -> str:
    """A folder's name: readable, and of this setting alone."""
    if setting == ORIGINAL:
        return str(setting)
    digest = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:8]
    return re.sub(r"[^\w.]+", "-", str(setting))[:60].strip("-") + f"-{digest}"


def complete(rows: Iterable[Key], count: int) -> list[Setting]:
    """The settings with pictures of the first `count` captions, the original first, others as they come."""
    places: dict[Setting, set[int]] = {ORIGINAL: set()}
    for setting, place in rows:
        places.setdefault(setting, set()).add(place)
    return [setting for setting, found in places.items() if found >= set(range(count))]


def ratio(row: Row, rows: Mapping[Key, Row]) -> float:
    """How long a picture took, over the original's: of the same turn, or else of its own row."""
    original = row["original_s"] or rows[ORIGINAL, row["caption"]]["seconds"]
    return float(row["seconds"] / original)


def summed_up(rows: Mapping[Key, Row], settings: Iterable[Setting], count: int) -> list[Row]:
    """A row for each setting: means over captions of scores and shares, medians of seconds and of their ratios."""
    made: list[Row] = []
    for setting in settings:
        mine = [rows[setting, place] for place in range(count)]
        ratios = [ratio(row, rows) for row in mine]
        scores = {name: statistics.fmean(row["scores"][name] for row in mine) for name in mine[0]["scores"]}
        made.append(
            {
                "setting": str(setting), "plan": setting.plan, "cache": setting.cache, "world": setting.world,
                "pictures": count, "seconds": statistics.median(row["seconds"] for row in mine),
                "latency_ratio": statistics.median(ratios), "latency_lowest": min(ratios),
                "latency_highest": max(ratios), "speedup": 1 / statistics.median(ratios),
                "blocks_saved": statistics.fmean(row["blocks_saved"] for row in mine), **scores,
                "psnr_lowest": min(row["scores"]["psnr"] for row in mine),
            }
        )  # fmt: skip
    return made


def front(rows: Iterable[Row]) -> list[Row]:
    """The settings that no other beats in both latency and PSNR, the fastest first."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["latency_ratio"], -row["psnr"])):
        if not kept or row["psnr"] > kept[-1]["psnr"]:
            kept.append(row)
    return kept


def _row(line: str) -> Row | None:
    """A row, or None for a line that was cut off."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"plan", "cache", "caption", "prompt", "seed"} <= row.keys() else None
