"""The kernels in other frameworks: transformers, vLLM, torch.compile."""
