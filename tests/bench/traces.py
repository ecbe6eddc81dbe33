"""Made-up events of a profiler's trace of a GPU, where every number is known."""

from nanovllm.bench.trace_writer import nanoseconds
from nanovllm.bench.workloads import Workload
from nanovllm.hardware.measured_rates import Rates

LOAD = Workload("w", 1, 1, 1)
RATES = Rates("GPU", 1e12, 1e12, 9e11, {"bfloat16": 1e14}, cache_bytes=0)


def host(name, ts, dur, cat="user_annotation", **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}


def kernel(name, ts, dur, correlation):
    event = {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7}
    return {**event, "args": {"correlation": correlation}}


def launch(ts, correlation):
    return host("cudaLaunchKernel", ts, 1, "cuda_runtime", correlation=correlation)


EAGER = [
    host("decode: 2 sequences", 0, 100),
    host("layer 0", 5, 60),
    host("rms_norm [triton]", 10, 10), launch(12, 1), kernel("norm", 200, 4, 1),
    host("linear o_proj [torch]", 25, 30), launch(30, 2), launch(40, 3),
    kernel("gemm", 206, 10, 2), kernel("split", 216, 2, 3),
    host("rms_norm [triton]", 70, 10), launch(72, 4), kernel("norm", 220, 6, 4),
]  # fmt: skip
# The same kernels out of a graph: one launch; and one that no eager step had.
GRAPH = [
    host("decode: 2 sequences", 0, 50),
    host("cudaGraphLaunch", 10, 5, "cuda_runtime", correlation=9),
    kernel("norm", 100, 3, 9), kernel("gemm", 104, 9, 9), kernel("split", 113, 1, 9), kernel("norm", 115, 5, 9),
    kernel("new", 122, 8, 9),
    host("decode: 2 sequences", 150, 50),
    host("cudaGraphLaunch", 160, 5, "cuda_runtime", correlation=10),
    kernel("norm", 200, 3, 10), kernel("gemm", 204, 9, 10), kernel("split", 213, 1, 10), kernel("norm", 215, 5, 10),
    kernel("new", 222, 8, 10),
]  # fmt: skip


def bad_nesting(events):
    """Names of ranges that overlap another one of their track without one containing the other: Perfetto drops them.

    It counts in whole nanoseconds.
    """
    found, open_on = [], {}
    spans = [(e, nanoseconds(e["ts"]), nanoseconds(e["ts"]) + nanoseconds(e["dur"])) for e in events if e["ph"] == "X"]
    for e, start, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        stack = open_on.setdefault((e["pid"], e["tid"]), [])
        while stack and stack[-1] <= start:
            stack.pop()
        if stack and end > stack[-1]:
            found.append(e["name"])
        else:
            stack.append(end)
    return found
