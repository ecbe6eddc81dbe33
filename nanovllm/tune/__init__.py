"""Find a kernel's fastest configuration on this GPU: `nanovllm tune`. Kernels read the files that it writes.

`spaces` declares which plans may be tried for each tunable, `jobs` says which keys the calls of an op look up,
`measure` times and checks a plan, `search` decides what is tried next and which plan wins, `store` writes the result.
"""

from nanovllm.tune.search import Budget, Outcome, Skipped, search
from nanovllm.tune.space import Space

__all__ = ["Budget", "Outcome", "Skipped", "Space", "search"]
