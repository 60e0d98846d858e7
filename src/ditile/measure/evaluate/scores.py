"""Judges the pictures of an evaluation: a score for each, and the FID of sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ditile.measure.evaluate.captions import Caption
from ditile.measure.evaluate.metrics import (
    Metric,
    Picture,
    load_available_metrics,
    load_inception_features,
    resize_picture,
)
from ditile.measure.evaluate.options import ORIGINAL, EvaluationSetting, JudgeOptions, list_pictures
from ditile.measure.evaluate.store import EvaluationFolder, PictureKey, PictureRow
from ditile.plan.errors import ModelError
from ditile.plan.extras import require_extra
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.pictures import read_picture

NUM_FEATURES = 2048


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a panel measured; the scores of single pictures are in their rows.

    Attributes:
        metrics: name -> title and digits.
        absent: what could not be measured -> why.
        frechet: the features of the FID, and how many they are; None without.
        references: how many pictures, and which; None without.
        distances: of each setting by its text; empty without an FID.
    """

    metrics: dict[str, Any]
    absent: dict[str, str]
    frechet: dict[str, Any] | None
    references: dict[str, Any] | None
    distances: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class MetricPanel:
    """The metrics that can be measured.

    Attributes:
        extract_features: makes the features of a picture for the FID; None without.
        side: pixels that pictures get first; None leaves them.
        references: reference pictures.
        whose: which these are.
    """

    metrics: list[Metric]
    absent: dict[str, str]
    extract_features: Callable[[Picture], Tensor] | None
    side: int | None
    references: list[Path]
    whose: str

    @classmethod
    def from_options(cls, judge: JudgeOptions, model: str, captions: Sequence[Caption]) -> MetricPanel:
        """The metrics that can be measured here, with the given options.

        Raises:
            ModelError: if what was asked for cannot be had.
        """
        metrics, absent = load_available_metrics(model, [caption.text for caption in captions], judge.clip)
        references, whose = find_reference_pictures(judge.references, captions)
        is_single = len(captions) == 1 or len(references) == 1
        features = "sets of one picture have no covariance" if is_single else load_inception_features()
        if not isinstance(features, str):
            return cls(metrics, absent, features, judge.resize, references, whose)
        if judge.references is not None:
            raise ModelError(f"references={judge.references!r} are for the FID, which cannot be taken: {features}")
        return cls(metrics, absent | {"fid": features}, None, judge.resize, references, whose)

    def judge_settings(
        self,
        store: EvaluationFolder,
        rows: dict[PictureKey, PictureRow],
        settings: Sequence[EvaluationSetting],
        count: int,
    ) -> Judgement:
        """Scores every picture that has no score yet, and computes the distances of sets.

        Args:
            store, rows: the pictures and what is known of them.
            settings: the original first.
            count: of captions.

        Raises:
            ModelError: if a picture cannot be read.
        """
        wanted = {(s, k): self._prepare_missing_metrics(rows[s, k]) for s in settings for k in range(count)}
        fid = None if self.extract_features is None else SetDistances(self.extract_features)
        if fid is not None:
            fid.add_references(resize_picture(_read_pixels(path, "references"), self.side) for path in self.references)
        distances: dict[str, dict[str, float]] = {}
        with show_progress_bar("judged", len(settings) * count) as advance:
            for setting in settings:
                for picture in self._score_pictures(store, rows, setting, wanted, count):
                    if fid is not None:
                        fid.add_picture(picture, is_original=setting == ORIGINAL)
                    advance(1)
                distances[str(setting)] = {} if fid is None else fid.take_distances(is_original=setting == ORIGINAL)
        return Judgement(
            metrics={metric.name: {"title": metric.title, "digits": metric.digits} for metric in self.metrics},
            absent=self.absent,
            distances=distances,
            frechet=None if fid is None else {"space": "inception (torch-fidelity)", "features": NUM_FEATURES},
            references={"count": len(self.references), "of": self.whose} if self.references else None,
        )

    def _prepare_missing_metrics(self, row: PictureRow) -> list[Metric]:
        """The metrics that a row lacks; scores of another size are dropped, and measured again."""
        if row.get("resize", 0) != self.side:
            row["scores"], row["resize"] = {}, self.side
        names = {metric.name for metric in self.metrics}
        row["scores"] = {name: value for name, value in row["scores"].items() if name in names}
        return [metric for metric in self.metrics if metric.name not in row["scores"]]

    def _score_pictures(
        self,
        store: EvaluationFolder,
        rows: Mapping[PictureKey, PictureRow],
        setting: EvaluationSetting,
        wanted: Mapping[PictureKey, list[Metric]],
        count: int,
    ) -> Iterator[Picture]:
        """Gives each picture of a setting the scores that it lacks, and yields it."""
        for place in range(count):
            whole = _read_pixels(store.picture_path(setting, place), "out")
            picture, original, row = resize_picture(whole, self.side), whole, rows[setting, place]
            if wanted[setting, place]:
                original = resize_picture(_read_pixels(store.picture_path(ORIGINAL, place), "out"), self.side)
            for metric in wanted[setting, place]:
                if setting == ORIGINAL and metric.exact is not None:
                    row["scores"][metric.name] = metric.exact
                else:
                    judged_picture = whole if metric.whole else picture
                    row["scores"][metric.name] = metric.measure(judged_picture, original, row["prompt"])
            yield picture


class SetDistances:
    """The FID of sets of pictures, one set after the other, to the original's and to reference pictures.

    Args:
        extract_features: see `load_inception_features`.
    """

    def __init__(self, extract_features: Callable[[Picture], Tensor]) -> None:
        require_extra("evaluate", "the FID", ["torchmetrics"])
        from torchmetrics.image.fid import FrechetInceptionDistance

        # Features are made once and given to both distances, which then have nothing to extract.
        passed: Any = nn.Identity()
        passed.num_features = NUM_FEATURES
        self._extract, self._has_references = extract_features, False
        self._to_original, self._to_references = (
            FrechetInceptionDistance(passed, reset_real_features=False) for _ in range(2)
        )

    def add_references(self, pictures: Iterable[Picture]) -> None:
        """Adds reference pictures."""
        for picture in pictures:
            self._to_references.update(self._extract(picture), real=True)
            self._has_references = True

    def add_picture(self, picture: Picture, *, is_original: bool) -> None:
        """Adds a picture to the set. The set of the original must come first."""
        features = self._extract(picture)
        if is_original:
            self._to_original.update(features, real=True)
        for distance in (self._to_original, self._to_references):
            distance.update(features, real=False)

    def take_distances(self, *, is_original: bool) -> dict[str, float]:
        """The distances of the set, as fields of its row; the next set begins empty."""
        distances = {"frechet_original": 0.0 if is_original else max(0.0, float(self._to_original.compute()))}
        if self._has_references:
            distances["frechet_references"] = max(0.0, float(self._to_references.compute()))
        self._to_original.reset()
        self._to_references.reset()
        return distances


def _read_pixels(path: Path, option: str) -> Picture:
    """A picture `[H, W, 3]`. Raises `ModelError` if it cannot be read."""
    return np.array(read_picture(path, option))


def find_reference_pictures(folder: str | None, captions: Sequence[Caption]) -> tuple[list[Path], str]:
    """The reference pictures, and a phrase that says which these are.

    They are those that the captions describe if all of them are there, else all of the folder.
    """
    if folder is None:
        return [], ""
    named = [Path(folder, caption.image) for caption in captions if caption.image is not None]
    if len(named) == len(captions) and all(path.is_file() for path in named):
        return named, "the captions' own images"
    return list_pictures(Path(folder)), "all of the folder"
