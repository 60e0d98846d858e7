"""Judges the images of an evaluation: a score for each, and the FID of sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ditile.plan.errors import ModelError
from ditile.plan.extras import require_extra
from ditile.runner.requests.console import show_progress_bar
from ditile.runner.requests.pictures import read_picture
from ditile_lab.quality.captions import Caption
from ditile_lab.quality.metrics import (
    ImageArray,
    Metric,
    load_available_metrics,
    load_inception_features,
    resize_image,
)
from ditile_lab.quality.options import ORIGINAL, EvaluationSetting, JudgeOptions, list_images
from ditile_lab.quality.store import EvaluationFolder, ImageKey
from ditile_lab.rows import Row

NUM_FEATURES = 2048


@dataclass(frozen=True, slots=True)
class Judgement:
    """The measurements of a panel; the scores of single images are in their rows.

    Attributes:
        metrics: name -> title and digits.
        absent: metric that could not be measured -> reason.
        frechet: the kind and number of the FID's features; None without an FID.
        references: the number of images, and which they are; None if there are none.
        distances: text of a setting -> its distances; empty without an FID.
    """

    metrics: Row
    absent: dict[str, str]
    frechet: Row | None = None
    references: Row | None = None
    distances: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetricPanel:
    """The metrics that can be measured.

    Attributes:
        extract_features: makes the features of an image for the FID; None without an FID.
        side: the side in pixels to which images are resized first; None leaves their size.
        references: reference images.
        whose: a phrase that says which images the references are.
    """

    metrics: list[Metric]
    absent: dict[str, str]
    extract_features: Callable[[ImageArray], Tensor] | None
    side: int | None
    references: list[Path]
    whose: str

    @classmethod
    def from_options(cls, judge: JudgeOptions, model: str, captions: Sequence[Caption]) -> MetricPanel:
        """Make a panel of the metrics that can be measured here, with the given options.

        Raises:
            ModelError: if a metric that an option needs cannot be measured.
        """
        metrics, absent = load_available_metrics(model, [caption.text for caption in captions], judge.clip)
        references, whose = find_reference_images(judge.references, captions)
        features: Callable[[ImageArray], Tensor] | str = "sets of one image have no covariance"
        if len(captions) > 1 and len(references) != 1:
            features = load_inception_features()
        if not isinstance(features, str):
            return cls(metrics, absent, features, judge.resize, references, whose)
        if judge.references is not None:
            raise ModelError(f"references={judge.references!r} are for the FID, which cannot be taken: {features}")
        return cls(metrics, absent | {"fid": features}, None, judge.resize, references, whose)

    def judge_settings(
        self,
        folder: EvaluationFolder,
        rows: Mapping[ImageKey, Row],
        settings: Sequence[EvaluationSetting],
        count: int,
    ) -> Judgement:
        """Score every image without a score, and compute the distances of sets.

        Args:
            folder, rows: the images and their rows.
            settings: the settings, the original first.

        Raises:
            ModelError: if an image cannot be read.
        """
        distances: dict[str, dict[str, float]] = {}
        frechet = None
        references = None
        fid = None
        if self.extract_features is not None:
            fid = SetDistances(self.extract_features)
            frechet = {"space": "inception (torch-fidelity)", "features": NUM_FEATURES}
            # References are added once for all settings, because the distance keeps their features.
            for path in self.references:
                fid.add_reference(resize_image(_read_pixels(path, "references"), self.side))
        if self.references:
            references = {"count": len(self.references), "of": self.whose}
        with show_progress_bar("judged", len(settings) * count) as advance:
            for setting in settings:
                is_original = setting == ORIGINAL
                for place in range(count):
                    image = self._score_image(folder, rows[setting, place], setting)
                    if fid is not None:
                        fid.add_image(image, is_original=is_original)
                    advance(1)
                distances[str(setting)] = {}
                if fid is not None:
                    distances[str(setting)] = fid.take_distances(is_original=is_original)
        metrics = {metric.name: {"title": metric.title, "digits": metric.digits} for metric in self.metrics}
        return Judgement(metrics, self.absent, frechet, references, distances)

    def _score_image(self, folder: EvaluationFolder, row: Row, setting: EvaluationSetting) -> ImageArray:
        """Give an image the scores missing in its row, and return it, resized."""
        # Scores at another size are not comparable, and are measured again.
        scores = {}
        if row.get("resize", 0) == self.side:
            scores = row["scores"]
        row["resize"] = self.side
        row["scores"] = {metric.name: scores[metric.name] for metric in self.metrics if metric.name in scores}
        place = row["caption"]
        whole = _read_pixels(folder.image_path(setting, place), "out")
        image = resize_image(whole, self.side)
        missing = [metric for metric in self.metrics if metric.name not in scores]
        if missing:
            original = resize_image(_read_pixels(folder.image_path(ORIGINAL, place), "out"), self.side)
        for metric in missing:
            score = metric.exact
            if score is None or setting != ORIGINAL:
                judged = whole if metric.whole else image
                score = metric.measure(judged, original, row["prompt"])
            row["scores"][metric.name] = score
        return image


class SetDistances:
    """The FID of sets of images, one set after the other, to the original's and to reference images.

    Args:
        extract_features: see `load_inception_features`.
    """

    def __init__(self, extract_features: Callable[[ImageArray], Tensor]) -> None:
        require_extra("evaluate", "the FID", ["torchmetrics"])
        from torchmetrics.image.fid import FrechetInceptionDistance

        # Features are made once and given to both distances, which then have nothing to extract.
        identity: Any = nn.Identity()
        identity.num_features = NUM_FEATURES
        self._extract = extract_features
        self._has_references = False
        self._to_original = FrechetInceptionDistance(identity, reset_real_features=False)
        self._to_references = FrechetInceptionDistance(identity, reset_real_features=False)

    def add_reference(self, image: ImageArray) -> None:
        """Add a reference image."""
        self._to_references.update(self._extract(image), real=True)
        self._has_references = True

    def add_image(self, image: ImageArray, *, is_original: bool) -> None:
        """Add an image to the set. The set of the original must come first."""
        features = self._extract(image)
        if is_original:
            self._to_original.update(features, real=True)
        self._to_original.update(features, real=False)
        self._to_references.update(features, real=False)

    def take_distances(self, *, is_original: bool) -> dict[str, float]:
        """Return the distances of the set as fields of its row, and begin an empty set."""
        # Rounding can make a distance of equal sets negative.
        distances = {"frechet_original": 0.0}
        if not is_original:
            distances["frechet_original"] = max(0.0, float(self._to_original.compute()))
        if self._has_references:
            distances["frechet_references"] = max(0.0, float(self._to_references.compute()))
        # The features of the real images stay because of `reset_real_features`.
        self._to_original.reset()
        self._to_references.reset()
        return distances


def _read_pixels(path: Path, option: str) -> ImageArray:
    """Read an image `[H, W, 3]`. Raises `ModelError` if it cannot be read."""
    return np.array(read_picture(path, option))


def find_reference_images(folder: str | None, captions: Sequence[Caption]) -> tuple[list[Path], str]:
    """Return the reference images, and a phrase about their origin.

    They are the images that the captions describe if all of them exist, otherwise all images of the folder.
    """
    if folder is None:
        return [], ""
    paths = [Path(folder, caption.image) for caption in captions if caption.image is not None]
    if len(paths) == len(captions) and all(path.is_file() for path in paths):
        return paths, "the captions' own images"
    return list_images(Path(folder)), "all of the folder"
