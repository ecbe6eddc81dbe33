"""Products of few tokens with weights of 4 and 8 bits, in CUDA C++.

`product.cuh` is the kernel; `ring.cuh` is that of Q4_K, Q6_K and int4 where it is faster, `box.cuh` that of int4 and
Q4_K with one token, `wide.cuh` that of int4 with 17 to 128 tokens. `linear_packed.py` has the ops, and says which
calls the kernels take. `to_fp8.cu` rounds int4 to 8-bit floats for products of many tokens.
"""
