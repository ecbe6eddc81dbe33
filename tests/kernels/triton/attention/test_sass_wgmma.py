"""The reader of machine code: on short listings with and without a product's registers being used too early, and on the
prefill kernel for Hopper without its waits. What kernels compile to is read where they are compiled: in the tests of
each."""

import re

import pytest

triton = pytest.importorskip("triton")

from tests.kernels.sass_wgmma import machine_code, touched_in_flight

SUMS = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"  # R24 to R31
OTHER = "HGMMA.64x16x16.F32.BF16 R32, gdesc[UR8], RZ, !UPT, gsb0"  # R32 to R39
HELD = "HGMMA.64x16x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24, gsb0"  # reads R88 to R91 too
WAIT, WAIT_1 = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
USE, USE_OTHER = "F2FP.BF16.F32.PACK_AB R4, R25, R24", "FADD R5, R39, -|R2|"
END = "EXIT"


def found(*code):
    """The places, in a listing of these instructions 16 bytes apart, of those that touch what is in flight."""
    lines = []
    for i, text in enumerate(code):
        guard, text = text.split(" ", 1) if text[0] == "@" else ("", text)
        lines += [
            f"        /*{16 * i:04x}*/  {guard:>8} {text} ;  /* 0x000000181b04723e */",
            f"{'':40}/* 0x000fe400000010ff */",
        ]
    return [int(line.split(":")[0], 16) // 16 for line in touched_in_flight("\n".join(lines))]


@pytest.mark.parametrize(
    "code, places",
    [
        # Sums.
        ((SUMS, WAIT, USE, END), []),
        ((SUMS, USE, WAIT, END), [1]),  # the order that ptxas made
        (("CS2R R24, SRZ", SUMS, SUMS, WAIT, USE, END), []),  # before; and products may add to the same sums
        ((SUMS, USE_OTHER, "IMAD.U32 R4, RZ, RZ, UR24", "LDS R4, [UR24+0x18]", WAIT, END), []),
        ((SUMS, OTHER, WAIT_1, USE, END), []),
        ((SUMS, OTHER, WAIT_1, USE_OTHER, END), [3]),  # the newest is left
        ((SUMS.removesuffix(", gsb0"), OTHER, WAIT_1, USE, END), [3]),  # one group
        ((SUMS.removesuffix(", gsb0"), WAIT, USE, END), [2]),  # not yet in a group
        ((SUMS, "@P0 WARPGROUP.DEPBAR.LE gsb0, 0x0", USE, END), [2]),
        ((SUMS, "HGMMA.64x8x16.F32.BF16 R28, gdesc[UR8], R28, gsb0", WAIT, END), [1]),  # part of the sums
        # Two sums a register.
        (("HGMMA.64x16x16.F16 R24, gdesc[UR8], R24, gsb0", "MOV R4, R27", "MOV R5, R28", WAIT, END), [1]),
        (("QGMMA.64x16x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0", "MOV R4, R31", WAIT, END), [1]),
        # Operands in registers, which may be read.
        ((HELD, "MOV R4, R88", "STG.E.64 desc[UR4][R88.64], R90", HELD, WAIT, "MOV R88, R4", END), []),
        ((HELD, "MOV R91, R4", "MOV R92, R4", WAIT, END), [1]),
        ((HELD, "SHFL.BFLY PT, R88, R4, 0x1, 0x1f", WAIT, END), [1]),
        ((HELD, "@!P1 IADD3 R90, P0, R4, R5, RZ", WAIT, END), [1]),
        ((SUMS, "HGMMA.64x16x16.F32.BF16 R32, R28, gdesc[UR8].tnspB, R32, gsb0", WAIT, END), [1]),  # sums as an operand
        # A loop whose wait leaves the newest group, which the next round reads.
        ((USE, SUMS, WAIT_1, "@P0 BRA 0x0", WAIT, END), [0]),
        ((SUMS, WAIT_1, "@!P0 BRA 0x0", USE, WAIT, END), [3]),
        # The wait is jumped over; what is jumped over is not run, and nothing after the end is.
        ((SUMS, "@P0 BRA 0x30", WAIT, USE, END), [3]),
        ((SUMS, "BRA.DIV UR7, 0x30", WAIT, USE, END), [3]),
        ((SUMS, "BRA 0x30", USE, WAIT, END), []),
        ((SUMS, END, USE), []),
        ((SUMS, "@P0 EXIT", USE, END), [2]),
        # A jump through a table: to all that nothing falls into.
        (("BRX R2 -0x10", SUMS, WAIT, END, OTHER, USE_OTHER, WAIT, END), [5]),
        # Products that are never waited for.
        ((SUMS, OTHER, "@P0 BRA 0x0", WAIT_1, USE, END), []),
        ((SUMS, "@P0 BRA 0x0", WAIT_1, USE, END), [3]),
        # Wide registers.
        *(
            ((SUMS, instruction, WAIT, END), [1] if touches else [])
            for instruction, touches in (
                ("CS2R R22, SRZ", False), ("CS2R R23, SRZ", True), ("LDS.128 R20, [R4]", False),
                ("LDS.128 R21, [R4]", True), ("LDG.E.64 R23, desc[UR4][R2.64]", True),
                ("STG.E.128 desc[UR4][R22.64], R16", False), ("STSM.16.M88.4 [R2], R21", True),
                ("IMAD.WIDE R23, R2, 0x4, R4", True), ("FADD R4, R31.reuse, R32", True),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_touches_registers_in_flight(code, places):
    assert found(*code) == places


def test_what_is_not_read():
    with pytest.raises(ValueError, match="found none"):
        found("MOV R1, R2", END)
    with pytest.raises(ValueError, match="expected no calls, got 0010: CALL.REL.NOINC 0x0"):
        found(SUMS, "CALL.REL.NOINC 0x0", END)
    with pytest.raises(ValueError, match="expected to reach every product, not 0010: HGMMA"):
        found(END, SUMS, END)


@pytest.mark.slow
@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="compiles nothing under TRITON_INTERPRET")
def test_a_wait_less_is_found():
    """Each wait of the prefill kernel, of either consumer, is needed; without it the reader says so."""
    pytest.importorskip("triton.experimental.gluon")
    from nanovllm.kernels.triton.attention.prefill_plan import plan_hopper_prefill
    from tests.kernels.triton.attention.hopper_calls import compile_hopper_prefill

    sass = machine_code(compile_hopper_prefill(plan_hopper_prefill(2, 128, 256), 16, 8, 128, 256))
    waits = list(re.finditer(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[01]", sass))
    assert len(waits) >= 8
    assert touched_in_flight(sass) == []
    for wait in waits:
        assert touched_in_flight(sass[: wait.start()] + "NOP" + sass[wait.end() :])
