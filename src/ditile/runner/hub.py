"""The hub's cache: while a model is fetched its folder grows, whoever fetches it, and who waits for it makes progress.

huggingface_hub holds a lock while it fetches a file; ranks, and other runs, that want the file wait for it in there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ditile.distributed import env

PERIOD = 1.0
"""Seconds between two looks."""


@contextmanager
def report_download_progress(repository: str) -> Iterator[None]:
    """Within, whatever is added to a repository's folder in the cache is progress of this rank of `launch`.

    A download that hangs adds nothing, so the run stalls.

    Args:
        repository: its hub id.
    """
    if env.read_progress_fd() is None:
        yield
        return
    left = threading.Event()
    thread = threading.Thread(target=_watch_download, args=(find_blob_folder(repository), left), daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def find_blob_folder(repository: str) -> Path:
    """Where the files of a model are kept, the unfinished ones too."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"), "blobs")


def _watch_download(folder: Path, left: threading.Event) -> None:
    seen = _list_file_stats(folder)
    while not left.wait(PERIOD):
        before, seen = seen, _list_file_stats(folder)
        if seen != before:
            env.report_progress()


def _list_file_stats(folder: Path) -> dict[str, tuple[int, int]]:
    """The size and time of each file; one that has gone meanwhile has another name now."""
    file_stats = {}
    for path in folder.glob("*"):
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue
        file_stats[path.name] = (facts.st_size, facts.st_mtime_ns)
    return file_stats
