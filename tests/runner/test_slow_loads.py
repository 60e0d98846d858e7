"""A model that comes slowly is not a stall; one that does not come is. A failure: a run that ends while it loads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from diffusers import DiffusionPipeline

from ditile.distributed.launch import launch
from ditile.plan.errors import RankError
from ditile.runner.load import load

STALL = 3.0
PARTS = 8
PAUSE = 0.5
"""A part comes in this time; all of them in longer than a run may stall."""


def wait_for(asked: str, finished: str) -> str:
    """A model of the hub that another run fetches: diffusers waits for its lock."""

    def from_pretrained(*_: Any, **__: Any) -> str:
        Path(asked).touch()
        while not Path(finished).exists():
            time.sleep(0.1)
        return "a pipeline"

    with pytest.MonkeyPatch.context() as patch:
        # A rank that is forked has the folder that the hub had when its server began.
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", os.environ["HF_HUB_CACHE"])
        patch.setattr("ditile.runner.model_files.check_hub_access", lambda repository: None)  # as if the hub answered
        patch.setattr(DiffusionPipeline, "from_pretrained", from_pretrained)
        patch.setattr("ditile.runner.load.read_model_index", lambda _: {"_class_name": "FluxPipeline"})
        return str(load("owner/model"))


@contextlib.contextmanager
def fetched(folder: Path, asked: Path, finished: Path) -> Iterator[None]:
    """Parts are written into the folder of the cache, under the name of a file that is not whole yet."""
    left = threading.Event()

    def fetch() -> None:
        while not asked.exists() and not left.wait(0.1):
            pass
        folder.mkdir(parents=True)
        with (folder / "a1b2.incomplete").open("wb", buffering=0) as file:
            for _ in range(PARTS):
                file.write(bytes(1000))
                if left.wait(PAUSE):
                    return
        finished.touch()

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("comes", [True, False])
def test_a_file_that_grows_in_the_cache_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--owner--model" / "blobs"
    files = tmp_path / "asked", tmp_path / "finished"
    with contextlib.ExitStack() as stack:
        if comes:
            stack.enter_context(fetched(folder, *files))
        else:
            stack.enter_context(pytest.raises(RankError, match="no rank made progress"))
        assert launch(wait_for, 2, tuple(map(str, files)), stall_timeout=STALL) == ["a pipeline"] * 2
