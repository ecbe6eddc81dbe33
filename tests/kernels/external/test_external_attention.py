"""FlashAttention and FlashInfer as providers of the attention ops.

Without the packages, stand-ins take their places: functions of the same names that check what they are called with and
compute the reference. With a GPU and a package, the real one runs against the reference in float64.
"""

import importlib
import inspect
import sys
import types

import pytest
import torch

from nanovllm.kernels.external import flash_attn, flashinfer
from nanovllm.kernels.external.packages import import_error
from nanovllm.kernels.op import selection
from nanovllm.kernels.ops.attention import attention_decode, attention_prefill
from nanovllm.kernels.ops.paged_kv import PagedKV

GPU = torch.cuda.is_available()
flat = attention_prefill.records.taking_fields  # arguments by name, the fields of the cache one by one
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    """What the modules remember of the machine belongs to one test."""
    cached = (
        flash_attn.installed, flash_attn.variant, flash_attn._function, flashinfer._wrapper,
        flashinfer._shared_workspace, import_error,
    )  # fmt: skip
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def example(
    query_lens=(5, 1, 9),
    lens=(5, 40, 30),
    *,
    heads=6,
    kv_heads=2,
    dim=64,
    block_size=16,
    dtype=torch.float32,
    device=CPU,
):
    """Arguments of attention_prefill; the cache's unused slots hold NaN."""
    generator = torch.Generator().manual_seed(0)
    blocks = [-(-n // block_size) for n in lens]
    table = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
    order = torch.randperm(sum(blocks) + 2, generator=generator).int()
    cache = torch.full((2, len(order), block_size, kv_heads, dim), float("nan"))
    for i, n in enumerate(lens):
        table[i, : blocks[i]], order = order[: blocks[i]], order[blocks[i] :]
        for j in range(n):
            cache[:, table[i, j // block_size], j % block_size] = torch.randn(2, kv_heads, dim, generator=generator)
    q = torch.randn(sum(query_lens), heads + 1, dim, generator=generator)[:, :heads]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    cache = cache.to(dtype).to(device)
    return dict(
        q=q.to(dtype).to(device), k_cache=cache[0], v_cache=cache[1], block_table=table.to(device),
        cu_seqlens_q=starts.to(device),
        context_lens=torch.tensor(lens, dtype=torch.int32, device=device), max_query_len=max(query_lens),
        scale=dim**-0.5,
        max_context_len=table.shape[1] * block_size,
    )  # fmt: skip


def decode_example(lens=(5, 40, 30), n=1, **options):
    """n: query tokens a sequence."""
    arguments = example((n,) * len(lens), lens, **options)
    del arguments["cu_seqlens_q"], arguments["max_query_len"]
    return {**arguments, "max_context_len": max(lens)}


# ---- signatures and reasons


@pytest.mark.parametrize("module", [flash_attn, flashinfer])
@pytest.mark.parametrize("declared", [attention_decode, attention_prefill])
def test_signatures(module, declared):
    expected = inspect.signature(declared.native)
    assert inspect.signature(getattr(module, declared.name), eval_str=True) == expected
    planned = declared.providers[module.__name__.rpartition(".")[2]].planned_fn
    assert (planned is not None) == (module is flashinfer)
    assert planned is None or inspect.signature(planned).parameters.keys() == expected.parameters.keys()
    accepts = inspect.signature(getattr(module, declared.name.replace("attention", "accepts")))
    assert [(p.name, p.default) for p in accepts.parameters.values()] == [
        (p.name, p.default) for p in expected.parameters.values()
    ]


def test_missing_packages(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for device in (CPU, CUDA):
        assert "not installed; pip install flash-attn" in flash_attn.support(device)
        assert "not installed; pip install flashinfer-python" in flashinfer.support(device)


PACKAGES = ("flash_attn", "flash_attn_interface", "flash_attn_2_cuda", "vllm", "flashinfer", "tvm_ffi")
WORKING = """
def flash_attn_with_kvcache(): ...
def flash_attn_varlen_func(): ...
class BatchDecodeWithPagedKVCacheWrapper: ...
class BatchPrefillWithPagedKVCacheWrapper: ...
"""
VLLM = "vllm/vllm_flash_attn/flash_attn_interface.py"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages; nothing else is installed."""
    kept = [p for p in sys.path if "-packages" not in p]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *kept])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [n for n in sys.modules if n.partition(".")[0] in PACKAGES]:
        monkeypatch.delitem(sys.modules, name)

    def add(*files, text=WORKING):
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()

    yield add
    for name in [n for n in sys.modules if n.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "files, capability, expected",
    [
        (["flash_attn/__init__.py", "flash_attn_2_cuda.py"], (8, 0), "FlashAttention 2 (flash_attn)"),
        (
            ["flash_attn/__init__.py", "flash_attn_2_cuda.py", "flash_attn_interface.py"],
            (9, 0),
            "FlashAttention 3 (flash_attn_interface)",
        ),
        (
            ["flash_attn/__init__.py", "flash_attn_2_cuda.py", "flash_attn_interface.py"],
            (8, 6),
            "FlashAttention 2 (flash_attn)",
        ),
        (
            ["flash_attn/cute/__init__.py", "flash_attn/cute/interface.py"],
            (10, 0),
            "FlashAttention 4 (flash_attn.cute)",
        ),
        (["vllm/__init__.py", VLLM, "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"], (9, 0), "FlashAttention 3 (vLLM)"),
        (["vllm/__init__.py", VLLM, "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"], (9, 0), "FlashAttention 2 (vLLM)"),
        (["vllm/__init__.py"], (9, 0), None),
        (["flash_attn_interface.py"], (8, 0), None),
    ],
)
def test_what_is_installed_is_found(site, monkeypatch, files, capability, expected):
    site(*files)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = flash_attn.variant(CUDA)
    assert (found and found.name) == expected
    reason = flash_attn.support(CUDA)
    assert (reason is None) == (expected is not None)
    if expected is None and flash_attn.installed():
        assert (
            "compute capability 8.0: FlashAttention 3 (flash_attn_interface) runs on compute capability 9.x" in reason
        )


def test_nothing_is_imported_where_it_cannot_run(site, monkeypatch):
    files = ("flash_attn/__init__.py", "flash_attn_2_cuda.py", "flash_attn_interface.py", "flashinfer/__init__.py")
    site(*files, "tvm_ffi/__init__.py", text="raise SystemExit('imported')")
    assert flash_attn.installed() == ("flash_attn_interface", "flash_attn")
    assert flash_attn.support(CPU) == "FlashAttention needs a CUDA device, this is cpu"
    assert flashinfer.support(CPU) == "FlashInfer needs a CUDA device, this is cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "this GPU has compute capability 7.5" in flash_attn.support(CUDA)
    assert "this GPU has 7.5" in flashinfer.support(CUDA)


BROKEN = {
    "ImportError: /lib/flash.so: undefined symbol: _ZN3c10": "raise ImportError('/lib/flash.so:\\n undefined symbol:"
    " _ZN3c10')",
    "OSError: libcudart.so.12: cannot open": "raise OSError('libcudart.so.12: cannot open')",
    "AttributeError: module 'flash_attn": "",
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_flash_attention_is_a_reason(site, monkeypatch, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    site("flash_attn/__init__.py", "flash_attn_interface.py", text=BROKEN[said])
    site("flash_attn_2_cuda.py")
    site("flash_attn-2.7.4.dist-info/METADATA", text="Name: flash-attn\nVersion: 2.7.4\n")
    reason = flash_attn.support(CUDA)
    assert f"FlashAttention 2 (flash_attn), flash-attn 2.7.4, is installed but cannot be imported ({said}" in reason
    assert (
        f"(flash_attn_interface), flash-attn-3 of unknown version, is installed but cannot be imported ({said}"
        in reason
    )
    assert f"install one built for torch {torch.__version__}" in reason and "\n" not in reason
    for declared in (attention_decode, attention_prefill):
        # Listed with the reason, never the choice, and an error with the reason where it is named.
        assert declared.providers["flash_attn"].support(CUDA) == reason
        monkeypatch.setattr(selection, "measured_order", lambda name, device: ("flash_attn", "native"))
        assert selection._choose(declared, CUDA, {}).name == "native"
        with pytest.raises(ValueError, match="is installed but cannot be imported"):
            declared.require("flash_attn", CUDA, "a user")


def test_a_module_without_origin_is_none_of_theirs(site, monkeypatch):
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert "not installed" in flash_attn.support(CUDA) and "not installed" in flashinfer.support(CUDA)


def test_a_broken_flash_attention_is_passed_over(site, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    site("flash_attn_interface.py", text="raise ImportError('built for another torch')")
    site("flash_attn/__init__.py", "flash_attn_2_cuda.py")
    assert flash_attn.support(CUDA) is None
    assert flash_attn.variant(CUDA).name == "FlashAttention 2 (flash_attn)"


def test_libraries_that_vllm_could_not_load_are_a_reason(site, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    unsupported = "def fa_version_unsupported_reason(version): return 'FA3 is unavailable' if version == 3 else None\n"
    site(VLLM, text=WORKING + unsupported)
    site("vllm/__init__.py", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
    reason = flash_attn.support(CUDA)
    assert (
        "FlashAttention 3 (vLLM), vllm of unknown version, is installed but cannot run (FA3 is unavailable)" in reason
    )


def test_flashinfer_support(site, monkeypatch):
    site("flashinfer/__init__.py")
    assert "needs apache-tvm-ffi" in flashinfer.support(CUDA)
    site("tvm_ffi/__init__.py")
    assert flashinfer.support(CPU) == "FlashInfer needs a CUDA device, this is cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "this GPU has 7.5" in flashinfer.support(CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert flashinfer.support(CUDA) is None


def test_a_broken_flashinfer_is_a_reason(site, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    site("tvm_ffi/__init__.py")
    site("flashinfer/__init__.py", text="raise OSError('libtvm_ffi.so: wrong ELF class')")
    said = "flashinfer of unknown version is installed but cannot be imported (OSError: libtvm_ffi.so: wrong ELF class)"
    assert said in flashinfer.support(CUDA)


def variant(package):
    return next(v for v in flash_attn.VARIANTS if v.package == package)


HALF = dict(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "package, options, change, reason",
    [
        ("flash_attn", dict(HALF, block_size=256), {}, None),
        ("flash_attn", dict(HALF, block_size=128), {}, "block size that is a multiple of 256, got 128"),
        ("vllm3", dict(HALF, block_size=48), {}, None),
        ("vllm3", dict(HALF, block_size=8), {}, "multiple of 16, got 8"),
        ("flash_attn.cute", dict(HALF, block_size=64), {}, "multiple of 128, got 64"),
        ("flash_attn.cute", dict(HALF, block_size=128, dim=256), {}, "head_dim of at most 128"),
        ("flash_attn_interface", dict(HALF, dim=84), {}, "head_dim of at most 256 that is a multiple of 8, got 84"),
        ("flash_attn_interface", {}, {}, "takes float16 and bfloat16, got float32"),
        ("flash_attn_interface", HALF, {"k_scale": torch.ones(1)}, "takes scales only for"),
        (
            "flash_attn_interface",
            HALF,
            {"k_cache": torch.zeros(2, 16, 2, 64).to(torch.float8_e4m3fn)},
            "got float8_e4m3fn beside bfloat16",
        ),
    ],
)
def test_what_flash_attention_refuses(monkeypatch, package, options, change, reason):
    monkeypatch.setattr(flash_attn, "variant", lambda device: variant(package))
    for arguments, accepts, function in (
        (example(**options), flash_attn.accepts_prefill, flash_attn.attention_prefill),
        (decode_example(**options), flash_attn.accepts_decode, flash_attn.attention_decode),
    ):
        got = flat(accepts)(**{**arguments, **change})
        assert got is None if reason is None else reason in got
        if reason is not None:
            with pytest.raises(ValueError) as error:
                flat(function)(**{**arguments, **change})
            assert str(error.value) == got


def test_what_flashinfer_refuses(monkeypatch):
    assert flat(flashinfer.accepts_prefill)(**example(**HALF)) is None
    assert flat(flashinfer.accepts_decode)(**decode_example(**HALF)) is None
    assert "takes float16 and bfloat16" in flat(flashinfer.accepts_prefill)(**example())
    assert "head_dim of 64, 128, 256, got 96" in flat(flashinfer.accepts_decode)(**decode_example(dim=96, **HALF))
    assert "scales" in flat(flashinfer.accepts_decode)(**decode_example(**HALF), v_scale=torch.ones(1))
    few = decode_example(n=3, **HALF)
    assert flat(flashinfer.accepts_decode)(**few) == "FlashInfer's decode takes one query token a sequence, got 3"
    with pytest.raises(ValueError, match="takes one query token a sequence, got 3"):
        flat(flashinfer.attention_decode)(**few)
    strided = example(**HALF)
    strided["k_cache"] = torch.zeros(9, 16, 4, 64, dtype=torch.bfloat16)[:, :, :2]
    assert "contiguous cache" in flat(flashinfer.accepts_prefill)(**strided)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    q, cache = torch.empty(3, 6, 64, **HALF, device="meta"), torch.empty(4, 16, 2, 64, **HALF, device="meta")
    q_cuda = types.SimpleNamespace(dtype=q.dtype, shape=q.shape, device=CUDA)
    assert "CUDA graph cannot record" in flashinfer._refuse(
        q_cuda, PagedKV(cache, cache, torch.zeros(3, 2), torch.ones(3), 32)
    )
    assert not any(op.providers["flashinfer"].capturable for op in (attention_decode, attention_prefill))


def test_support_is_needed_first():
    reason = flat(flash_attn.accepts_prefill)(**example(**HALF))
    assert reason is not None and reason == flash_attn.support(CPU)


# ---- stand-ins: what the libraries are called with


def stand_in(monkeypatch, name, **functions):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:i]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, function in functions.items():
        setattr(module, key, function)


def window_of(sides):
    left, right = (-1 if s is None else s for s in sides)
    assert (left, right) == (-1, -1) or right == 0
    return None if left < 0 else left + 1


def attend(q, k, v, table, starts, lens, longest, scale, sides, soft_cap):
    assert starts.dtype == lens.dtype == torch.int32
    if (0 < lens).logical_and(lens < starts.diff()).any():  # which the reference refuses of runs
        n = int(starts[1])
        assert starts.tolist() == list(range(0, len(q) + 1, n))
        most = int(lens.max())
        kv = PagedKV(k, v, table, lens, most)
        return attention_decode.native(q, kv, scale, window_of(sides), soft_cap or None)
    kv = PagedKV(k, v, table, lens, table.shape[1] * k.shape[1])
    return attention_prefill.native(q, kv, starts, longest, scale, window_of(sides), soft_cap or None)


def fa3(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    page_table,
    cu_seqlens_q,
    max_seqlen_q,
    softmax_scale,
    causal,
    window_size,
    softcap,
):
    assert causal
    return attend(
        q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens, max_seqlen_q, softmax_scale, window_size, softcap
    )


def vllm(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    *,
    seqused_k,
    softmax_scale,
    causal,
    window_size,
    softcap,
    block_table,
    fa_version,
):
    assert causal and fa_version in (2, 3) and max_seqlen_k >= seqused_k.max()
    return attend(q, k, v, block_table, cu_seqlens_q, seqused_k, max_seqlen_q, softmax_scale, window_size, softcap)


def fa4(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    seqused_k,
    max_seqlen_q,
    max_seqlen_k,
    page_table,
    softmax_scale,
    causal,
    window_size,
    softcap,
):
    assert causal and max_seqlen_k >= seqused_k.max()
    return attend(q, k, v, page_table, cu_seqlens_q, seqused_k, max_seqlen_q, softmax_scale, window_size, softcap), None


def fa2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    *,
    softmax_scale,
    causal,
    window_size,
    softcap,
    block_table,
):
    assert causal and cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k[0] == 0
    assert max_seqlen_q > flash_attn._FEW or len(q) < max_seqlen_q * (
        len(cu_seqlens_q) - 1
    )  # else the other splits contexts
    return attend(
        q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff(), max_seqlen_q, softmax_scale, window_size, softcap
    )


def fa2_decode(q, k, v, *, cache_seqlens, block_table, softmax_scale, causal, window_size, softcap):
    num_seqs, n = q.shape[:2]
    assert causal and 1 <= n <= flash_attn._FEW and len(cache_seqlens) == num_seqs
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * n
    o = attend(q.flatten(0, 1), k, v, block_table, starts, cache_seqlens, n, softmax_scale, window_size, softcap)
    return o.unflatten(0, (num_seqs, n))


class Wrapper:
    """Of FlashInfer: what it does from what it is planned with. A wrapper holds the last plan."""

    plans = 0  # of all wrappers

    def __init__(self, workspace, layout, **options):
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def _plan(
        self,
        runs,
        starts,
        blocks,
        last,
        num_heads,
        num_kv_heads,
        dim,
        block_size,
        *,
        window_left,
        logits_soft_cap,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        Wrapper.plans += 1
        assert starts.device.type == runs.device.type == last.device.type == "cpu"
        counts = starts.diff()
        lens = ((counts - 1).clamp_min(0) * block_size + last).int()
        table = torch.zeros(len(lens), int(counts.max()), dtype=torch.int32)
        for i, n in enumerate(counts.tolist()):
            table[i, :n] = blocks[starts[i] : starts[i + 1]]
        window = None if window_left < 0 else window_left + 1
        self.heads = num_heads, num_kv_heads, dim, block_size
        self.table = table, lens, table.shape[1] * block_size
        self.arguments = (runs, int(runs.diff().max()), sm_scale, window, logits_soft_cap)

    def run(self, q, cache, *, out):
        k, v = cache
        assert self.heads == (q.shape[1], k.shape[2], q.shape[2], k.shape[1])
        assert q.is_contiguous() and (out.shape, out.dtype) == (q.shape, q.dtype)
        o = attention_prefill.native(q, PagedKV(k, v, *self.table), *self.arguments)
        return out.copy_(torch.where(o == 0, float("nan"), o))  # what a sequence without tokens gets is not promised


class PrefillWrapper(Wrapper):
    def plan(self, *arguments, causal, **options):
        assert causal
        self._plan(*arguments, **options)


class DecodeWrapper(Wrapper):
    def plan(self, starts, *arguments, **options):
        self._plan(torch.arange(len(starts), dtype=torch.int32), starts, *arguments, **options)


STAND_INS = {
    "flash_attn_interface": ("flash_attn_interface", {"flash_attn_with_kvcache": fa3}),
    "vllm3": ("vllm.vllm_flash_attn.flash_attn_interface", {"flash_attn_varlen_func": vllm}),
    "vllm2": ("vllm.vllm_flash_attn.flash_attn_interface", {"flash_attn_varlen_func": vllm}),
    "flash_attn.cute": ("flash_attn.cute", {"flash_attn_varlen_func": fa4}),
    "flash_attn": ("flash_attn", {"flash_attn_varlen_func": fa2, "flash_attn_with_kvcache": fa2_decode}),
    "flashinfer": (
        "flashinfer",
        {"BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper, "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper},
    ),
}


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"soft_cap": 3.0}, {"window": 1, "soft_cap": 3.0}])
@pytest.mark.parametrize("package", STAND_INS)
def test_calls(monkeypatch, package, options):
    name, functions = STAND_INS[package]
    stand_in(monkeypatch, name, **functions)
    module = flashinfer if package == "flashinfer" else flash_attn
    if module is flash_attn:
        monkeypatch.setattr(flash_attn, "variant", lambda device: variant(package))
    shape = dict(HALF, block_size=256)
    for declared, arguments in (
        (attention_prefill, example(**shape)),
        (attention_prefill, example((1, 1), (1, 300), **shape)),
        (attention_prefill, example((2, 3), (0, 40), **shape)),
        (attention_decode, decode_example(**shape)),
        (attention_decode, decode_example((0, 300), **shape)),
        *((attention_decode, decode_example((3, 300), n, **shape)) for n in (2, 5, 20) if module is flash_attn),
    ):
        got = flat(getattr(module, declared.name))(**arguments, **options)
        torch.testing.assert_close(got, flat(declared.native)(**arguments, **options))


PLANNED = [
    (attention_prefill, example, ((2, 3), (0, 40)), ((7,), (30,))),
    (attention_prefill, example, ((5, 1, 9), (5, 40, 30)), ((1, 1), (0, 3))),
    (attention_decode, decode_example, ((0, 300),), ((5, 7, 0),)),
    (attention_decode, decode_example, ((5, 40, 30),), ((90,),)),
]


@pytest.mark.parametrize("options", [{}, {"window": 7, "soft_cap": 3.0, "scale": 0.3}])
@pytest.mark.parametrize("declared, make, lens, other_lens", PLANNED)
def test_a_plan_is_made_once(monkeypatch, declared, make, lens, other_lens, options):
    """What `planned` gives runs again and again: on other queries and caches, without a look at lengths or blocks,
    beside other plans.
    """
    stand_in(monkeypatch, *STAND_INS["flashinfer"][:1], **STAND_INS["flashinfer"][1])
    whole, planned = declared.providers["flashinfer"].fn, declared.providers["flashinfer"].planned_fn
    arguments, others = ({**make(*n, **HALF), **options} for n in (lens, other_lens))
    q = arguments["q"]
    arguments["q"] = torch.cat([q, q], 1)[:, : q.shape[1]]  # strided: what is made contiguous is read at each call
    run, run_other = flat(planned)(**arguments), flat(planned)(**others)
    expected_other = flat(declared.native)(**others)
    torch.testing.assert_close(flat(whole)(**others), expected_other)
    plans = Wrapper.plans
    for factor in (1.0, -0.5):
        for name in ("q", "k_cache", "v_cache"):
            arguments[name].mul_(factor)
        expected = flat(declared.native)(**arguments)
        kept = {name: arguments[name].clone() for name in ("context_lens", "block_table")}
        for name in kept:
            arguments[name].fill_(1)
        results = [run(), run()]
        for name, value in kept.items():
            arguments[name].copy_(value)
        torch.testing.assert_close(run_other(), expected_other)
        for got in results:
            torch.testing.assert_close(got, expected)
        assert results[0].data_ptr() != results[1].data_ptr()
    assert Wrapper.plans == plans


@pytest.mark.parametrize("declared, arguments", [(attention_prefill, example()), (attention_decode, decode_example())])
def test_a_plan_refuses_what_a_call_does(monkeypatch, declared, arguments):
    stand_in(monkeypatch, "flashinfer")
    planned = declared.providers["flashinfer"].planned_fn
    with pytest.raises(ValueError, match="takes float16 and bfloat16"):
        flat(planned)(**arguments)
    halved = {k: v.bfloat16() if k in ("q", "k_cache", "v_cache") else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match="window: expected None or a whole number"):
        flat(planned)(**halved, window=0)
    none = {**halved, "q": halved["q"][:0]}
    for name in ("block_table", "context_lens"):
        none[name] = none[name][:0]
    if declared is attention_prefill:
        none["cu_seqlens_q"] = none["cu_seqlens_q"][:1]
    assert flat(planned)(**none)().shape == (0, 6, 64)


@pytest.mark.parametrize("package", ["flash_attn", "flashinfer"])
def test_no_queries(monkeypatch, package):
    stand_in(monkeypatch, package)
    monkeypatch.setattr(flash_attn, "variant", lambda device: variant("flash_attn"))
    module = flashinfer if package == "flashinfer" else flash_attn
    assert flat(module.attention_prefill)(**example((0,), (3,), block_size=256, **HALF)).shape == (0, 6, 64)


@pytest.mark.parametrize("package", ["flash_attn", "flashinfer"])
def test_bad_arguments(monkeypatch, package):
    stand_in(monkeypatch, package)
    monkeypatch.setattr(flash_attn, "variant", lambda device: variant("flash_attn"))
    module = flashinfer if package == "flashinfer" else flash_attn
    shape = dict(HALF, block_size=256)
    decode, prefill = decode_example(**shape), example(**shape)
    for fn, arguments in ((module.attention_decode, decode), (module.attention_prefill, prefill)):
        with pytest.raises(ValueError, match="window: expected None or a whole number of tokens from 1 to .*, got 0"):
            flat(fn)(**arguments, window=0)
        with pytest.raises(ValueError, match="context_lens: expected contiguous int32"):
            flat(fn)(**{**arguments, "context_lens": arguments["context_lens"].long()})
        with pytest.raises(ValueError, match="context_lens: sequence 0 has length 3000"):
            flat(fn)(**{**arguments, "context_lens": torch.full_like(arguments["context_lens"], 3000)})
    with pytest.raises(
        ValueError, match=r"q: expected \[n \* 3, num_heads, head_dim\], .* 3 sequences .* got \[2, 6, 64\]"
    ):
        flat(module.attention_decode)(**{**decode, "q": decode["q"][:2]})
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected contiguous int32 \[4\], got torch.int64 \[4\]"):
        flat(module.attention_prefill)(**{**prefill, "cu_seqlens_q": prefill["cu_seqlens_q"].long()})
    with pytest.raises(ValueError, match="max_query_len: expected at least 9, the query tokens of sequence 2, got 8"):
        flat(module.attention_prefill)(**{**prefill, "max_query_len": 8})


# ---- the real ones


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [dict(heads=16, kv_heads=8, dim=128, block_size=256), dict(heads=14, kv_heads=2, dim=64, block_size=256)]
)
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"soft_cap": 20.0}])
@pytest.mark.parametrize("module", [flash_attn, flashinfer])
def test_against_float64(module, options, shape, dtype):
    if (reason := module.support(CUDA)) is not None:
        pytest.skip(reason)
    for declared, arguments in (
        (attention_prefill, example((300, 1, 129), (300, 700, 1000), **shape, dtype=dtype, device=CUDA)),
        (attention_decode, decode_example((300, 1, 1000), **shape, dtype=dtype, device=CUDA)),
        *(
            (attention_decode, decode_example((300, 1, 1000), n, **shape, dtype=dtype, device=CUDA))
            for n in (2, 8, 40)
            if module is flash_attn
        ),
    ):
        reason = flat(getattr(module, declared.name.replace("attention", "accepts")))(**arguments, **options)
        if reason is not None:
            pytest.skip(reason)
        got = flat(getattr(module, declared.name))(**arguments, **options).double()
        wide = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()
        }
        expected = flat(declared.native)(**wide, **options)
        assert (got - expected).norm() / expected.norm() < (1e-3 if dtype == torch.float16 else 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("declared, make, lens, other_lens", PLANNED)
@pytest.mark.parametrize("heads", [dict(heads=16, kv_heads=8), dict(heads=32, kv_heads=8)])
def test_a_plan_in_a_graph(declared, make, lens, other_lens, heads):
    """Of the real FlashInfer: replays see new queries and caches, and other plans beside it do not matter."""
    if (reason := flashinfer.support(CUDA)) is not None:
        pytest.skip(reason)
    planned = declared.providers["flashinfer"].planned_fn
    arguments, others = (make(*n, **heads, **HALF, dim=128, block_size=256, device=CUDA) for n in (lens, other_lens))
    run, run_other = flat(planned)(**arguments), flat(planned)(**others)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(), run_other()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        got, got_other = run(), run_other()
    for factor in (1.0, -0.5):
        for name in ("q", "k_cache", "v_cache"):
            arguments[name].mul_(factor)
        graph.replay()
        torch.testing.assert_close(got, flat(declared.native)(**arguments), rtol=3e-2, atol=1e-2)
        torch.testing.assert_close(got_other, flat(declared.native)(**others), rtol=3e-2, atol=1e-2)


# Only what can run here is collected, so that nothing is reported as skipped.
if not GPU:
    del test_against_float64, test_a_plan_in_a_graph
