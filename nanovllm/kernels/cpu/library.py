"""The C++ library from Python: packed matrices and decoder steps."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from operator import is_
from typing import Any

import torch

from nanovllm.kernels.cpu.build import cpu_features, load_library
from nanovllm.kernels.cpu.checkpoint_blocks import fp8_blocks, int4_blocks
from nanovllm.kernels.cpu.compilers import WANTED
from nanovllm.kernels.cpu.cores import num_threads
from nanovllm.kernels.cpu.memory import weight_memory
from nanovllm.kernels.ops.checks import check_sampling
from nanovllm.kernels.ops.decoder_step import DecoderBatch, DecoderWeights
from nanovllm.kernels.ops.sample import check_sample

GGUF_FORMATS = ("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Storage formats by the names that GGUF gives them."""
FORMATS = (*GGUF_FORMATS, "INT4_32", "INT4_128", "E4M3")
"""All storage formats. Their places are the values of `Format` in formats.h."""
PLAIN = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

_FLOATS = ("F32", "BF16", "F16", "E4M3")

PARTS = {"float32": 3, "int8": 1, "bfloat16": 3}
"""Activations -> 8-bit parts of each that quantised weights are multiplied with; 24 bits are as exact as float32.

With "bfloat16", bfloat16 weights are multiplied with rounded activations, and quantised ones as with "float32".
"""


class _Weight(Structure):
    _fields_ = [
        ("data", c_void_p), ("rows", c_int64), ("columns", c_int64), ("format", c_int32), ("parts", c_int32),
        ("rounds", c_int32),
    ]  # fmt: skip


_NO_MEMORY = -2


def checked(status: Any, function: Any, arguments: Any) -> Any:
    """The status that a function of the library returns; for its `errcheck`.

    Raises:
        MemoryError: the status says that there was too little memory.
    """
    if status == _NO_MEMORY:
        raise MemoryError(
            "the C++ kernels: the system has no memory left for the step; set max_num_batched_tokens to less"
        )
    return status


_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_VECTORS = (
    "input_norm", "post_norm", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias",
    "down_bias",
)  # fmt: skip


class _Layer(Structure):
    _fields_ = [
        *((name, _Weight) for name in _MATRICES),
        *((name, c_void_p) for name in _VECTORS),
        ("window", c_int64),
        ("unrotated", c_int64),
    ]


class _Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        ("eps", c_float),
        ("parts", c_int32),
        ("rounds", c_int32),
        ("layers", POINTER(_Layer)),
        ("final_norm", c_void_p),
        ("cos_sin", c_void_p),
    ]


class _Batch(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("tokens", "num_seqs", "num_decodes", "max_blocks", "num_rows")),
        *((name, c_void_p) for name in ("positions", "slots", "block_table", "context_lens", "cu_seqlens", "rows")),
    ]


@cache
def _library() -> ctypes.CDLL:
    lib = load_library()
    lib.nanovllm_threads.restype = c_void_p
    lib.nanovllm_threads.argtypes = [c_int32]
    lib.nanovllm_packed_bytes.restype = c_int64
    lib.nanovllm_packed_bytes.argtypes = [c_int32, c_int64, c_int64]
    lib.nanovllm_pack.argtypes = [c_void_p, c_int32, c_int64, c_int64, c_void_p, c_void_p]
    lib.nanovllm_is_finite.argtypes = [c_void_p, POINTER(_Weight)]
    lib.nanovllm_rows.argtypes = [c_void_p, POINTER(_Weight), c_void_p, c_int64, c_void_p]
    lib.nanovllm_product.argtypes = [c_void_p, POINTER(_Weight), c_void_p, c_int64, c_void_p]
    lib.nanovllm_decoder_step.argtypes = [
        c_void_p, POINTER(_Model), c_int64, POINTER(_Batch), POINTER(c_void_p), POINTER(c_void_p), c_int64, c_int32,
        c_void_p, c_void_p,
    ]  # fmt: skip
    lib.nanovllm_sample.restype = c_int64
    for function in (lib.nanovllm_product, lib.nanovllm_decoder_step, lib.nanovllm_sample):
        function.errcheck = checked
    lib.nanovllm_sample.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 7]
    return lib


@cache
def _threads(process: int, setting: bytes | None) -> int:
    """The threads of this process; a forked process has none of its parent's."""
    value = None if setting is None else os.fsdecode(setting)
    count = num_threads(value)
    handle = _library().nanovllm_threads(count)
    if handle is None:
        raise ValueError(
            f"NANOVLLM_CPU_THREADS={value or 'unset'}: the system does not start {count} threads; set it to less"
        )
    return handle


def threads() -> int:
    """The handle of this process's threads."""
    return _threads(os.getpid(), os.environb.get(b"NANOVLLM_CPU_THREADS"))  # os.environ decodes, at every call


def can_round() -> bool:
    """Whether the library multiplies bfloat16 weights with activations that are rounded to bfloat16."""
    return bool(_library().nanovllm_can_round())


def _cannot_round() -> str:
    arch = os.environ.get("NANOVLLM_CPU_ARCH")
    if "avx512_bf16" not in cpu_features().split():
        reason, remedy = "this processor lacks", "use 'float32'"
    elif arch:
        reason, remedy = f"NANOVLLM_CPU_ARCH={arch!r} compiles without", "unset it, or use 'float32'"
    else:
        reason, remedy = "the C++ kernels were built without", f"install {WANTED}, or use 'float32'"
    return (
        f"cpu_activations='bfloat16': {reason} the instructions AVX512_BF16, which multiply bfloat16 activations;"
        f" {remedy}"
    )


class PackedMatrix:
    """A weight [rows, columns] in the kernels' tiles: as large as in its file, and read by no one else.

    Args:
        format: one of `FORMATS`.
        blocks: the rows as the file has them, or as `formats.h` describes them: uint8 [rows, bytes of a row], or a
            plain tensor [rows, columns].
        columns: needed for uint8 blocks.
        activations: what weights are multiplied with: a key of `PARTS`. Plain ones take float32, or bfloat16.

    Raises:
        ValueError: the processor, or the library, has no products of the activations.
    """

    def __init__(self, format: str, blocks: torch.Tensor, columns: int, activations: str = "float32") -> None:
        rounds = format == "BF16" and activations == "bfloat16"
        if rounds and not can_round():
            raise ValueError(_cannot_round())
        self.format = format
        self.rows, self.columns = blocks.shape[0], columns
        index, lib = FORMATS.index(format), _library()
        blocks = blocks.contiguous()
        self.tiles = weight_memory().take(lib.nanovllm_packed_bytes(index, self.rows, columns))
        lib.nanovllm_pack(threads(), index, self.rows, columns, blocks.data_ptr(), self.tiles.data_ptr())
        self.struct = _Weight(
            self.tiles.data_ptr(), self.rows, columns, index, 0 if format in _FLOATS else PARTS[activations],
            rounds,
        )  # fmt: skip

    @classmethod
    def of(cls, weight: torch.Tensor, activations: str = "float32") -> PackedMatrix:
        """A float32, bfloat16 or float16 tensor [rows, columns], packed."""
        return cls(PLAIN[weight.dtype], weight, weight.shape[1], activations)

    @classmethod
    def of_int4(
        cls, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, activations: str = "float32"
    ) -> PackedMatrix:
        """Integers of 4 bits in groups of columns, as `int4_blocks` takes them: 4.5 bits a weight, or 6.

        Groups of a multiple of 128 columns take 4.5 bits, others of a multiple of 32 take 6.
        """
        return cls(*int4_blocks(weight, scale, zero), activations)

    @classmethod
    def of_fp8(cls, weight: torch.Tensor, scale: torch.Tensor) -> PackedMatrix:
        """8-bit floats (e4m3), as `fp8_blocks` takes them. Products are of float32 activations."""
        return cls(*fp8_blocks(weight, scale))

    def is_finite(self) -> bool:
        """Whether every weight is finite."""
        return bool(_library().nanovllm_is_finite(threads(), byref(self.struct)))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.tiles.numel()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [count, columns] float32 -> [count, rows] float32: x times the transpose."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.rows)
        _library().nanovllm_product(threads(), byref(self.struct), x.data_ptr(), x.shape[0], out.data_ptr())
        return out

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [count] int64, in range -> these rows, [count, columns] float32."""
        out = torch.empty(ids.shape[0], self.columns)
        ids = ids.contiguous()
        _library().nanovllm_rows(threads(), byref(self.struct), ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out


class _Structures:
    """A decoder's weights as the library takes them. The addresses hold as long as the weights do."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.layers = (_Layer * len(weights.layers))()
        for struct, layer in zip(self.layers, weights.layers):
            for name in _MATRICES:
                matrix = getattr(layer, name)
                if not isinstance(matrix, PackedMatrix):
                    raise TypeError(f"decoder_step: {name}: expected a PackedMatrix, not {type(matrix).__name__}")
                setattr(struct, name, matrix.struct)
            for name in _VECTORS:
                vector = getattr(layer, name)
                setattr(struct, name, None if vector is None else _float32(vector).data_ptr())
            struct.window, struct.unrotated = layer.window or 0, not layer.rotated
        parts = {getattr(layer, name).struct.parts for layer in weights.layers for name in _MATRICES} - {0}
        if len(parts) > 1:
            raise ValueError("decoder_step: the quantised matrices differ in what activations they take")
        first, dim = weights.layers[0], weights.head_dim
        self.model = _Model(
            len(weights.layers), first.q.columns, first.q.rows // dim, first.k.rows // dim, dim, first.up.rows,
            weights.eps, max(parts, default=0),
            any(getattr(layer, name).struct.rounds for layer in weights.layers for name in _MATRICES), self.layers,
            _float32(weights.final_norm).data_ptr(),
            _float32(weights.cos_sin_cache).data_ptr(),
        )  # fmt: skip
        self._caches: tuple[torch.Tensor, ...] = ()
        self._pointers: Sequence[ctypes.Array[c_void_p]] = ()

    def pointers(
        self, k_caches: Sequence[torch.Tensor], v_caches: Sequence[torch.Tensor]
    ) -> Sequence[ctypes.Array[c_void_p]]:
        """The caches' addresses. They are mostly those of the step before."""
        caches = (*k_caches, *v_caches)
        if len(caches) != len(self._caches) or not all(map(is_, caches, self._caches)):
            self._caches = caches
            self._pointers = [(c_void_p * len(side))(*(c.data_ptr() for c in side)) for side in (k_caches, v_caches)]
        return self._pointers


def _float32(vector: torch.Tensor) -> torch.Tensor:
    if vector.dtype != torch.float32 or not vector.is_contiguous():
        raise ValueError(f"decoder_step: expected contiguous float32 vectors, not {vector.dtype}")
    return vector


_structures: weakref.WeakKeyDictionary[DecoderWeights, _Structures] = weakref.WeakKeyDictionary()


def decoder_step(
    x: torch.Tensor,
    batch: DecoderBatch,
    weights: DecoderWeights,
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op `decoder_step`. Every matrix is a `PackedMatrix`; caches are contiguous and of a dtype in `PLAIN`."""
    structures = _structures.get(weights)
    if structures is None:
        structures = _structures[weights] = _Structures(weights)
    x = x.contiguous()
    b, num_rows = batch, x.shape[0] if rows is None else rows.shape[0]
    tensors = [
        None if tensor is None else tensor.contiguous()
        for tensor in (b.positions, b.slot_mapping, b.block_table, b.context_lens, b.cu_seqlens_q, rows)
    ]
    struct = _Batch(
        x.shape[0], b.context_lens.shape[0], b.num_decodes, b.block_table.shape[1],
        -1 if rows is None else num_rows,
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
    )  # fmt: skip
    out = torch.empty(num_rows, x.shape[1])
    cache = k_caches[0]
    _library().nanovllm_decoder_step(
        threads(), byref(structures.model), len(k_caches), byref(struct), *structures.pointers(k_caches, v_caches),
        cache.shape[1],
        FORMATS.index(PLAIN[cache.dtype]), x.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The op `sample`. Logits of 16 bits, which models have that run op by op, are converted first."""
    logits = logits.float()
    if not logits.shape[1]:
        check_sample(logits, temperature, top_p, min_p)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows = [t if t is None else t.contiguous() for t in (temperature, top_k, top_p, min_p, seeds, positions)]
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    wrong = _library().nanovllm_sample(
        threads(), logits.data_ptr(), *logits.shape, logits.stride(0),
        *(None if t is None else t.data_ptr() for t in rows), out.data_ptr(),
    )  # fmt: skip
    if wrong >= 0:
        check_sampling(temperature, top_p, min_p)
    return out
