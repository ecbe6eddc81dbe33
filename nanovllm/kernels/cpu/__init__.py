"""C++ kernels for CPUs: products of packed weights, and a decoder's layers in one call.

`library.cpp` is the C interface. Read `tiles.h` first (how weights lie in memory), then `products.h`, `attention.h` and
`decoder.h`. `build.py` compiles them at their first use, `library.py` calls them.
"""
