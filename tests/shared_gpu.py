"""For GPU tests that run beside others on one GPU: how much memory to take, and whether times mean anything."""

import torch

from nanovllm.hardware.gpu_presets import DeviceModel, device_model


def gpu_is_shared() -> bool:
    """Whether other programs run on the GPU now: graphs that are replayed one after the other then have gaps between
    them.
    """
    from nanovllm.hardware.probe_kernels import launch_empty

    launch_empty()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(500):
            launch_empty()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(201)]
    for _ in range(20):
        graph.replay()
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    fastest = min(a.elapsed_time(b) for a, b in zip(events, events[1:]))
    return events[0].elapsed_time(events[-1]) > 1.5 * fastest * (len(events) - 1)


def memory_utilization(wanted: float) -> float:
    """The `gpu_memory_utilization` with which an engine gets about `wanted` of the GPU, beside what others hold now."""
    free, total = torch.cuda.mem_get_info()
    return round(min(0.95, 1 - free / total + wanted), 3)


def preset_here() -> DeviceModel | None:
    """The preset of this GPU: what its data sheet says."""
    try:
        return device_model(torch.cuda.get_device_name())
    except ValueError:
        return None
