"""What to fuse in a model and what it brings: graphs, groups, costs, matching ops, loop nests.

from nanovllm.fuse import FusionAnalyzer
report = FusionAnalyzer(module, (x,), device="h100").report()
"""

from nanovllm.fuse.analyzer import FusionAnalyzer, FusionReport
from nanovllm.fuse.cost import FusionCostModel, FusionDevice
from nanovllm.fuse.grouping import KernelGroup
from nanovllm.fuse.module_export import TraceError

__all__ = ["FusionAnalyzer", "FusionCostModel", "FusionDevice", "FusionReport", "KernelGroup", "TraceError"]
