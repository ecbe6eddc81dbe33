"""Which kernels a decode step has: of a trace, and of an engine on the CPU, whose steps have none."""

from benchmarks.tensor_parallel_profile import kernel_rows, profile
from tests import tiny
from tests.commands import run_here

CONFIG = tiny.DEFAULTS | dict(architectures=["Qwen3ForCausalLM"], rms_norm_eps=1e-6, rope_theta=1e4, dtype="float32")


def step(start, number, *kernels):
    """Events of a step that launches kernels of (name, start, duration, grid)."""
    host = dict(ph="X", pid=1, tid=1)
    yield dict(host, cat="user_annotation", name="decode: 2 sequences", ts=start, dur=10)
    yield dict(host, cat="cuda_runtime", name="launch", ts=start + 1, dur=1, args=dict(correlation=number))
    for name, at, duration, grid in kernels:
        arguments = dict(correlation=number, grid=grid)
        yield dict(ph="X", pid=0, tid=7, cat="kernel", name=name, ts=start + at, dur=duration, args=arguments)


def test_kernels_are_in_order_with_medians_and_their_own_time():
    events = []
    for number, longer in enumerate((0, 1, 5)):
        # The second `product` starts 2 us before the end of the sum.
        kernels = ("product", 20, 8 + longer, [80, 1, 1]), ("sum", 40, 6, [128, 1, 1]), ("product", 44, 9, [400, 1, 1])
        events += step(100 * number, number, *kernels)
    events += step(300, 3, ("other", 20, 90, [1, 1, 1]))
    rows, steps = kernel_rows(events)
    assert steps == 3 and [tuple(row) for row in rows] == [
        ("product", "80x1x1", 9, 9), ("sum", "128x1x1", 6, 6), ("product", "400x1x1", 7, 9),
    ]  # fmt: skip


def test_an_engine_of_few_layers_is_profiled(capsys):
    profile(CONFIG, 1, 1, [2, 3], device="cpu", use_custom_kernels=False, kvcache_block_size=256)
    said = capsys.readouterr().out
    assert "1 layers on 1 rank(s), cpu" in said and "3 sequences:" in said and said.count("| all 0 kernels |") == 2


def test_no_layers_are_refused():
    done = run_here("--device", "cpu", "--profile", "0", script="benchmarks/tensor_parallel.py")
    assert str(done.returncode).startswith("--profile 0: expected at least one layer")  # as `sys.exit` takes it


def test_a_folder_without_vllm_is_refused(tmp_path):
    """The option has the name and the form that bench.py's has."""
    for given, said in [
        (f"vllm={tmp_path}", f"--engine-path vllm={tmp_path}: there is no package vllm in this directory"),
        ("vllm=/none/such", "--engine-path vllm=/none/such: there is no folder"),
        (str(tmp_path), f"--engine-path {tmp_path}: "),
    ]:
        done = run_here("--device", "cpu", "--engine-path", given, script="benchmarks/tensor_parallel.py")
        assert str(done.returncode).startswith(said)
