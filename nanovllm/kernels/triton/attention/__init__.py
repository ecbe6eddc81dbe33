"""Attention over the paged KV cache in Triton. The modules import triton: import them only where it is there."""
