"""A pass of torch.compile that puts fused ops of this package in the place of what they compute.

    from nanovllm.adapters.inductor import FusedOps

    fused = FusedOps()
    model = torch.compile(model, options=fused.options())
    model(...)
    print(fused.report())

Inductor writes one kernel for a chain of element-wise operations, and knows the whole graph. So a replacement pays
where a kernel of this package is faster than Inductor's, which `nanovllm kernels bench OP --compile` measures.

The patterns are traced from their PyTorch code by the installed version of PyTorch, so that they are decomposed as a
compiled model is. The pass runs on the graphs of the forward pass, after autograd: a value that is kept for the
backward pass is not fused away.
"""

from nanovllm.adapters.inductor.fused_ops import FUSED, OPS, FusedOps, PassReport, replacing

__all__ = ["FUSED", "OPS", "FusedOps", "PassReport", "replacing"]
