"""Judges the pictures of an evaluation: a score for each, and Frechet distances between sets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ditile.cli.evaluate import frechet
from ditile.cli.evaluate.captions import Caption
from ditile.cli.evaluate.frechet import Moments, Picture, Space
from ditile.cli.evaluate.metrics import Metric, load_available_metrics, resize_picture
from ditile.cli.evaluate.options import ORIGINAL, EvaluationSetting, JudgeOptions, list_pictures
from ditile.cli.evaluate.store import EvaluationFolder, PictureKey, PictureRow
from ditile.errors import LoadError


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a panel found; scores of single pictures are in their rows.

    Attributes:
        metrics: name -> title and digits.
        absent: what could not be measured -> why.
        frechet: the space of the distances.
        references: how many pictures, and which; None without.
        distances: of each setting by its text.
    """

    metrics: dict[str, Any]
    absent: dict[str, str]
    frechet: dict[str, Any]
    references: dict[str, Any] | None
    distances: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class MetricPanel:
    """The metrics that are taken.

    Attributes:
        side: pixels that pictures get first; None leaves them.
        references: reference pictures.
        why: there is no Inception.
    """

    metrics: list[Metric]
    absent: dict[str, str]
    space: Space
    why: str | None
    side: int | None
    references: list[Path]
    whose: str

    @classmethod
    def from_options(cls, judge: JudgeOptions, model: str, captions: Sequence[Caption]) -> MetricPanel:
        """What can be measured here, as asked for.

        Raises:
            ModelError: if what was asked for cannot be had.
        """
        metrics, absent = load_available_metrics(model, [caption.text for caption in captions], judge.clip)
        space, why = frechet.space()
        references, whose = find_reference_pictures(judge.references, captions)
        return cls(metrics, absent, space, why, judge.resize, references, whose)

    def judge_settings(
        self,
        store: EvaluationFolder,
        rows: dict[PictureKey, PictureRow],
        settings: Sequence[EvaluationSetting],
        count: int,
    ) -> Judgement:
        """Scores every picture that has no score yet, and takes the distances.

        Raises:
            LoadError: if a picture cannot be read.
        """
        wanted = {(s, k): self._prepare_missing_metrics(rows[s, k]) for s in settings for k in range(count)}
        other_settings = [setting for setting in settings if setting != ORIGINAL]
        moments: dict[EvaluationSetting, Moments] = {}
        references = Moments.of(self.space, map(self._read_and_resize, self.references)) if self.references else None
        with _show_judging_progress(len(settings) * count) as advance:
            for setting in settings:
                pictures = self._score_and_yield_pictures(store, rows, setting, wanted, count, advance)
                moments[setting] = Moments.of(self.space, pictures)
        distances: dict[str, dict[str, float]] = {}
        for setting in [ORIGINAL, *other_settings]:
            setting_distances = {"frechet_original": frechet.frechet(moments[setting], moments[ORIGINAL])}
            setting_distances["frechet_original"] *= setting != ORIGINAL
            if references is not None:
                setting_distances["frechet_references"] = frechet.frechet(moments[setting], references)
            distances[str(setting)] = setting_distances
        return Judgement(
            metrics={metric.name: {"title": metric.title, "digits": metric.digits} for metric in self.metrics},
            absent=self.absent,
            distances=distances,
            frechet={
                "space": self.space.name,
                "is_inception": self.space.is_inception,
                "why": self.why,
                "features": len(moments[ORIGINAL].mean),
            },
            references={"count": len(self.references), "of": self.whose} if self.references else None,
        )

    def _prepare_missing_metrics(self, row: PictureRow) -> list[Metric]:
        """The metrics that a row lacks; those of pictures of another size are taken anew."""
        if row.get("resize", 0) != self.side:
            row["scores"], row["resize"] = {}, self.side
        names = {metric.name for metric in self.metrics}
        row["scores"] = {name: value for name, value in row["scores"].items() if name in names}
        return [metric for metric in self.metrics if metric.name not in row["scores"]]

    def _score_and_yield_pictures(
        self,
        store: EvaluationFolder,
        rows: Mapping[PictureKey, PictureRow],
        setting: EvaluationSetting,
        wanted: Mapping[PictureKey, list[Metric]],
        count: int,
        advance: Callable[[], None],
    ) -> Iterator[Picture]:
        """The pictures of a setting as they are judged; on its way past each gets its scores."""
        for place in range(count):
            whole = read_picture(store.picture_path(setting, place))
            picture, row = resize_picture(whole, self.side), rows[setting, place]
            original = (
                resize_picture(read_picture(store.picture_path(ORIGINAL, place)), self.side)
                if wanted[setting, place]
                else picture
            )
            for metric in wanted[setting, place]:
                if setting == ORIGINAL and metric.exact is not None:
                    row["scores"][metric.name] = metric.exact
                else:
                    judged_picture = whole if metric.whole else picture
                    row["scores"][metric.name] = metric.measure(judged_picture, original, row["prompt"])
            advance()
            yield picture

    def _read_and_resize(self, path: Path) -> Picture:
        return resize_picture(read_picture(path), self.side)


def read_picture(path: Path) -> Picture:
    """A picture `[H, W, 3]`.

    Raises:
        LoadError: if it cannot be read.
    """
    try:
        with Image.open(path) as image:
            return np.array(image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise LoadError(f"{str(path)!r} cannot be read as a picture: {error}") from error


def find_reference_pictures(folder: str | None, captions: Sequence[Caption]) -> tuple[list[Path], str]:
    """The reference pictures and which these are: those that the captions describe if all are there, else the folder's.

    The folder has some (`Judge` checks that).
    """
    if folder is None:
        return [], ""
    named = [Path(folder, caption.image) for caption in captions if caption.image is not None]
    if len(named) == len(captions) and all(path.is_file() for path in named):
        return named, "the captions' own images"
    return list_pictures(Path(folder)), "all of the folder"


@contextlib.contextmanager
def _show_judging_progress(total: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("judged"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=total)
        yield lambda: progress.advance(bar)
