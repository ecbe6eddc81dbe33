"""nanovllm: a small, fast LLM inference engine whose kernels you can swap."""

from typing import TYPE_CHECKING, Any

from nanovllm.early_exit import importing_engine

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.llm import LLM
    from nanovllm.outputs import CompletionOutput, RequestOutput
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.structured_outputs import StructuredOutputs

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputs"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # PyTorch takes seconds to import: `nanovllm --help` does without.
    if name == "LLM":
        with importing_engine():
            from nanovllm.llm import LLM

        return LLM
    if name == "AsyncLLM":
        with importing_engine():
            from nanovllm.async_llm import AsyncLLM

        return AsyncLLM
    if name in ("SamplingParams", "StructuredOutputs", "StructuredOutputsParams"):
        from nanovllm import sampling_params

        return getattr(sampling_params, name)
    if name in ("RequestOutput", "CompletionOutput"):
        from nanovllm import outputs

        return getattr(outputs, name)
    from nanovllm.foreign_names import refuse_name

    refuse_name(__name__, name)
