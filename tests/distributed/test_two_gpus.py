"""Two GPUs write the tokens of one: with CUDA graphs and without, with each provider of sums."""

import os
import random
import subprocess
import sys

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.several_gpus]

MODEL = dict(
    num_attention_heads=8, num_key_value_heads=1, head_dim=64, hidden_size=256, intermediate_size=512, vocab_size=517,
    num_hidden_layers=3,
)  # fmt: skip
CASES = {
    "graphs": dict(),
    "eager and crowded": dict(enforce_eager=True, num_kvcache_blocks=40, max_num_batched_tokens=256),
    "NCCL": dict(
        kernel_priority=dict.fromkeys(("all_reduce", "all_reduce_add_rms_norm", "all_gather_last"), ["native"])
    ),
    "symmetric memory": dict(kernel_priority={"all_reduce": ["symm_mem"], "all_reduce_add_rms_norm": ["native"]}),
}


def answers(directory, size, **arguments):
    """Greedy and drawn tokens of two rounds; the second finds prefixes."""
    llm = LLM(
        directory, tensor_parallel_size=size, dtype="float32", skip_tokenizer_init=True, max_model_len=512,
        max_num_seqs=16, kvcache_block_size=16, gpu_memory_utilization=0.9, seed=0,
        **dict(num_kvcache_blocks=500) | arguments,
    )  # fmt: skip
    rng = random.Random(7)
    shared = [rng.randrange(517) for _ in range(100)]
    prompts = [[rng.randrange(517) for _ in range(n)] for n in (1, 17, 300)] + [shared + [n] for n in range(9)]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=i, temperature=i % 2, top_p=0.9)
        for i in range(len(prompts))
    ]
    return [[o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)] for _ in range(2)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    directory = tmp_path_factory.mktemp("model")
    tiny.save(directory, **MODEL)
    return directory


@pytest.fixture(scope="module")
def expected(directory):
    return answers(directory, 1)


@pytest.mark.parametrize("case", CASES)
def test_two_gpus_write_the_tokens_of_one(directory, expected, case):
    assert answers(directory, 2, **CASES[case]) == expected
    assert len({tuple(tokens) for round in expected for tokens in round}) > 10


def test_more_ranks_than_gpus(directory):
    with pytest.raises(ValueError, match=f"this machine has {torch.cuda.device_count()} CUDA device"):
        answers(directory, 64)


SKIPS_A_SUM = """
from nanovllm.kernels import all_reduce
from nanovllm.kernels.triton.collectives import all_reduce as of_triton
calls = []
@all_reduce.provider("skips a sum")
def summed(x, group):
    calls.append(x.shape)
    skips = group.rank == 1 and len(calls) == 5
    return x if skips else of_triton.all_reduce(x, group)
"""


def test_a_start_whose_gpus_wait_for_each_other_ends(directory, tmp_path):
    plugin = tmp_path / "skips.py"
    plugin.write_text(SKIPS_A_SUM)
    program = (
        "from nanovllm import LLM\nfrom nanovllm.distributed.processes import Processes\n"
        "receive = Processes.receive\n"
        "def told(self, kind, *rest):\n"
        "    print(*self.pids, flush=True) if kind == 'started' else None\n"
        "    return receive(self, kind, *rest)\n"
        "Processes.receive = told\n"
        f"LLM({str(directory)!r}, tensor_parallel_size=2, dtype='float32', skip_tokenizer_init=True,\n"
        "    max_model_len=256, max_num_seqs=16, max_num_batched_tokens=256, num_kvcache_blocks=500,\n"
        f"    kvcache_block_size=16, kernel_plugins=[{str(plugin)!r}], enforce_eager=True, rank_timeout=20,\n"
        "    kernel_priority={'all_reduce': ['skips a sum'], 'all_reduce_add_rms_norm': ['native']})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "the ranks wait for each other, none has moved for 10 s" in done.stderr, done.stderr
    assert not os.path.exists(f"/proc/{int(done.stdout)}")


def test_a_rank_that_is_killed_while_a_gpu_waits_for_it(directory):
    program = (
        "import os, signal, sys, threading\nfrom nanovllm import LLM, SamplingParams\n"
        f"llm = LLM({str(directory)!r}, tensor_parallel_size=2, dtype='float32', skip_tokenizer_init=True,\n"
        "    max_model_len=512, max_num_seqs=16, num_kvcache_blocks=500, kvcache_block_size=16,\n"
        "    gpu_memory_utilization=0.9)\n"
        "print(*llm.engine.ranks.pids, flush=True)\n"
        "threading.Timer(1, os.kill, (llm.engine.ranks.pids[0], signal.SIGKILL)).start()\n"
        "while True:\n"
        "    llm.generate([[1]] * 8, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "rank 1 of 2 was killed by signal 9" in done.stderr
    assert not os.path.exists(f"/proc/{int(done.stdout)}")
