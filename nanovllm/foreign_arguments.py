"""Arguments of vLLM, transformers and OpenAI's API that have no effect here, or are not supported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_OFF: tuple[Any, ...] = (None, False, 0, "auto", "none", "", (), [], {})
"""Values that switch a feature off, or leave it to the engine."""
_ONE = (*_OFF, 1)


class ForeignArgument(NamedTuple):
    """What is said of an argument.

    Attributes:
        answer: why the argument has no effect or is not supported, and what to do instead.
        harmless: values that are taken without effect; None: every value.
    """

    answer: str
    harmless: Sequence[Any] | None

    def is_harmless(self, value: Any) -> bool:
        if self.harmless is None:
            return True
        if value is True:  # which equals 1
            return any(harmless is True for harmless in self.harmless)
        # An array or another object could compare in its own way.
        plain = value is None or isinstance(value, (int, float, str, tuple, list, dict))
        return plain and value in self.harmless


def table(*groups: tuple[str, Sequence[Any] | None, str]) -> dict[str, ForeignArgument]:
    """Each group: the answer, the harmless values, and the names of the arguments."""
    return {name: ForeignArgument(answer, harmless) for answer, harmless, names in groups for name in names.split()}


_RENAMED: tuple[Any, ...] = (None,)
"""No value but None, which leaves the choice to the engine: the argument has another name here."""

ENGINE_ARGUMENTS = table(
    # Choices that this engine does not leave to the user.
    ("a preempted sequence is computed again, not swapped", None, "swap_space preemption_mode"),
    ("long prompts are always split over steps", None, "enable_chunked_prefill"),
    ("a step computes prompts in the order of their arrival, up to max_num_batched_tokens", None,
     "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold"),
    ("a prompt begins in the first step that has room for it", None, "prefill_schedule_interval"
     " scheduler_delay_factor scheduler_reserve_full_isl watermark"),
    ("use max_num_batched_tokens", (None,), "max_num_scheduled_tokens chunked_prefill_size"),
    ("the engine logs no requests", None, "disable_log_requests enable_log_requests"),
    ("the engine logs no statistics", None, "disable_log_stats aggregate_engine_logging"
     " enable_logging_iteration_details"),
    ("there are no further metrics", None, "show_hidden_metrics_for_version kv_cache_metrics kv_cache_metrics_sample"
     " cudagraph_metrics enable_mfu_metrics"),
    ("a trace has one span for each request", None, "collect_detailed_traces"),
    ("profiles are written by `python bench.py --profile`", None, "enable_layerwise_nvtx_tracing"
     " ray_workers_use_nsight"),
    ("profiles are written by `python bench.py --profile`", _OFF, "profiler_config"),
    ("kernels that are compiled while the engine serves are not watched", None, "jit_monitor_mode jit_monitor_verbose"),
    ("the sizes of CUDA graphs follow max_num_seqs", None, "cuda_graph_sizes cudagraph_capture_sizes"
     " max_cudagraph_capture_size"),
    ("CUDA graphs are for sequences of every length", None, "max_seq_len_to_capture max_context_len_to_capture"),
    ("the engine starts a process for each GPU of this machine itself", None, "distributed_executor_backend"
     " worker_use_ray master_addr master_port"),
    ("the op all_reduce sums over GPUs, and kernel_priority chooses its kernel", None, "disable_custom_all_reduce"),
    ("each GPU's process reads its own part of the weights at once", None, "max_parallel_loading_workers"),
    ("processes are not bound to cores; numactl or taskset before the command binds them", None, "numa_bind"
     " numa_bind_nodes numa_bind_cpus"),
    ("the engine ends at once; a server has an option drain", None, "shutdown_timeout"),
    ("the start warns of misspelt environment variables, and goes on", None, "fail_on_environ_validation"),
    ("set CUDA_VISIBLE_DEVICES", (None,), "device_ids"),
    ("use rank_timeout", (None,), "distributed_timeout_seconds cpu_distributed_timeout_seconds"),
    ("the name of a served model belongs to a server", None, "served_model_name"),
    ("the engine has one scheduler, one block manager and one kind of worker", None, "use_v2_block_manager"
     " scheduler_cls worker_cls worker_extension_cls block_allocator"),
    ("the engine handles each token as it comes", None, "stream_interval num_scheduler_steps"
     " multi_step_stream_outputs"),
    ("on a GPU a step is launched before the tokens of the step before it are handled", None,
     "disable_async_output_proc"),
    ("the engine decides for each batch whether a prefix that sequences share is read once", None,
     "disable_cascade_attn"),
    ("every layer caches all tokens, in blocks of one kind", None, "disable_hybrid_kv_cache_manager"),
    ("prefixes are shared in whole blocks of kvcache_block_size tokens", None, "prefix_match_unit"),
    ("LLM alone shows how far a model is loaded", None, "use_tqdm_on_load"),
    ("safetensors files are copied straight to the device", None, "safetensors_load_strategy"
     " safetensors_prefetch_num_threads safetensors_prefetch_block_size low_cpu_mem_usage"),
    ("the files that the engine reads are downloaded, and no others", None, "ignore_patterns"),
    ("files in PyTorch's own format (.pt, .bin) are not read", None, "pt_load_map_location"),
    ("the prefix cache is keyed BLAKE2b", None, "prefix_caching_hash_algo"),
    ("the prefix cache keeps every full block until its memory is needed", None, "prefix_cache_retention_interval"),
    ("the queue of a server is limited by --max-waiting of `nanovllm serve`", (None,), "max_num_queued_reqs"),
    ("the queue of a server is limited by --max-waiting-tokens of `nanovllm serve`", (None,), "max_num_queued_tokens"),
    ("a server starts a process that died again; leave it out", _OFF, "enable_fault_tolerance"
     " fault_tolerance_config"),
    # What is not supported: the values that switch it off are taken.
    ("LoRA is not supported; merge the adapter into the weights", _OFF, "enable_lora lora_modules enable_lora_bias"
     " fully_sharded_loras default_mm_loras enable_tower_connector_lora"),
    ("LoRA is not supported, so its limits have no effect", None, "max_loras max_lora_rank max_cpu_loras lora_dtype"
     " lora_extra_vocab_size long_lora_scaling_factors lora_target_modules specialize_active_lora"
     " enable_mixed_moe_lora_format enable_moe_shared_loras"),
    ("prompt adapters are not supported; put the prompt into the text", _OFF, "enable_prompt_adapter"
     " max_prompt_adapters max_prompt_adapter_token"),
    ("code of a checkpoint is never run", None, "trust_remote_code"),
    ("quantised checkpoints need no argument; pass quantization=\"fp8\" or \"int4\" to quantise a floating-point one",
     _OFF, "quantization_param_path load_in_4bit load_in_8bit quantization_config"),
    ("speculative decoding is not supported", None, "num_lookahead_slots per_request_spec_decode_metrics"),
    ("speculative decoding is not supported; leave it out", _OFF, "speculative_config speculative_model"
     " num_speculative_tokens speculative_draft_tensor_parallel_size ngram_prompt_lookup_max"
     " ngram_prompt_lookup_min spec_method spec_model spec_tokens diffusion_config"),
    ("copies of a model are engines of their own; start one for each GPU, or run `nanovllm serve --replicas N`", _ONE,
     "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local"
     " data_parallel_hybrid_lb data_parallel_external_lb"
     " data_parallel_multi_port_external_lb disable_nccl_for_dp_synchronization dp_size"),
    ("a model is split by tensor_parallel_size alone", _ONE, "pipeline_parallel_size"
     " decode_context_parallel_size prefill_context_parallel_size context_parallel_size enable_expert_parallel"
     " enable_elastic_ep enable_ep_weight_filter ubatch_size enable_eplb pp_size ep_size"
     " enable_batch_sharded_sampling num_redundant_experts"),
    ("copies of a model are engines of their own", None, "data_parallel_backend data_parallel_address"
     " data_parallel_rpc_port dp_sync_interval"),
    ("a model is split by tensor_parallel_size alone", None, "dcp_comm_backend dcp_kv_cache_interleave_size"
     " cp_kv_cache_interleave_size all2all_backend eplb_config"
     " expert_placement_strategy dcp_q_replicate eplb_window_size eplb_step_interval"
     " eplb_log_balancedness"),
    ("a step is not cut into two batches that overlap", None, "dbo_decode_token_threshold"
     " dbo_prefill_token_threshold"),
    ("a model runs on one machine; use its GPUs with tensor_parallel_size", _ONE, "nnodes node_rank"),
    ("experts are split by tensor_parallel_size, and their choices are not returned; leave it out", _OFF,
     "enable_return_routed_experts"),
    ("weights stay on the device; use a smaller dtype or a GGUF file", _OFF, "cpu_offload_gb offload_backend"
     " offload_group_size"),
    ("weights stay on the device", None, "cpu_offload_params offload_num_in_group offload_prefetch_step"
     " offload_params"),
    ("the KV cache stays on the device; use kv_cache_dtype=\"fp8\"", _OFF, "kv_offloading_size"),
    ("the KV cache stays on the device; use kv_cache_dtype=\"fp8\" for a smaller one", None, "kv_offloading_backend"),
    ("images, audio and video are not supported; send text", _OFF, "mm_processor_kwargs"
     " media_io_kwargs enable_mm_embeds interleave_mm_strings allowed_local_media_path allowed_media_domains"
     " mm_encoder_only mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path"
     " mm_encoder_fp8_scale_save_path video_pruning_rate enable_multimodal_encoder_data_parallel"),
    ("images, audio and video are not supported", None, "limit_mm_per_prompt"
     " mm_processor_cache_gb mm_processor_cache_type disable_mm_preprocessor_cache mm_shm_cache_max_object_size_mb"
     " skip_mm_profiling language_model_only mm_encoder_tp_mode mm_encoder_fp8_scale_save_margin"
     " mm_tensor_ipc mm_ipc_gpu_memory_gb disable_chunked_mm_input mm_hasher_algorithm video_pruning_method"
     " mm_processor_device mm_device_do_normalize ec_manager_config enable_mm_processor_stats"),
    ("models with state-space layers are not supported; use another model", _OFF, "mamba_config"
     " mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode"
     " enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds gdn_prefill_backend kda_prefill_backend"
     " use_replayssm mamba_ssu_algorithm"),
    ("models with state-space layers are not supported", None, "mamba_backend"
     " replayssm_buffer_len"),
    ("weights cannot be replaced while an engine runs; start another one", _OFF, "weight_transfer_config"),
    ("the engine generates text; leave it out: embeddings, scores and rewards are not supported",
     (None, "auto", "generate"), "task runner convert override_pooler_config pooler_config"),
    ("outputs are constrained by llguidance, which is the only backend", None, "guided_decoding_backend"
     " guided_decoding_disable_fallback structured_outputs_config"),
    ("JSON has a space after each separator and no other white space", None, "guided_decoding_disable_any_whitespace"),
    ('write "additionalProperties": false into the schema', _OFF, "guided_decoding_disable_additional_properties"),
    ("reasoning is found by the chat template; in Python use the parsers of nanovllm.chat", None, "reasoning_parser"
     " reasoning_parser_plugin"),
    ("reasoning is found by the chat template; leave it out", _OFF, "reasoning_config"),
    ("the engine cannot sleep; close the LLM or end the server, which frees its memory", _OFF, "enable_sleep_mode"
     " enable_nccl_comm_suspend"),
    ("logits cannot be changed by a function; use logit_bias, bad_words or penalties", _OFF, "logits_processors"
     " logits_processor_pattern"),
    ("the KV cache stays in the engine; leave it out", _OFF, "kv_transfer_config kv_events_config ec_transfer_config"),
    ("requests are served in the order of their arrival; leave it out", (None, "fcfs", "auto"), "scheduling_policy"),
    ("the tokenizer is transformers' fast one; leave it out", (None, "auto", "hf"), "tokenizer_mode"),
    ("prompts are tokenised in the thread of the caller", None, "tokenizer_pool_size tokenizer_pool_type"
     " tokenizer_pool_extra_config renderer_num_workers"),
    ("the model and its tokenizer are at one place; download the revision, and pass its directory",
     (None, "main"), "revision tokenizer_revision"),
    ("code of a checkpoint is never run", None, "code_revision"),
    ("the chat template is the tokenizer's; pass another one to LLM.chat", (None,), "chat_template chat_format"),
    ("all layers are on one device; use device", (None, -1), "n_gpu_layers main_gpu tensor_split"),
    ("set the environment variable NANOVLLM_CPU_THREADS to the number of threads", (None,), "n_threads"),
    ("use max_num_batched_tokens", (None,), "n_batch n_ubatch"),
    ("the engine logs as the logging module is set up", None, "verbose"),
    ("a hub id is looked up in the Hugging Face cache; set HF_HOME, or pass a directory", (None, ""), "download_dir"
     " cache_dir"),
    ("the hub is asked if a model is not in its cache; set HF_HUB_OFFLINE=1 to forbid it", _OFF, "local_files_only"),
    ("the weights are those of the model's directory; pass a directory that has both", (None, ""), "model_weights"),
    ("the model's own config.json is read; use hf_overrides, or put a config.json into the model's directory",
     (None, ""), "hf_config_path"),
    ("the files in the model's directory tell their format; leave it out", (None, "auto", "hf"), "config_format"),
    ("the hub's token comes from the environment; set HF_TOKEN", (None, False, True), "hf_token token use_auth_token"),
    ("use hf_overrides={...}", _OFF, "rope_scaling rope_theta"),
    ('the config.json decides; use hf_overrides={"use_sliding_window": false}, or "sliding_window": null where there'
     " is no such entry", _OFF, "disable_sliding_window"),
    ("the architectures in config.json decide; edit a copy of it", _OFF, "model_class_overrides"),
    ("prompt embeddings are not supported; pass text or token ids", _OFF, "enable_prompt_embeds"),
    ("log-probabilities are of the raw logits; leave it out", (None, "raw_logprobs"), "logprobs_mode"),
    ("the fp8 cache has no scales; leave it out", _OFF, "calculate_kv_scales"),
    ("all layers have the same kv_cache_dtype; leave it out", _OFF, "kv_cache_dtype_skip_layers"),
    ('kernels are chosen for each op; use kernel_priority={"attention_prefill": ["flash_attn"]}, for example', _OFF,
     "attention_backend attention_config attn_implementation attn_backend"),
    ('kernels are chosen for each op; use kernel_priority={"linear": ["triton"]}, for example', _OFF,
     "kernel_config moe_backend linear_backend ir_op_priority"),
    ("attention is computed in the model's dtype; use dtype", _OFF, "override_attention_dtype"),
    ("CUDA graphs are captured on a GPU; use enforce_eager for none", (None, True), "use_cudagraph"),
    ("kernels of this precision are not there; leave it out", _OFF, "enable_bf16x3_router_gemm use_fp64_gumbel"),
    ("steps are made for latency and throughput alike", None, "performance_mode"),
    ("models are not compiled; enforce_eager decides whether there are CUDA graphs", None, "compilation_config"
     " optimization_level"),
    ("kernels are tuned by `nanovllm tune`, not at the start", None, "enable_flashinfer_autotune"),
    ("no layer reads the cache of another layer", None, "kv_sharing_fast_prefill"),
    ("the KV cache is sized by gpu_memory_utilization or num_kvcache_blocks", (None,), "kv_cache_memory_bytes"
     " kv_cache_memory max_memory mem_fraction_static"),
    ("an option of another engine, without a counterpart here; leave it out", _OFF, "additional_config model_impl"
     " async_engine enable_dbo observability_config otlp_traces_endpoint model_loader_extra_config"
     " enable_cumem_allocator tokens_only allow_deprecated_quantization enable_trace_replay external_parameters"
     " return_sampling_mask io_processor_plugin override_neuron_config"),
    # Other names of arguments that the engine has.
    ("use kvcache_block_size", _RENAMED, "block_size"),
    ("use num_kvcache_blocks", _RENAMED, "num_gpu_blocks_override"),
    ("use dtype", _RENAMED, "torch_dtype"),
    ("use device; a model runs on one", _RENAMED, "device_map"),
    ("use max_model_len", _RENAMED, "max_seq_len context_length max_total_tokens n_ctx"),
    ("use model", _RENAMED, "model_path pretrained_model_name_or_path"),
    ("use tensor_parallel_size", _RENAMED, "tp_size"),
    ("use max_num_seqs", _RENAMED, "max_running_requests max_batch_size"),
    ("use enable_prefix_caching=False", _RENAMED, "disable_radix_cache"),
    ("the KV cache is always used; leave it out", (None, True), "use_cache"),
)  # fmt: skip
"""Arguments of `vllm.LLM`, and some of transformers' `from_pretrained`."""

AS_ASKED: dict[str, Sequence[Any]] = {
    "enable_chunked_prefill": (None, True),
    "compilation_config": (*_OFF, 1, 2, 3),  # levels, of which vLLM has one by default
    "disable_cascade_attn": _OFF,
    **dict.fromkeys(("cuda_graph_sizes", "cudagraph_capture_sizes", "max_cudagraph_capture_size"), _OFF),
}
"""Of arguments without effect, the values that ask for what the engine does anyway. Others get a warning."""

SAMPLING_ARGUMENTS = table(
    ("use max_tokens", _RENAMED, "max_new_tokens max_completion_tokens max_length max_output_tokens n_predict"
     " num_predict"),
    ("use min_tokens", _RENAMED, "min_new_tokens min_length"),
    ("use temperature=0 for do_sample=False, and a temperature above 0 for do_sample=True", _RENAMED, "do_sample"),
    ("use n", _RENAMED, "num_return_sequences"),
    ("use stop", _RENAMED, "stop_strings stop_sequences stop_words"),
    ("use include_stop_str_in_output", _RENAMED, "no_stop_trim"),
    ("stop strings are plain text; use stop", (None,), "stop_regex stopping_criteria"),
    ("use LLM.stream", _RENAMED, "stream streamer"),
    ("use repetition_penalty", _RENAMED, "repeat_penalty"),
    ("pass the values as arguments of SamplingParams", (None,), "generation_config"),
    ("the KV cache is always used; leave it out", (None, True), "use_cache"),
    ("use stop_token_ids", _RENAMED, "eos_token_id"),
    ("use logprobs", _RENAMED, "top_logprobs output_scores output_logits"),
    ("use bad_words, with the words as text", _RENAMED, "bad_words_ids"),
    ("use logit_bias; -100 bans a token", _RENAMED, "suppress_tokens begin_suppress_tokens sequence_bias"),
    ("a prompt is not padded; leave it out", _RENAMED, "pad_token_id"),
    ("beam search is not supported; use n for several completions", _ONE, "use_beam_search num_beams beam_width"
     " length_penalty early_stopping num_beam_groups diversity_penalty"),
    ("use n and logprobs=0, and choose the best by cumulative_logprob", _ONE, "best_of"),
    ("use structured_outputs, for example structured_outputs={\"json\": schema}", _OFF, "guided_decoding guided_json"
     " guided_regex guided_choice guided_grammar regex json_schema ebnf grammar"),
    ("use structured_outputs=StructuredOutputs.of_response_format(...)", _OFF, "response_format"),
    ("logits cannot be changed by a function; use logit_bias, bad_words or penalties", _OFF, "logits_processors"
     " logits_processor"),
    ("these are for plugins of another engine; leave it out", _OFF, "extra_args vllm_xargs custom_params"),
    ("this change of the logits is not supported; use logit_bias, bad_words or penalties", _OFF, "guidance_scale"
     " watermarking_config renormalize_logits exponential_decay_length_penalty forced_bos_token_id"
     " forced_eos_token_id"),
    ("speculative decoding is not supported; leave it out", _OFF, "assistant_model prompt_lookup_num_tokens"),
    ("a prompt is not cut; shorten it", (None, -1), "truncate_prompt_tokens"),
    ("pass skip_tokenizer_init=True to LLM for outputs without a text", (None, True), "detokenize"),
    ("the text is the tokenizer's, spaces included; leave it out", (None, True), "spaces_between_special_tokens"),
    ("an output has all its tokens; use LLM.stream for pieces", (None,), "output_kind"),
    ("every request may use the prefix cache; pass a cache_salt to keep prompts apart", (None, False),
     "skip_reading_prefix_cache"),
    ("log-probabilities are one dict for each token; leave it out", (None, False), "flat_logprobs"),
    ("the engine handles each token as it comes", None, "output_text_buffer_length skip_clone stream_interval"),
    ("log-probabilities are those of the most likely tokens; use logprobs", (None,), "logprob_token_ids"
     " prompt_logprob_token_ids prompt_logprob_start"),
    ("repeated patterns are not looked for; use stop, or penalties", (None,), "repetition_detection"),
    ("the engine samples each token; pass them as a prompt with prompt_logprobs to score them", (None, 0),
     "trace_decode_token_ids"),
    ("the experts of a token are not returned; leave it out", (None, 0), "routed_experts_prompt_start"),
    ("a budget for thinking is not supported; use max_tokens", (None, -1), "thinking_token_budget"),
    ("this filter is not supported; use top_k, top_p or min_p", (None, 1), "typical_p tfs"),
    ("this filter is not supported; use top_k, top_p or min_p", _OFF, "epsilon_cutoff eta_cutoff top_a top_h"
     " penalty_alpha no_repeat_ngram_size encoder_repetition_penalty xtc_probability xtc_threshold dry_multiplier"
     " dry_base mirostat tfs_z smoothing_factor dynatemp_range"),
)  # fmt: skip
"""Keywords of vLLM's SamplingParams, of transformers' GenerationConfig and of OpenAI's API."""

STRUCTURED_OUTPUT_ARGUMENTS = table(
    ("there is one backend, llguidance", None, "disable_fallback backend"),
    ("JSON has a space after each separator and no other white space", None, "disable_any_whitespace"),
    ("JSON has a space after each separator and no other white space; leave it out", (None,), "whitespace_pattern"),
    ('write "additionalProperties": false into the schema', (None, False), "disable_additional_properties"),
    ("structural tags are not supported; use a grammar", (None,), "structural_tag"),
)
"""Keywords of vLLM's StructuredOutputsParams."""

CALL_ARGUMENTS = table(
    ("LoRA is not supported; merge the adapter into the weights", (None,), "lora_request"),
    ("prompt adapters are not supported; put the prompt into the text", (None,), "prompt_adapter_request"),
    ("requests are served in the order of their arrival; leave it out", (None, 0, []), "priority"),
    ("use SamplingParams(structured_outputs=...)", (None,), "guided_options_request"),
    ("images, audio and video are not supported; send text", (None, {}), "mm_processor_kwargs multi_modal_data"),
    ("prompt embeddings are not supported; pass text or token ids", (None,), "prompt_embeds"),
    ("pass a list of token ids, or a list of such lists, as prompts", (None,), "prompt_token_ids"),
    ("prompts are tokenised with the tokenizer's defaults; pass token ids for others", (None, {}),
     "tokenization_kwargs"),
    ("parts of a message's content are joined, a line each", None, "chat_template_content_format"),
    ("use LLM.stream", (None, False), "stream"),
    ("pass it in SamplingParams", _RENAMED, "n temperature top_k top_p min_p repetition_penalty presence_penalty"
     " frequency_penalty max_tokens min_tokens stop stop_token_ids seed logprobs structured_outputs"),
    ("pass SamplingParams(max_tokens=...)", _RENAMED, "max_new_tokens max_length"),
    ("pass SamplingParams(temperature=0) for do_sample=False", _RENAMED, "do_sample"),
)  # fmt: skip
"""Arguments of the methods `generate` and `chat` of `vllm.LLM`."""
