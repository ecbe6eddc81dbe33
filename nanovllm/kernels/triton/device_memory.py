"""Order of accesses to device memory, and requests for it ahead of use. In the interpreter both do nothing: it runs one
program after the other.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.device_math import INTERPRETED

if INTERPRETED:

    @triton.jit
    def fence():
        pass

    @triton.jit
    def prefetch(ptr, SIZE: tl.constexpr):
        pass
else:

    @triton.jit
    def fence():
        """What this thread has written comes, for every multiprocessor, before what it writes or signals from now
        on.
        """
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def prefetch(ptr, SIZE: tl.constexpr):
        """Ask for SIZE elements of 16 bits or more, without waiting for them."""
        lines = (ptr + tl.arange(0, 32) % tl.cdiv(SIZE, 32) * 32).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )
