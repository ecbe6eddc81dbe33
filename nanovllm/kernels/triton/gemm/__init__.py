"""Matrix products in Triton, with what is fused into them.

The modules import triton: import them only where it is there.
"""
