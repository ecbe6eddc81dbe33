"""Finding a kernel's fastest configuration on this GPU: `nanovllm tune`. Kernels read what it writes (`kernels/op/config_files.py`)."""

from nanovllm.tune.search import Budget, Outcome, Skipped, search
from nanovllm.tune.space import Constraint, Parameter, Pruned, TuningSpace

__all__ = ["Budget", "Constraint", "Outcome", "Parameter", "Pruned", "Skipped", "TuningSpace", "search"]
