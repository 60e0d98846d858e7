"""The Frechet distance between two sets of pictures, and the feature spaces that it is taken in.

The distance of two normal distributions (Dowson and Landau 1982) is `|m - n|^2 + tr(C + D - 2 (C D)^(1/2))`. It is the
FID (arXiv 1706.08500) if, and only if, features are those of the Inception of 2015; then it is called so. Where its
weights are not on disk, features are those of convolutions with fixed random weights: of pictures that are far from
ImageNet's, random networks tell distributions apart at least as well as trained ones (arXiv 2002.09797, section 3.2.2).
Such a distance has no published counterpart; it ranks settings, at equal numbers of pictures.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Picture = NDArray[np.uint8]
Matrix = NDArray[np.float64]
BATCH = 32
BROKEN = (ImportError, RuntimeError, AttributeError)
"""What importing a package raises that lacks another, or does not fit the torch that is here."""


class Space(Protocol):
    """Where features come from.

    Attributes:
        name: for people and files.
        is_inception: whether the distance is the FID.
    """

    name: str
    is_inception: bool

    def __call__(self, pictures: list[Picture]) -> Matrix:
        """Features `[n, d]` of pictures `[H, W, 3]` of any sizes."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean `[d]` and covariance `[d, d]` of the features of so many pictures."""

    count: int
    mean: Matrix
    covariance: Matrix

    @classmethod
    def of(cls, space: Space, pictures: Iterable[Picture]) -> Moments:
        """Those of some pictures, of which a few are held at a time.

        Raises:
            ValueError: if there is no picture.
        """
        count, mean, scatter = 0, np.zeros(0), np.zeros((0, 0))
        for batch in _batches(pictures):
            found = space(batch)
            own, n = found.mean(0), len(found)
            apart = found - own
            if not count:
                mean, scatter = np.zeros_like(own), np.zeros((len(own), len(own)))
            delta = own - mean  # Chan et al. 1979: no difference of large sums
            scatter = scatter + apart.T @ apart + np.outer(delta, delta) * (count * n / (count + n))
            mean, count = mean + delta * (n / (count + n)), count + n
        if not count:
            raise ValueError("there is no picture")
        return cls(count, mean, scatter / max(1, count - 1))


def frechet(a: Moments, b: Moments) -> float:
    """The squared Frechet distance of two normal distributions; 0 for equal ones."""
    root = _root(a.covariance)
    shared = np.linalg.eigvalsh(root @ b.covariance @ root)
    traces = np.trace(a.covariance) + np.trace(b.covariance) - 2 * np.sqrt(np.maximum(shared, 0)).sum()
    return max(0.0, float(((a.mean - b.mean) ** 2).sum() + traces))


def space() -> tuple[Space, str | None]:
    """The best space that is here, and why it is not that of the FID; nothing is downloaded."""
    why = []
    for package, kind in (("cleanfid", CleanFid), ("torch_fidelity", TorchFidelity)):
        if not importlib.util.find_spec(package):
            why.append(f"{package} is not installed")
        elif (file := _on_disk(kind.FILE)) is None:
            why.append(f"{package} is installed, but {kind.FILE} is not in torch's hub folder")
        else:
            try:
                found: Space = kind(file)
                return found, None
            except BROKEN as error:
                why.append(f"{package} cannot be imported: {line_of(error)}")
    return RandomConvolutions(), "; ".join(why)


class RandomConvolutions:
    """Means of 4 layers of 16 convolutions (3 x 3, ReLU, halved by averaging) with fixed random weights, at 128 px."""

    name, is_inception = "random-conv-64", False
    SIDE, CHANNELS, LAYERS = 128, 16, 4

    def __init__(self) -> None:
        random = np.random.Generator(np.random.PCG64(0))
        widths = (3, *(self.CHANNELS,) * self.LAYERS)
        shapes = [(out, into, 3, 3) for into, out in zip(widths, widths[1:], strict=False)]
        self._weights = [
            torch.from_numpy(random.standard_normal(shape) * (2 / (9 * shape[1])) ** 0.5).float() for shape in shapes
        ]

    @torch.inference_mode()
    def __call__(self, pictures: list[Picture]) -> Matrix:
        """Features `[n, 64]`."""
        sized = [
            torch.nn.functional.interpolate(_tensor(p), (self.SIDE, self.SIDE), mode="bicubic", antialias=True)
            for p in pictures
        ]
        x, found = torch.cat(sized) / 127.5 - 1, []
        for weight in self._weights:
            x = torch.nn.functional.avg_pool2d(torch.nn.functional.conv2d(x, weight, padding=1).relu(), 2)
            found.append(x.mean((2, 3)))
        return torch.cat(found, 1).double().numpy()


class CleanFid:
    """The Inception of clean-fid (arXiv 2104.11222), which resizes as Pillow does."""

    name, is_inception = "inception (clean-fid)", True
    FILE = "inception-2015-12-05.pt"

    def __init__(self, file: Path) -> None:
        package: Any = importlib.import_module("cleanfid.inception_torchscript")
        self._model = package.InceptionV3W(str(file.parent), download=False).eval()
        self._resize: Any = importlib.import_module("cleanfid.resize").build_resizer("clean")

    @torch.inference_mode()
    def __call__(self, pictures: list[Picture]) -> Matrix:
        """Features `[n, 2048]`."""
        sized = np.stack([self._resize(picture) for picture in pictures]).transpose(0, 3, 1, 2)
        found: Matrix = self._model(torch.from_numpy(sized)).double().numpy()
        return found


class TorchFidelity:
    """The Inception of torch-fidelity, which torchmetrics takes too."""

    name, is_inception = "inception (torch-fidelity)", True
    FILE = "weights-inception-2015-12-05-6726825d.pth"

    def __init__(self, file: Path) -> None:
        package: Any = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")
        self._model = package.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], str(file)).eval()

    @torch.inference_mode()
    def __call__(self, pictures: list[Picture]) -> Matrix:
        """Features `[n, 2048]`."""
        [found] = zip(*(self._model(_tensor(p).to(torch.uint8)) for p in pictures), strict=True)
        features: Matrix = torch.cat(found).double().numpy()
        return features


def line_of(error: Exception) -> str:
    """An error on one short line."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def hub_file(name: str) -> Path | None:
    """A file of weights that torch's hub has stored; None if it has not."""
    path = Path(torch.hub.get_dir(), "checkpoints", name)
    return path if path.is_file() else None


def _on_disk(name: str) -> Path | None:
    """A file of Inception's weights, which clean-fid keeps among the temporary files."""
    other = Path(tempfile.gettempdir(), name)
    return hub_file(name) or (other if other.is_file() else None)


def _tensor(picture: Picture) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None].float()


def _root(matrix: Matrix) -> Matrix:
    values, vectors = np.linalg.eigh(matrix)
    root: Matrix = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    return root


def _batches(pictures: Iterable[Picture]) -> Iterable[list[Picture]]:
    batch: list[Picture] = []
    for picture in pictures:
        batch.append(picture)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
