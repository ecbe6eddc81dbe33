"""Reading PTX: known text gives known counts, and what compilers make of the lessons is what the lessons say."""

import pytest
import torch

from nanovllm.hardware.gpu_presets import device_model
from nanovllm.kernels.cuda.build import toolchain_reason
from nanovllm.lab import cuda_build
from nanovllm.lab.lesson import NAMES, lesson
from nanovllm.lab.lesson_ptx import cuda_reading, triton_reading
from nanovllm.lab.ptx import explained, kernels_of, read, resources_in_words

PTX = """
.version 8.8
.target sm_90a
.address_size 64

.visible .entry first(
	.param .u64 first_param_0
)
{
	.reg .b32 	%r<5>;
	ld.param.u64 	%rd1, [first_param_0];
$L__BB0_1:
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.nc.L1::no_allocate.L2::128B.v2.f32 {%f1, %f2}, [%rd2];
	ld.global.b16 { %rs1 }, [ %rd3 + 0 ];
	ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r9];
	st.shared::cta.b32 [%r2], %r3;
	cp.async.cg.shared.global [ %r35 + 0 ], [ %rd9 + 0 ], 0x10, %r36;
	cp.async.ca.shared.global [%r401], [%rd16], 4;
	cp.async.commit_group ;
	cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
	wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, %rd92, %rd93, %p19, 1, 1, 0, 1;
	wgmma.fence.sync.aligned;
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
	fma.rn.f32 %f12, %f10, %f1, %f11;
	ex2.approx.ftz.f32 %f29, %f27;
	div.full.f32 %f1, %f2, %f3;
	div.u32 %r1, %r2, %r3;
	shfl.sync.bfly.b32 %r47, %r46, 16, 31, -1;
	bar.sync 0;
	bar.warp.sync -1;
	@!%p1 bra $L__BB0_1;
	st.global.b64 [ %rd4 + 0 ], %rd5;
	ret;
}
	// .globl	second
.visible .entry second(
	.param .u64 second_param_0
)
{
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f5,%f6,%f7,%f8};
	ret;
}
"""  # noqa: E501
REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compile time = 1.0 ms
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    24 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_known_ptx():
    bodies = kernels_of(PTX)
    assert list(bodies) == ["first", "second"]
    first = read("first", bodies["first"], REPORT, threads=256, dynamic_shared=4096)
    assert {(a.what, a.where, a.bytes): a.count for a in first.accesses} == {
        ("ld", "global", 16): 1, ("ld", "global", 8): 1, ("ld", "global", 2): 1, ("ld", "shared", 16): 1,
        ("st", "shared", 4): 1, ("st", "global", 8): 1,
    }  # fmt: skip
    assert first.async_copies == {16: 1, 4: 1}
    assert first.counts == {
        "cp.async.bulk": 1, "wgmma.mma": 1, "ldmatrix": 1, "fma": 1, "ex2": 1, "div": 1, "shfl": 1, "barrier": 1,
        "warp barrier": 1, "bra": 1,
    }  # fmt: skip
    assert (first.registers, first.spilled, first.shared, first.dynamic_shared) == (168, 24, 0, 4096)
    second = read("second", bodies["second"], REPORT, threads=128)
    assert second.counts == {"mma": 1} and (second.registers, second.spilled, second.shared) == (40, 0, 128)


def test_a_kernel_that_the_report_lacks():
    with pytest.raises(RuntimeError, match="no registers of first"):
        read("first", kernels_of(PTX)["first"], "ptxas info    : nothing", threads=32)


def test_what_the_lines_say():
    reading = read("first", kernels_of(PTX)["first"], REPORT, threads=256)
    by_text = {line.instruction: line.meaning for line in explained(reading)}
    wide = next(m for t, m in by_text.items() if "ld.global.v4" in t)
    narrow = next(m for t, m in by_text.items() if "ld.global.b16" in t)
    assert wide.startswith("16 bytes a thread read in device memory, 512 a warp") and "widest" in wide
    assert narrow.startswith("2 bytes a thread read in device memory, 64 a warp: 8 times the instructions")
    assert narrow.endswith("; a thread has one element, its elements are not neighbours, or their alignment is unknown")
    assert "{8 registers}" in next(t for t in by_text if t.startswith("wgmma"))  # a long list is shortened
    assert len(by_text) == 18 and all(line.count == 1 for line in explained(reading))


@pytest.mark.parametrize(
    "registers, threads, shared, blocks, why",
    [
        (168, 256, 0, 1, "registers run out first"),  # 168 * 256 = 43,008 of 65,536
        (32, 256, 0, 8, "as many as there can be"),  # 2,048 threads
        (32, 128, 100 * 1024, 2, "shared memory runs out first"),  # 2 * 101 of 228 KiB
        (16, 32, 0, 32, "blocks run out first"),
    ],
)
def test_occupancy_in_words(registers, threads, shared, blocks, why):
    report = f"'k'\n0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nx: Used {registers} registers"
    reading = read("k", "", report, threads, shared)
    first, spills = resources_in_words(reading, device_model("h100"))
    assert f"holds {blocks} such block" in first and why in first and "Nothing spilled" in spills


def test_spills_are_said():
    reading = read("first", kernels_of(PTX)["first"], REPORT, threads=256)
    assert "24 bytes a thread go to memory and back" in resources_in_words(reading, device_model("a100"))[1]


@pytest.fixture
def compiling_triton():
    if pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("compiles nothing under TRITON_INTERPRET")


@pytest.fixture
def nvcc():
    if (reason := toolchain_reason()) is not None:
        pytest.skip(reason)


def _bytes(reading, what):
    return {a.bytes for a in reading.accesses if a.what == what and a.where == "global"}


@pytest.mark.parametrize(
    "name, dtype", [*((n, torch.bfloat16) for n in NAMES if n != "matmul"), ("layernorm", torch.float32)], ids=str
)
def test_triton_of_row_kernels_moves_16_bytes(compiling_triton, name, dtype):
    ptx, reading = triton_reading(lesson(name), 4096, dtype, (9, 0))
    assert ".target sm_90" in ptx and _bytes(reading, "ld") == _bytes(reading, "st") == {16}
    assert 10 < reading.registers <= 255 and reading.spilled == 0


def test_triton_matmul_uses_each_gpus_tensor_cores(compiling_triton):
    matmul = lesson("matmul")
    for capability, unit in (((8, 0), "mma"), ((9, 0), "wgmma.mma")):
        _, reading = triton_reading(matmul, 4096, torch.float16, capability)
        assert reading.counts[unit] and reading.async_copies.keys() == {16} and reading.spilled == 0
        assert reading.dynamic_shared >= 2 * 2 * (128 * 64 + 64 * 256)  # two stages of both tiles at least
    _, reading = triton_reading(matmul, 4095, torch.float16, (9, 0))
    assert _bytes(reading, "ld") == {2}  # rows are not aligned, so elements come one at a time


def test_triton_interpreting_compiles_nothing(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(ValueError, match="unset it to see PTX"):
        triton_reading(lesson("gelu"), 64, torch.float32, (9, 0))


@pytest.mark.parametrize("name", NAMES)
def test_cuda_of_every_lesson(nvcc, name):
    one = lesson(name)
    dtype = one.dtypes[-1]
    ptx, reading = cuda_reading(one, 4096, dtype, (9, 0))
    assert list(kernels_of(ptx)) == [reading.kernel]
    if name == "matmul":
        assert reading.registers <= 128 and reading.spilled <= 32  # two blocks an SM
        assert reading.counts["mma"] and reading.async_copies.keys() == {16}
        assert reading.dynamic_shared == 3 * 2 * (128 * 40 + 32 * 136)
    else:
        assert _bytes(reading, "ld") == _bytes(reading, "st") == {16}
        assert reading.spilled == 0
        _, ragged = cuda_reading(one, 4095, dtype, (9, 0))
        assert _bytes(ragged, "ld") == {torch.empty(0, dtype=dtype).element_size()}


def test_cuda_links_into_a_library_with_its_launcher(nvcc, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    load = cuda_build.load.__wrapped__  # without its cache
    assert load("gelu", (9, 0)).lab_gelu
    (built,) = tmp_path.rglob("*.so")
    before = built.stat().st_mtime_ns
    load("gelu", (9, 0))
    assert built.stat().st_mtime_ns == before  # not built again
    assert "nanovllm_lab_" in built.parent.name


def test_cuda_without_a_compiler_says_why(monkeypatch):
    monkeypatch.setattr(cuda_build, "toolchain_reason", lambda: "nvcc is not here")
    with pytest.raises(RuntimeError, match="nvcc is not here"):
        cuda_reading(lesson("gelu"), 64, torch.float32, (9, 0))
    assert "nvcc is not here" in cuda_build.cuda_reason(torch.device("cpu"))
