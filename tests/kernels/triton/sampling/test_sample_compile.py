"""The launches of `sample` and `apply_token_bitmask`, compiled for sm_80, sm_90 and sm_100 without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton import early_start
from nanovllm.kernels.triton.sampling.sample import sample
from nanovllm.kernels.triton.sampling.token_bitmask import apply_token_bitmask
from tests.kernels.triton.compiled import CAPABILITIES, compiled, launches_of, recorded, resources, specialised, wide


def sampling_arguments(rows, dtype, top_k, top_p, min_p):
    def full(kind, on=True):
        return torch.ones(rows, dtype=kind) if on else None

    return (
        torch.empty(rows, 151936, dtype=dtype), full(torch.float32), full(torch.int32, top_k), full(torch.float32,
        top_p),
        full(torch.float32, min_p), full(torch.int64), full(torch.int64),
    )  # fmt: skip


@pytest.mark.parametrize(
    "filters, dtype, capability",
    [
        *((filters, torch.bfloat16, 90) for filters in ((0, 1, 0), (1, 1, 1))),
        *(((1, 1, 1), *of) for of in ((torch.float32, 90), (torch.bfloat16, 80), (torch.bfloat16, 100))),
    ],
    ids=str,
)
def test_sampling_does_not_spill(filters, dtype, capability, tmp_path):
    for rows in (1, 256) if (filters, dtype, capability) == ((1, 1, 1), torch.bfloat16, 90) else (256,):
        call = sampling_arguments(rows, dtype, *filters)
        for name, kernel, args, options in launches_of([("sample", lambda call=call: sample(*call))]):
            binary = compiled(kernel, args, options, capability)
            registers, stack, local = resources(binary, tmp_path)
            assert stack == local == 0, f"{name} {kernel.__name__}: {registers} registers, {stack} stack, {local} local"
            if "resolve" not in kernel.__name__:  # candidates to resolve are few
                assert wide(binary.asm["ptx"], "ld"), f"{name} {kernel.__name__}: no 16-byte load"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_draw_reads_logits_once_and_moves_little_between_threads(capability, tmp_path):
    """A warp has whole blocks: reductions are shuffles, and two barriers a tile are for the store of their results."""
    ((_, kernel, args, options),) = launches_of(
        [("", lambda: sample(*sampling_arguments(256, torch.bfloat16, 0, 0, 0)))]
    )
    binary = compiled(kernel, args, options, capability)
    assert resources(binary, tmp_path)[1:] == (0, 0)
    ptx = binary.asm["ptx"]
    before = ptx.partition("atom.global")[0]
    assert len(re.findall(r"bar\.sync", before)) <= 2 + 2 and len(re.findall(r"st\.shared", before)) <= 2
    assert len(re.findall(r"ex2\.approx", before)) == args[kernel.arg_names.index("TILE")] * 256 // (
        32 * options["num_warps"]
    )


def test_few_variants_of_sampling(monkeypatch):
    """What a batch changes makes the compiler start again for nothing but filters, and launches before the
    predecessor's end."""
    monkeypatch.setattr(early_start, "has_dependent_launch", lambda device: True)
    found = {}
    wanted = [(0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)]
    for rows in (1, 2, 3, 7, 16, 32, 33, 64, 100, 128, 200, 256, 512, 1056, 2000):
        for filters in wanted:
            logits, *rest = sampling_arguments(rows, torch.bfloat16, *filters)
            # Views into larger tensors, with any alignment.
            rest = [None if r is None else torch.ones(rows + 1, dtype=r.dtype)[rows % 2 :][:rows] for r in rest]
            launches = []
            with recorded(launches):
                sample(logits, *rest)
            for kernel, args, options in launches:
                found.setdefault(kernel.__name__, set()).add(repr((specialised(kernel, args), sorted(options.items()))))
    assert {name: len(variants) for name, variants in found.items()} == {
        "_draw_kernel": 2, "_maxima_kernel": 2, "_filtered_draw_kernel": 2, "_mass_kernel": 1, "_gather_kernel": 1,
        "resolve_kernel": 1,
    }  # fmt: skip


def masked(num_masks):
    words = torch.zeros(num_masks * (151936 // 32) + num_masks, dtype=torch.int32)
    bitmask = words[num_masks:].view(num_masks, -1)  # with any alignment, as the engine packs it
    logits = torch.empty(64, 151936, dtype=torch.bfloat16)
    return lambda: apply_token_bitmask(logits, bitmask, torch.zeros(num_masks, dtype=torch.int64))


def test_one_kernel_for_any_number_of_masks(tmp_path):
    launches = launches_of([(str(n), masked(n)) for n in (1, 2, 16, 21)])
    assert len({repr((specialised(kernel, args), options)) for _, kernel, args, options in launches}) == 1
    for capability in CAPABILITIES:
        _, kernel, args, options = launches[0]
        binary = compiled(kernel, args, options, capability)
        assert "st.global" in binary.asm["ptx"] and resources(binary, tmp_path)[1:] == (0, 0)
