"""Wheels with compiled C++ kernels: what they hold, for which platform, and what is refused."""

import base64
import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from nanovllm.kernels.cpu import build, prebuilt, wheel

KEY = build.source_key()
SOURCES = Path(build.__file__).parent
INFO = "nanovllm-0.1.0.dist-info"


def pure_wheel(directory, sources="", name="nanovllm-0.1.0-py3-none-any.whl"):
    """A wheel with the C++ sources; sources: added to one of them."""
    files = {f"nanovllm/kernels/cpu/{p.name}": p.read_text() for p in [*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]}
    files["nanovllm/kernels/cpu/library.cpp"] += sources
    files["nanovllm/__init__.py"] = "x = 1\n"
    files[f"{INFO}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n\n"
    files[f"{INFO}/RECORD"] = "nanovllm/__init__.py,sha256=stale,6\n"
    path = directory / name
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def library(directory, variant, *versions):
    content = b"\x7fELF" + b"\0".join(f"GLIBC_{v}".encode() for v in versions)
    path = directory / variant.file_name(KEY, content)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_platform_wheel(tmp_path, machine):
    variants = [v for v in prebuilt.VARIANTS if v.machine == machine]
    libraries = [library(tmp_path, v, "2.2.5", "2.9", f"2.{17 + i}", "PRIVATE") for i, v in enumerate(variants)]
    pure = pure_wheel(tmp_path)
    made = wheel.platform_wheel(pure, libraries)
    tag = f"py3-none-manylinux_2_{16 + len(variants)}_{machine}"
    assert made == tmp_path / f"nanovllm-0.1.0-{tag}.whl"
    with zipfile.ZipFile(pure) as old, zipfile.ZipFile(made) as new:
        added = {f"nanovllm/kernels/cpu/prebuilt/{p.name}" for p in libraries}
        names = new.namelist()
        assert set(names) == set(old.namelist()) | added and len(names) == len(set(names))
        for name in set(old.namelist()) - {f"{INFO}/WHEEL", f"{INFO}/RECORD"}:
            assert new.read(name) == old.read(name)
        for path in libraries:
            assert new.read(f"nanovllm/kernels/cpu/prebuilt/{path.name}") == path.read_bytes()
        text = new.read(f"{INFO}/WHEEL").decode()
        assert text == f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n\n"
        rows = [row.split(",") for row in new.read(f"{INFO}/RECORD").decode().splitlines()]
        assert [name for name, _, _ in rows] == names and rows[-1] == [f"{INFO}/RECORD", "", ""]
        for name, digest, size in rows[:-1]:
            content = new.read(name)
            encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={encoded}", len(content))


def test_wheels_that_are_refused(tmp_path):
    path = library(tmp_path, prebuilt.VARIANTS[0], "2.17")
    other = pure_wheel(tmp_path, name="nanovllm-0.1.0-py3-none-manylinux_2_17_x86_64.whl")
    with pytest.raises(ValueError, match="expected a wheel for any platform"):
        wheel.platform_wheel(other, [path])
    with pytest.raises(ValueError, match="holds other C.. sources than .*; build it again"):
        wheel.platform_wheel(pure_wheel(tmp_path, sources="// changed"), [path])


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A function: a compiler for a target, which writes down its arguments, and empty files."""

    def make(target):
        path = tmp_path / "c++"
        path.write_text(
            f'#!/bin/sh\n[ "$1" = -dumpmachine ] && echo {target} && exit\necho "$*" >> {tmp_path}/calls\n'
            'for last; do :; done\necho GLIBC_2.17 > "$last"\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        build.compiler.cache_clear()
        return tmp_path / "calls"

    yield make
    build.compiler.cache_clear()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_compiler_decides_what_is_compiled(tmp_path, compiler, capsys, machine):
    calls = compiler(f"{machine}-linux-gnu")
    wheel.main([str(pure_wheel(tmp_path))])
    made = Path(capsys.readouterr().out.strip())
    assert made.name == f"nanovllm-0.1.0-py3-none-manylinux_2_17_{machine}.whl"
    variants = [v for v in prebuilt.VARIANTS if v.machine == machine]
    with zipfile.ZipFile(made) as archive:
        carried = [Path(n).name for n in archive.namelist() if n.endswith(".so")]
    assert carried == [v.file_name(KEY, b"GLIBC_2.17\n") for v in variants]
    compiled = [call for call in calls.read_text().splitlines() if " -c " in call]
    for variant in variants:
        assert sum(" ".join(variant.flags) + " -D" in call for call in compiled) == len(compiled) / len(variants)
    assert not any("-march=native" in call for call in compiled)
    linked = [call for call in calls.read_text().splitlines() if "-shared" in call]
    assert len(linked) == len(variants) and all("-static-libstdc++" in call for call in linked)


@pytest.mark.parametrize("target", ["riscv64-linux-gnu", "x86_64-w64-mingw32", "arm64-apple-darwin24"])
def test_a_compiler_for_another_machine_is_refused(tmp_path, compiler, target):
    compiler(target)
    with pytest.raises(SystemExit, match=f"compiles for {target}; set CXX to a compiler for aarch64-linux, x86_64-lin"):
        wheel.main([str(pure_wheel(tmp_path))])


def test_arguments(tmp_path, compiler):
    compiler("x86_64-linux-gnu")
    for arguments in ([], ["--help"]):
        with pytest.raises(SystemExit, match="^usage: python -m nanovllm.kernels.cpu.wheel WHEEL"):
            wheel.main(arguments)
    with pytest.raises(SystemExit, match=f"error: .*{re.escape(str(tmp_path / 'x-none-any.whl'))}"):
        wheel.main([str(tmp_path / "x-none-any.whl")])
    (tmp_path / "broken-none-any.whl").write_text("text")
    with pytest.raises(SystemExit, match="error: .*not a zip file"):
        wheel.main([str(tmp_path / "broken-none-any.whl")])
