"""What the products with packed weights compile to at the shapes of real models, without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, PLANES
from nanovllm.kernels.triton.gemm import packed_products
from nanovllm.kernels.triton.gemm.packed_embedding import embedding_packed
from nanovllm.kernels.triton.gemm.packed_plan import PackedPlan, tokens_of_a_program
from tests.kernels.triton.compiled import compiled, launches_of, resources

OUTPUTS, SIZE = 4096, 4096


def empty(*shape, dtype=torch.uint8):
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def cases(tokens, dtype):
    """(name, call) of every form of a weight."""
    x, half = empty(tokens, SIZE, dtype=dtype), torch.float16
    floats, words = empty(OUTPUTS, SIZE, dtype=torch.float8_e4m3fn), empty(OUTPUTS, SIZE // 2)
    for rows, columns in ((OUTPUTS, 1), (OUTPUTS // 128, SIZE // 128)):
        scale = empty(rows, columns, dtype=torch.float32)
        yield f"fp8 {rows}x{columns}", lambda s=scale: packed_products.linear_fp8(x, floats, s)
    for groups, zeros in ((32, False), (32, True), (128, True)):
        scale, zero = empty(OUTPUTS, groups, dtype=half), empty(OUTPUTS, groups) if zeros else None
        group = f"int4 {SIZE // groups}{' zero' if zeros else ''}"
        yield group, lambda s=scale, z=zero: packed_products.linear_int4(x, words, s, z)
    yield "int8", lambda: packed_products.linear_int8(x, floats.view(torch.uint8), empty(OUTPUTS, 32, dtype=half))
    for name in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"):
        weight = empty(OUTPUTS, GGUF_TYPES[name].plane_offsets(SIZE)[1])
        yield name, lambda w=weight, kind=name + PLANES: packed_products.linear_gguf(x, w, kind)


NAMES = [name for name, _ in cases(1, torch.bfloat16)]


def check(capability, tokens, dtype, tmp_path, monkeypatch, names):
    monkeypatch.setattr(
        packed_products, "tokens_of_a_program", lambda n, shared: tokens_of_a_program(n, capability >= 90)
    )
    seen = 0
    for name, kernel, args, options in launches_of([c for c in cases(tokens, dtype) if c[0] in names]):
        if kernel.__name__ == "add_splits":
            continue
        named = dict(zip(kernel.arg_names, args)) | {"PDL": capability >= 90}
        binary = compiled(kernel, tuple(named.values()), {"num_warps": options["num_warps"]}, capability)
        registers, stack, local = resources(binary, tmp_path)
        assert local == 0 and stack == 0, f"{name}: {registers} registers, {stack} stack, {local} local"
        ptx = binary.asm["ptx"]
        # Weights and tokens come to shared memory in copies of 16 bytes, several tiles ahead.
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x[0-9a-f]+)", ptx)
        assert len(copies) >= 2 * named["STAGES"] and set(copies) == {"0x10"}, name
        assert re.search(r"mma\.sync|wgmma|tcgen05\.mma", ptx), name
        waits = [m.start() for m in re.finditer(r"griddepcontrol\.wait", ptx)]
        early = [m.start() for m in re.finditer(r"prefetch\.global\.L2", ptx)]
        assert len(waits) == (1 if capability >= 90 else 0) and bool(early) == bool(waits), name
        if waits:  # before the wait nothing is read, but weights are fetched into the cache
            first = re.search(r"ld\.global|cp\.async\.c", ptx)
            assert first and early[-1] < waits[0] < first.start(), name
        seen += 1
    return seen


def test_compiles_for_hopper_without_spills_and_copies_16_bytes(tmp_path, monkeypatch):
    assert check(90, 1, torch.bfloat16, tmp_path, monkeypatch, ("fp8 32x32", "int4 128 zero", "Q4_K")) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability, tokens, dtype, names",
    [
        (90, 16, torch.bfloat16, NAMES[::4]), (90, 128, torch.bfloat16, NAMES), (90, 8, torch.float16, NAMES[::3]),
        (80, 1, torch.bfloat16, NAMES[2::4]), (80, 32, torch.bfloat16, NAMES[1::4]),
        (100, 128, torch.bfloat16, NAMES[1::3]),
    ],
)  # fmt: skip
def test_compiles_without_spills_and_copies_16_bytes(capability, tokens, dtype, names, tmp_path, monkeypatch):
    """Every form of a weight for many tokens on sm_90; elsewhere they take turns."""
    assert check(capability, tokens, dtype, tmp_path, monkeypatch, names) == len(names)


def fewest_instructions(num_tokens, num_rows, size, bits, parts, multiprocessors, shared):
    return PackedPlan(rows=32 if parts else 64, warps=2, stages=5, splits=1)


@pytest.mark.slow
def test_machine_code_has_few_instructions_for_a_weight(monkeypatch):
    """Decoding costs as many of them as the time to read weights allows: at 4.55 TB/s an H200 can run 3.3 instructions
    in the time of a 4-bit weight, 6.5 in that of an 8-bit one. GGUF's kinds of 4 bits take more than that. The plans
    are those of the fewest instructions; the fastest have others.
    """
    from tests.kernels.sass_wgmma import machine_code

    most = {"fp8 32x32": 3.6, "int4 128 zero": 2.7, "int8": 3.7, "Q4_0": 3.7, "Q8_0": 5.0, "Q4_K": 4.4}
    monkeypatch.setattr(packed_products, "plan_packed_product", fewest_instructions)
    for name, kernel, args, options in launches_of([c for c in cases(1, torch.bfloat16) if c[0] in most]):
        if kernel.__name__ == "add_splits":
            continue
        named = dict(zip(kernel.arg_names, args)) | {"PDL": True}
        binary = compiled(kernel, tuple(named.values()), {"num_warps": options["num_warps"]}, 90)
        weights = named["ROWS"] * named["BLOCK"] * (16 // named["BITS"]) / (32 * options["num_warps"])
        assert longest_loop(machine_code(binary)) / weights < most[name], name


def longest_loop(code):
    """Instructions of the longest loop."""
    at = [int(m[1], 16) for m in re.finditer(r"^\s*/\*([0-9a-f]{4,})\*/\s+\S", code, re.M)]
    back = re.finditer(r"^\s*/\*([0-9a-f]{4,})\*/.*\bBRA\S*.*?0x([0-9a-f]+)", code, re.M)
    loops = [(int(m[2], 16), int(m[1], 16)) for m in back]
    return max(sum(first <= a <= last for a in at) for first, last in loops if first < last)


def test_an_embedding_is_one_kernel_that_reads_after_its_predecessor(tmp_path):
    token_ids, q6_k, half = torch.zeros(1, dtype=torch.int64), GGUF_TYPES["Q6_K"], torch.float16
    words, scale = empty(OUTPUTS, SIZE // 2), empty(OUTPUTS, SIZE // 128, dtype=half)

    def call(*operands):
        return lambda: embedding_packed(token_ids, *operands, SIZE, torch.bfloat16)

    forms = [
        ("Q6_K", call("Q6_K" + PLANES, empty(OUTPUTS, q6_k.plane_offsets(SIZE)[1]), None, None)),
        ("int4", call("int4", words, scale, None)),
    ]
    launches = launches_of(forms)
    assert [name for name, *_ in launches] == ["Q6_K", "int4"]
    for name, kernel, args, options in launches:
        named = dict(zip(kernel.arg_names, args)) | {"DEPENDENT": True}
        binary = compiled(kernel, tuple(named.values()), {"num_warps": options["num_warps"]}, 90)
        _, stack, local = resources(binary, tmp_path)
        ptx = binary.asm["ptx"]
        assert stack == local == 0 and ptx.index("griddepcontrol.wait") < ptx.index("ld.global"), name
