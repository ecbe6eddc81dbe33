"""The kernels in a model of transformers.

    from nanovllm.adapters.transformers import apply
    print(apply(model))

`apply` replaces what it recognises in one model, and returns a report that takes it back. Of the routes that
transformers has for kernels of others, `register_attention` serves `attn_implementation="nanovllm"`, and
`kernel_mapping` the package `kernels`.
"""

from nanovllm.adapters.transformers.apply import apply, undo
from nanovllm.adapters.transformers.attn_implementation import register_attention
from nanovllm.adapters.transformers.kernel_mapping import kernel_mapping
from nanovllm.adapters.transformers.report import Report, Row
from nanovllm.adapters.transformers.selected import OPS

__all__ = ["OPS", "Report", "Row", "apply", "kernel_mapping", "register_attention", "undo"]
