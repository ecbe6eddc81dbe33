"""Names that vLLM, transformers and llama-cpp-python export or that `vllm.LLM` has, and what to use here."""

from __future__ import annotations

import dis
import sys
from typing import NoReturn

NOT_CALLED = (
    "an LLM is not called itself: use llm.generate(prompts, SamplingParams(...)), llm.chat(messages), or"
    " llm.stream(prompt)"
)
METHODS = {
    name: answer
    for answer, names in (
        (
            "the engine generates text; embeddings, scores and rewards are not supported",
            "encode embed classify score reward",
        ),
        ("beam search is not supported; use SamplingParams(n=) for several completions", "beam_search"),
        ("the engine cannot sleep; close the LLM, which frees its memory", "sleep wake_up"),
        ("use close(), which frees the memory", "shutdown exit"),
        ("profiles are written by `python bench.py --profile`", "start_profile stop_profile"),
        ("a request's metrics are in `output.metrics`", "get_metrics"),
        ("there are no workers to call; kernels are replaced by kernel_plugins", "collective_rpc apply_model"),
        ("use add_request, step and is_finished, or AsyncLLM", "enqueue enqueue_chat wait_for_completion"),
        ("pass the arguments to LLM", "from_engine_args from_pretrained"),
        ("use chat", "create_chat_completion"),
        ("use generate, with SamplingParams", "create_completion"),
        ("the number of ranks is tensor_parallel_size", "get_world_size"),
        (
            "the model's sizes are in llm.llm_engine.model_config, the arguments in llm.llm_engine.config",
            "model_config",
        ),
        ("pass tokenizer= to LLM", "set_tokenizer"),
        ("images, audio and video are not supported; send text", "reset_mm_cache"),
        (
            "weights cannot be replaced while an engine runs; make a new LLM",
            "init_weight_transfer_engine start_weight_update start_draft_weight_update update_weights"
            " finish_weight_update",
        ),
    )
    for name in names.split()
}
"""Methods of `vllm.LLM` that are not supported, and what to do instead."""

NAMES = {
    name: answer
    for answer, names in (
        ("from nanovllm import LLM", "Llama LLMEngine EngineArgs"),
        ("from nanovllm import AsyncLLM", "AsyncLLMEngine AsyncEngineArgs"),
        ("from nanovllm import StructuredOutputs", "GuidedDecodingParams"),
        ("a prompt is a text, a list of token ids, or a dict with one of them", "TextPrompt TokensPrompt PromptType"),
        ("beam search is not supported; use SamplingParams(n=) for several completions", "BeamSearchParams"),
        ("embeddings, scores and rewards are not supported",
         "PoolingParams PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput ScoringOutput"
         " ScoringRequestOutput ClassificationOutput ClassificationRequestOutput"),
        ("an engine starts its processes itself; use LLM(tensor_parallel_size=N)", "initialize_ray_cluster"),
        ("architectures are added to nanovllm/models: see CONTRIBUTING.md", "ModelRegistry"),
        ("LoRA is not supported; merge the adapter into the weights", "LoRARequest"),
    )
    for name in names.split()
}  # fmt: skip
"""Names that vLLM and llama-cpp-python export, and what to import or to do here."""


def refuse_name(module: str, name: str) -> NoReturn:
    """For the `__getattr__` of a module: there is no such name. What is known of others' names is said.

    Raises:
        AttributeError: its text. `from module import name` would replace that text, so there it is an ImportError.
    """
    if name not in NAMES:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    text = f"{module} has no {name}; {NAMES[name]}"
    asking = sys._getframe(2)
    # A package is first asked whether it has the attribute.
    importing = asking.f_code.co_name == "_handle_fromlist" or (
        asking.f_code.co_code[asking.f_lasti] == dis.opmap["IMPORT_FROM"]
    )
    if importing:
        raise ImportError(text, name=module)
    raise AttributeError(text)
