"""Products of few tokens with weights of 4 and 8 bits, in CUDA C++.

`product.cuh` is the kernel. `products.py` has the ops, and says which calls the kernel takes.
"""
