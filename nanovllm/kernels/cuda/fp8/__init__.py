"""Products of few tokens with weights of 8-bit floats, in CUDA C++.

`product.cuh` is the kernel. `linear_fp8.py` launches it, and says which calls it takes.
"""
