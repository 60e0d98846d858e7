"""`ditile evaluate`: captions, scores of pictures, means, resumed rows, and the files that it writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ditile.cli import main
from ditile_lab.quality import command, scores
from ditile_lab.quality.captions import Caption, load_captions
from ditile_lab.quality.metrics import compute_psnr, compute_ssim
from ditile_lab.quality.options import ORIGINAL, EvaluationSetting
from ditile_lab.quality.scores import SetDistances
from ditile_lab.quality.store import ImageKey, summarize_settings
from ditile_lab.rows import Row
from tests.cli.test_cli import refused
from tests.pool import fork_ranks

pytestmark = pytest.mark.usefixtures("elsewhere", "forked_ranks")

SETTING = EvaluationSetting("pipefusion=2", "F=1")


def mean_colors(picture: Any) -> torch.Tensor:
    """Features in place of Inception's."""
    return torch.from_numpy(picture).double().mean((0, 1))[None]


def test_coco_gives_the_first_caption_of_each_image_in_the_order_of_ids(tmp_path: Path) -> None:
    """A failure means that two runs of the published protocol draw other captions."""
    path = tmp_path / "captions.json"
    every = [(9, 4, "late"), (7, 30, "second"), (7, 11, " first\n of 7 "), (9, 3, " "), (2, 5, "of 2")]
    content = {
        "images": [{"id": 7, "file_name": "7.jpg"}, {"id": 2, "file_name": "2.jpg"}],
        "annotations": [{"image_id": image, "id": number, "caption": text} for image, number, text in every],
    }
    path.write_text(json.dumps(content))
    found = load_captions(f"coco:{path}", None, 10)
    assert found == [Caption("of 2", "2.jpg"), Caption("first of 7", "7.jpg"), Caption("late", None)]
    assert load_captions(f"coco:{path}", 2, 10) == found[:2]


def row(setting: EvaluationSetting, place: int, seconds: float = 1.0, psnr: float = 30.0, **more: Any) -> Row:
    return {
        "plan": setting.plan, "cache": setting.cache, "caption": place, "prompt": f"caption {place}", "seed": place,
        "seconds": seconds, "original_s": 2.0, "original_again_psnr": None, "blocks_saved": 0.5,
        "scores": {"psnr": psnr, "ssim": 0.9},
    } | more  # fmt: skip


def test_means_and_ratios(tmp_path: Path) -> None:
    """Ratios are taken caption by caption. A failure means that the table says something else than was measured."""
    rows: dict[ImageKey, Row] = {}
    for k, (seconds, psnr) in enumerate([(1.0, 30.0), (4.0, 40.0), (0.5, 50.0)]):
        rows[ORIGINAL, k] = row(ORIGINAL, k, seconds=8.0, original_s=8.0, psnr=100.0)
        rows[SETTING, k] = row(SETTING, k, seconds=seconds, psnr=psnr)
    original, found = summarize_settings(rows, [ORIGINAL, SETTING], 3)
    assert (original["latency_ratio"], original["setting"], original["world"]) == (1.0, "original", 1)
    assert (found["latency_ratio"], found["latency_lowest"], found["latency_highest"]) == (0.5, 0.25, 2.0)
    assert (found["speedup"], found["seconds"], found["psnr"], found["psnr_lowest"]) == (2.0, 1.0, 40.0, 30.0)
    for k in range(3):
        rows[SETTING, k]["original_s"] = None
    assert summarize_settings(rows, [SETTING], 3)[0]["latency_ratio"] == 1 / 8, "apart: the original's own row"


CACHE = "F=1 W=1 R=1"
SMALL = ("--steps", "3", "--height", "64", "--width", "64", "--threads", "1")
WORDS = ("evaluate", *SMALL, "--plans", "pipefusion=1; pipefusion=2", "--caches", f"none; {CACHE}", "--out", "out")
SETTINGS = [
    ORIGINAL,
    EvaluationSetting("pipefusion=1", CACHE),
    EvaluationSetting("pipefusion=2", "none"),
    EvaluationSetting("pipefusion=2", CACHE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one evaluation of two captions was written to."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "references").mkdir()
    for name, color in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        Image.new("RGB", (80, 40), color).save(folder / "references" / f"{name}.jpg")
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        patch.chdir(folder)
        patch.setattr(scores, "NUM_FEATURES", 3)
        patch.setattr(scores, "load_inception_features", lambda: mean_colors)
        assert main.main([*WORDS, "--num", "2", "--resize", "32", "--references", "references"]) == 0
    shutil.copy(folder / "out" / "evaluation.json", folder / "first.json")
    return folder


def test_what_is_written(folder: Path) -> None:
    """All settings in the order asked for, what was left out where something was, and files that can be opened."""
    found = json.loads((folder / "first.json").read_text())
    assert [(row["plan"], row["cache"]) for row in found["settings"]] == [tuple(each) for each in SETTINGS]
    original, cached, planned, both = found["settings"]
    assert (original["psnr"], original["latency_ratio"], original["frechet_original"]) == (100.0, 1.0, 0.0)
    assert all(10 < row["psnr"] < 100 and 0 < row["ssim"] < 1 for row in (cached, planned, both))
    assert all(row["frechet_original"] > 0 and row["latency_ratio"] > 0 for row in (cached, planned, both))
    assert cached["blocks_saved"] == both["blocks_saved"] > 0 == planned["blocks_saved"]
    assert {row["world"] for row in (planned, both)} == {2} and found["references"]["count"] == 2
    assert all(row["frechet_references"] > 0 and "all_right" in row for row in found["settings"])
    assert found["job"]["call"]["num_inference_steps"] == 3 and "original and all settings" in found["measured"]["how"]
    rows = [json.loads(line) for line in (folder / "out" / "pictures.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and {row["seed"] for row in rows} == {0, 1} and len({row["prompt"] for row in rows}) == 2
    for name in (*(row["file"] for row in rows), "contact-sheet.png"):
        with Image.open(folder / "out" / name) as image:
            assert image.size == (64, 64) or name == "contact-sheet.png"


def test_it_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is there is judged and not drawn; a lost picture alone is drawn again, and is the same."""
    monkeypatch.chdir(folder)
    drawn: list[Any] = []

    def none(task: Any, turns: Any) -> None:
        drawn.append([(turn.place, turn.settings) for turn in turns])

    monkeypatch.setattr(command, "_run_session_task", none)
    assert main.main([*WORDS, "--num", "2"]) == 0 and drawn == []
    out = capsys.readouterr().out
    assert "pipefusion=2" in out and "no fid: " in out and "FID to" not in out and "no clip: no CLIP was named" in out
    found = json.loads((folder / "out" / "evaluation.json").read_text())
    lost = next(row for row in map(json.loads, (folder / "out" / "pictures.jsonl").read_text().splitlines())
                if (row["plan"], row["cache"], row["caption"]) == ("pipefusion=1", CACHE, 1))  # fmt: skip
    path = folder / "out" / lost["file"]
    before = path.read_bytes()
    path.unlink()
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert main.main([*WORDS, "--num", "2", "--plans", "pipefusion=1"]) == 0 and path.read_bytes() == before
    again = json.loads((folder / "out" / "evaluation.json").read_text())
    assert [row["psnr"] for row in again["settings"]] == [row["psnr"] for row in found["settings"]]
    assert again["measured"]["original_again_psnr"] == 100.0, "the original was drawn beside it, as it was before"


def test_another_job_in_the_same_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert "has images of call=" in refused(capsys, *WORDS, "--num", "2", "--steps", "4")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--plans", "data=2"), "leave data out"),
        (("--clip", "nowhere"), "not a CLIP that transformers can load"),
        (("--out", "."), "has files and no job.json"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    Path("there").mkdir()
    Path("there", "a.png").touch()
    assert says in refused(capsys, "evaluate", "--plans", "patches=2", "--caches", "none", "--num", "1", *words)


def pairs() -> tuple[Any, Any]:
    """ImageArrays that differ by noise, by one pixel, and not at all."""
    random = np.random.default_rng(0)
    a = random.integers(0, 256, (3, 20, 26, 3), dtype=np.uint8)
    b = np.clip(a + random.integers(-9, 10, a.shape), 0, 255).astype(np.uint8)
    b[1], b[2] = a[1], a[2]
    b[1, 0, 0] ^= 1
    return a, b


def test_psnr_is_the_mean_square_in_decibels() -> None:
    """To rounding (1e-12). A failure means that stored evaluations cannot be compared."""
    a, b = pairs()
    squares = ((a.astype(float) - b) ** 2).mean((1, 2, 3))
    wanted = [*(10 * np.log10(255**2 / squares[:2])), 100.0]
    np.testing.assert_allclose(compute_psnr(a, b), wanted, rtol=0, atol=1e-12)


def test_ssim_is_that_of_seven_by_seven_windows() -> None:
    """To rounding (1e-12): windows that lie in the picture, with unbiased variances, written out window by window. A
    failure means that stored evaluations cannot be compared."""
    a, b = pairs()
    x, y = (np.lib.stride_tricks.sliding_window_view(p / 255, (7, 7), (1, 2)) for p in (a, b))
    mx, my = x.mean((-1, -2)), y.mean((-1, -2))
    vx, vy = x.var((-1, -2), ddof=1), y.var((-1, -2), ddof=1)
    vxy = ((x - mx[..., None, None]) * (y - my[..., None, None])).sum((-1, -2)) / 48
    index = (2 * mx * my + 0.01**2) * (2 * vxy + 0.03**2) / ((mx**2 + my**2 + 0.01**2) * (vx + vy + 0.03**2))
    np.testing.assert_allclose(compute_ssim(a, b), index.mean((1, 2, 3)), rtol=0, atol=1e-12)
    assert compute_ssim(a, b)[2] == pytest.approx(1.0, abs=1e-12)


def test_the_distance_of_sets_is_that_of_normal_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In closed form, of one set after another. A failure means that all distances are off."""
    monkeypatch.setattr(scores, "NUM_FEATURES", 2)
    random = np.random.default_rng(0)
    original, first, second, references = random.normal(size=(4, 6, 2)) * [[[3.0, 1.0]]] + random.normal(size=(4, 1, 2))
    sets = SetDistances(lambda picture: torch.from_numpy(picture)[None])

    def distance(a: Any, b: Any) -> float:
        # of a 2 x 2 matrix M with positive eigenvalues: tr sqrt(M) = sqrt(tr M + 2 sqrt(det M))
        c, d = np.cov(a.T), np.cov(b.T)
        root = np.sqrt(np.trace(c @ d) + 2 * np.sqrt(np.linalg.det(c @ d)))
        return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(c) + np.trace(d) - 2 * root)

    for each in references:
        sets.add_reference(each)
    for name, pictures in (("original", original), ("first", first), ("second", second)):
        for picture in pictures:
            sets.add_image(picture, is_original=name == "original")
        distances = sets.take_distances(is_original=name == "original")
        to_original = 0.0 if name == "original" else distance(pictures, original)
        assert distances == {
            "frechet_original": pytest.approx(to_original, rel=1e-9),
            "frechet_references": pytest.approx(distance(pictures, references), rel=1e-9),
        }
