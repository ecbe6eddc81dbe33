"""vLLM's pass manager, which lowers to our kernels in the steps that CUDA graphs capture, and to vLLM's own above.

vLLM compiles a model once for each range of sizes, and imports `PassManager` by its name; `nanovllm.adapters.vllm` adds
the largest captured size to the ends of the ranges. A larger step is launched by the host: a call of an op of ours goes
through PyTorch's dispatcher and Python, which costs more than the launch of Inductor's code.
"""

from __future__ import annotations

from typing import Any

from vllm.compilation.passes.inductor_pass import get_pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager

from nanovllm.adapters.vllm_ir import PROVIDER, vllms_own


class PassManager(PostGradPassManager):
    """Inductor calls it with the graph of one piece of the model for one range of sizes."""

    def configure(self, config: Any) -> None:
        super().configure(config)
        self._largest = config.compilation_config.max_cudagraph_capture_size or 0

    def __call__(self, graph: Any) -> None:
        if get_pass_context().compile_range.end <= self._largest:
            super().__call__(graph)
        else:
            with vllms_own():
                super().__call__(graph)

    def uuid(self) -> str:
        """A part of the name under which Inductor keeps compiled code, which depends on the largest captured size."""
        return f"{super().uuid()}|{PROVIDER} up to {self._largest}"
