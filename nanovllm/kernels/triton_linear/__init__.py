"""Matrix products with their epilogues in Triton: the ops `linear_bias_act` and `gated_mlp`.

Tensors must be on the current CUDA device.
"""

from nanovllm.kernels.triton_linear.product import gated_mlp, linear_bias_act

__all__ = ["gated_mlp", "linear_bias_act"]
