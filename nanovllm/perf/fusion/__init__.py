"""What to fuse in a model and what it brings: graphs, groups, costs, matching ops, loop nests.

from nanovllm.perf.fusion import FusionAnalyzer
report = FusionAnalyzer(module, (x,), device="h100").report()
"""

from nanovllm.perf.fusion.analyzer import FusionAnalyzer, FusionReport
from nanovllm.perf.fusion.cost import FusionCostModel, FusionDevice
from nanovllm.perf.fusion.grouping import Group
from nanovllm.perf.fusion.trace import TraceError

__all__ = ["FusionAnalyzer", "FusionCostModel", "FusionDevice", "FusionReport", "Group", "TraceError"]
