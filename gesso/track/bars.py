"""Progress of other libraries (downloads, loading, compiling), shown in our display."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gesso.config import resolve_path
from gesso.track.progress import Progress

LOADING = "Loading weights"  # description of transformers' progress bar
POLL = 1.0  # seconds between two checks of the downloaded size


@contextmanager
def loading(progress: Progress, name: str, path: str) -> Iterator[None]:
    """Reports progress while the model at that path (`model.path` of a recipe) is loaded: the bytes
    of a download and the tensors that transformers reads."""
    progress.phase(f"loading {name}")
    with _downloads(progress, name, path), _tensors(progress, name):
        yield


@contextmanager
def _tensors(progress: Progress, name: str) -> Iterator[None]:
    """Uses the tqdm hook of transformers, which older versions do not have."""
    from transformers.utils import logging

    set_hook = getattr(logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") != LOADING or not args or not isinstance(args[0], Sized):
            return factory(*args, **options)
        return _counted(args[0], progress, name)

    before = set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)


def _counted(items: Any, progress: Progress, name: str) -> Iterator[Any]:
    progress.phase(f"loading weights of {name}", len(items))
    for item in items:
        yield item
        progress.advance()
    progress.phase(f"loading {name}")  # a pipeline has further components


@contextmanager
def _downloads(progress: Progress, name: str, path: str) -> Iterator[None]:
    """Polls the size of the cache folder that a model is downloaded into, since no library reports
    all its downloads in one place."""
    folder = _in_cache(path)
    if folder is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_follow, args=(folder / "blobs", progress, name, ended), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _in_cache(path: str) -> Path | None:
    """The folder that a model is downloaded into from the hub; None if the path cannot be a hub
    name. Loading raises for a wrong path."""
    if resolve_path(path).exists() or path.count("/") != 1:
        return None
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        name = repo_folder_name(repo_id=path, repo_type="model")
    except HFValidationError:  # "./gone" or "/gone"
        return None
    return Path(constants.HF_HUB_CACHE) / name


@contextmanager
def compiling(progress: Progress) -> Iterator[None]:
    """Notes once that torch compiles, which makes a phase take longer than usual."""
    from torch._dynamo.callback import callback_handler

    reported: list[object] = []

    def report(event: object) -> None:
        if not reported:
            progress.note("compiling with torch.compile: first passes take longer than later ones")
        reported.append(event)

    callback_handler.register_start_callback(report)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(report)


def _follow(folder: Path, progress: Progress, name: str, ended: threading.Event) -> None:
    size, reported = _size(folder), False
    while not ended.wait(POLL):
        before, size = size, _size(folder)
        if size > before:
            if not reported:
                progress.phase(f"downloading {name}")
                reported = True
            progress.advance(size - before)


def _size(folder: Path) -> int:
    """Total size of the files; they may appear and disappear meanwhile."""
    total = 0
    for file in folder.glob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            continue
    return total
