"""Arguments and methods of vLLM, nano-vLLM and transformers: taken, or refused by their own names."""

import json
import logging
import re

import pytest

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.config import Config, EngineConfig
from nanovllm.foreign_arguments import (
    CALL_ARGUMENTS,
    ENGINE_ARGUMENTS,
    SAMPLING_ARGUMENTS,
    STRUCTURED_OUTPUT_ARGUMENTS,
)
from nanovllm.foreign_names import NAMES
from nanovllm.outputs import CompletionOutput, RequestOutput
from tests.llm.small_llm import (
    GREEDY,
    MESSAGES,
    PROMPT,
    assert_clean,
    complete,
    make,
    refused,
)

pytestmark = pytest.mark.any_device


def test_harmless_arguments_are_taken_with_one_line(directory, caplog):
    with caplog.at_level(logging.INFO, "nanovllm.arguments"):
        llm = make(
            directory, swap_space=4, enable_chunked_prefill=True, trust_remote_code=True, disable_log_stats=True,
            enable_lora=False, quantization=None, pipeline_parallel_size=1, generation_config="vllm",
        )  # fmt: skip
    assert complete(llm, "x", max_tokens=1).finished
    (record,) = (r for r in caplog.records if r.name == "nanovllm.arguments")
    assert "swap_space=4 (a preempted sequence is computed again, not swapped)" in record.message
    assert "disable_log_stats=True" in record.message and "enable_lora=False" in record.message
    assert "trust_remote_code=True (code of a checkpoint is never run)" in record.message


def test_defaults_of_vllm_are_taken(caplog):
    """Those of vLLM 0.24 and later that are not None, False, 0 or "auto": scripts spell them out."""
    defaults = dict(
        config_format="auto", model_weights="", block_size=None, num_gpu_blocks_override=None, torch_dtype=None,
        dcp_comm_backend="ag_rs", data_parallel_backend="mp", all2all_backend="allgather_reducescatter",
        dbo_decode_token_threshold=32, dbo_prefill_token_threshold=512, expert_placement_strategy="linear",
        cpu_offload_params=set(), offload_num_in_group=1, offload_prefetch_step=1, kv_offloading_backend="native",
        limit_mm_per_prompt={"image": 0}, mm_processor_cache_gb=4, mm_processor_cache_type="lru",
        mm_shm_cache_max_object_size_mb=128, mm_encoder_tp_mode="weights", mm_encoder_fp8_scale_save_margin=1.5,
        renderer_num_workers=1, mm_tensor_ipc="direct_rpc", mamba_backend="triton", compilation_config=3,
        optimization_level=2, performance_mode="balanced", max_num_queued_reqs=None, replayssm_buffer_len=16,
        mm_hasher_algorithm="blake3", dp_sync_interval=1, per_request_spec_decode_metrics="none",
    )  # fmt: skip
    decides = dict(max_model_len=None, max_num_seqs=None, enable_prefix_caching=None)
    assert EngineConfig("m", **decides) == EngineConfig("m", max_model_len="auto")
    with caplog.at_level(logging.INFO, "nanovllm.arguments"):
        assert EngineConfig("m", **defaults) == EngineConfig("m")
    (record,) = caplog.records
    assert all(f"{name}=" in record.message for name in defaults)
    given = dict(max_new_tokens=None, do_sample=None, seed=-1, thinking_token_budget=-1)
    assert SamplingParams(**given) == SamplingParams()


def test_a_value_that_the_engine_contradicts_is_warned_of(caplog):
    with caplog.at_level(logging.INFO, "nanovllm.arguments"):
        EngineConfig("m", enable_chunked_prefill=False, compilation_config={"mode": 3}, swap_space=4)
        EngineConfig("m", cudagraph_capture_sizes=[1, 2])
    warned, other, sizes = caplog.records
    assert warned.levelno == sizes.levelno == logging.WARNING and other.levelno == logging.INFO
    assert "enable_chunked_prefill=False (long prompts are always split over steps)" in warned.message
    assert "compilation_config={'mode': 3} (models are not compiled" in warned.message
    assert "swap_space=4" in other.message and "cudagraph_capture_sizes=[1, 2]" in sizes.message


def test_no_code_of_a_checkpoint_is_run_though_it_is_trusted(tmp_path):
    """Neither for an architecture that is not supported, nor to make a tokenizer."""
    config = {
        "architectures": ["OwnModel"], "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": "own.Tokenizer"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="OwnModel"):
        LLM(str(tmp_path), trust_remote_code=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "arguments, answer",
    [
        (dict(enable_lora=True), "enable_lora=True: LoRA is not supported; merge the adapter into the weights"),
        (dict(load_in_4bit=True), "load_in_4bit=True: quantised checkpoints need no argument; pass quantization"),
        (dict(speculative_config={"model": "x"}), "speculative_config={'model': 'x'}: speculative decoding is not"),
        (dict(pipeline_parallel_size=2), "pipeline_parallel_size=2: a model is split by tensor_parallel_size alone"),
        (dict(cpu_offload_gb=1), "cpu_offload_gb=1: weights stay on the device"),
        (dict(task="embed"), "task='embed': the engine generates text"),
        (dict(block_size=16), "block_size=16: use kvcache_block_size"),
        (dict(torch_dtype="auto"), "torch_dtype='auto': use dtype"),
        (dict(moe_backend="triton"), "moe_backend='triton': kernels are chosen for each op; use kernel_pr"),
        (dict(mamba_cache_dtype="float32"), "mamba_cache_dtype='float32': models with state-space layers"),
        (dict(data_parallel_rank=2), "data_parallel_rank=2: copies of a model are engines of their own; start one"),
        (dict(data_parallel_size=2), "data_parallel_size=2: copies of a model are engines of their own; start one"),
        (dict(tp_size=2), "tp_size=2: use tensor_parallel_size"),
        (dict(cache_dir="/tmp"), "cache_dir='/tmp': a hub id is looked up in the Hugging Face cache"),
        (
            dict(chat_template="x"),
            "chat_template='x': the chat template is the tokenizer's; pass another one to LLM.chat",
        ),
        (dict(n_gpu_layers=20), "n_gpu_layers=20: all layers are on one device; use device"),
        (dict(ubatch=2), "an unknown argument 'ubatch'; known are model, "),
        (dict(rope_scaling={"factor": 4}), "rope_scaling={'factor': 4}: use hf_overrides={...}"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_its_own_name(directory, arguments, answer):
    refused(TypeError, directory, f"LLM got {answer}", **arguments)


_DO = r"(^|; |, or )(use|pass|set|close|leave|put|send|merge|make|edit|delete|write|shorten|start|download)\b|\bby "


@pytest.mark.parametrize(
    "table", [ENGINE_ARGUMENTS, SAMPLING_ARGUMENTS, CALL_ARGUMENTS, STRUCTURED_OUTPUT_ARGUMENTS], ids=len
)
def test_what_is_refused_says_what_to_do(table):
    refusals = {argument.answer for argument in table.values() if argument.harmless is not None}
    assert [answer for answer in refusals if not re.search(_DO, answer)] == []


def test_names_that_others_export_say_what_to_import():
    assert nanovllm.RequestOutput is RequestOutput and nanovllm.CompletionOutput is CompletionOutput
    for name in NAMES:
        with pytest.raises(ImportError) as error:
            exec(f"from nanovllm import LLM, {name}")
        assert str(error.value) == f"nanovllm has no {name}; {NAMES[name]}"
        assert not hasattr(nanovllm, name) and getattr(nanovllm, name, 3) == 3
        with pytest.raises(AttributeError, match=re.escape(str(error.value))):
            getattr(nanovllm, name)
        if NAMES[name].startswith("from "):
            exec(NAMES[name])
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from nanovllm import Nothing  # noqa: F401


def test_a_call_of_the_llm_itself_says_what_to_call(llm):
    for call in (lambda: llm("Hi"), lambda: llm(), lambda: llm(prompts=["Hi"])):
        with pytest.raises(
            TypeError, match=r"an LLM is not called itself: use llm.generate\(prompts, Samp.*, llm.chat\("
        ):
            call()


def test_attributes_of_vllms_llm_say_where_to_look(llm):
    for name, words in (("model_config", "llm.llm_engine.model_config"), ("set_tokenizer", "pass tokenizer= to LLM")):
        with pytest.raises(AttributeError, match=f"^LLM.{name}: .*{re.escape(words)}"):
            getattr(llm, name)
    assert llm.llm_engine.model_config.vocab_size and llm.llm_engine.config.max_model_len


def test_a_request_id_for_the_engine_is_answered(llm):
    with pytest.raises(TypeError, match="the engine numbers the requests itself"):
        llm.llm_engine.add_request("1", "Hi", GREEDY)
    with pytest.raises(ValueError, match="prompt embeddings are not supported; pass text or token ids"):
        llm.generate({"prompt_embeds": [0.5]})


def test_a_reasoning_parser_has_no_effect_as_on_the_command_line(directory):
    assert EngineConfig(str(directory), reasoning_parser="qwen3") == EngineConfig(str(directory))


def test_arguments_of_calls(llm):
    with pytest.raises(TypeError, match="^generate got prompt_token_ids=.*: pass a list of token ids"):
        llm.generate(prompt_token_ids=[[1, 2]])
    with pytest.raises(TypeError, match="^prompts=None: must be a prompt or a list of prompts"):
        llm.generate(sampling_params=GREEDY)
    (out,) = llm.generate("x", GREEDY, use_tqdm=False, lora_request=None, priority=[])
    (again,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, chat_template_content_format="string")
    assert out.finished and again.prompt == PROMPT
    for call in (llm.generate, llm.chat):
        with pytest.raises(TypeError, match=rf"{call.__name__} got lora_request=\[1\]: LoRA is not supported"):
            call(MESSAGES, GREEDY, use_tqdm=False, lora_request=[1])
        with pytest.raises(TypeError, match="unknown argument 'sampling_param'; did you mean 'sampling_params'"):
            call(MESSAGES, sampling_param=GREEDY)
        with pytest.raises(TypeError, match=f"{call.__name__} got max_tokens=3: pass it in SamplingParams"):
            call(MESSAGES, max_tokens=3)


def test_other_names(llm):
    assert llm.llm_engine is llm.engine and Config is EngineConfig
    assert_clean(llm)


def test_methods_of_vllm_that_are_missing_say_what_to_do(llm):
    for name, answer in (
        ("beam_search", "use SamplingParams"),
        ("embed", "generates text"),
        ("sleep", "close the LLM"),
        ("shutdown", "use close"),
        ("enqueue", "use add_request"),
    ):
        with pytest.raises(AttributeError, match=rf"^LLM.{name}: .*{answer}"):
            getattr(llm, name)
    assert not hasattr(llm, "no_such_thing") and llm.get_default_sampling_params() == SamplingParams()
