"""The course: a function in five ways (plain torch, torch's own, torch.compile, CUDA C++, Triton), side by side.

`nanovllm lab gelu|softmax|layernorm|matmul` runs a lesson, `nanovllm lab mlp` the scaling sweeps;
docs/CUSTOM_CUDA_KERNEL_GUIDE.md is the text that goes with them.
"""
