"""Ops and kernels as files of FlashInfer-Bench's schema: Definitions, Workloads and Solutions.

The schema is that of FlashInfer-Bench 0.1.2 (https://bench.flashinfer.ai/docs). That package is not needed here.
"""

from nanovllm.adapters.flashinfer_bench.documents import DocumentError
from nanovllm.adapters.flashinfer_bench.exporting import export_op
from nanovllm.adapters.flashinfer_bench.importing import find, write_plugin

__all__ = ["DocumentError", "export_op", "find", "write_plugin"]
