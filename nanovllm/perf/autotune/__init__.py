"""Finding a kernel's fastest configuration on this GPU: `nanovllm tune`. Kernels read what it writes (`kernels/configs.py`)."""

from nanovllm.perf.autotune.search import Budget, Outcome, Skipped, search
from nanovllm.perf.autotune.space import Constraint, Parameter, Pruned, TuningSpace

__all__ = ["Budget", "Constraint", "Outcome", "Parameter", "Pruned", "Skipped", "TuningSpace", "search"]
