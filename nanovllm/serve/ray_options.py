"""How many replicas there are, and what each takes of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.config import EngineConfig


@dataclass(frozen=True)
class ReplicaOptions:
    """Raises: ValueError: a value is out of range."""

    replicas: int = 1
    max_replicas: int | None = None
    """More than `replicas`: Ray adds replicas up to this number while requests wait, and removes them later."""
    num_cpus: float = 1.0
    """CPUs that a replica takes of Ray's count."""
    slack: float = 32.0
    """Open requests by which a replica that has the prompt's beginning may exceed the least busy one."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas={self.replicas!r}: must be at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas!r}: must be at least replicas={self.replicas}")
        for name in ("num_cpus", "slack"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must not be negative")

    def num_gpus(self, config: EngineConfig) -> int:
        """The GPUs of a replica."""
        return 0 if config.device == "cpu" else config.tensor_parallel_size

    def scaling(self, config: EngineConfig) -> dict[str, Any]:
        """The options of the deployment that say how many replicas there are."""
        if self.max_replicas is None or self.max_replicas == self.replicas:
            return {"num_replicas": self.replicas}
        # A replica with so many open requests computes all of them: what comes on top would wait.
        return {
            "autoscaling_config": {
                "min_replicas": self.replicas, "max_replicas": self.max_replicas,
                "target_ongoing_requests": config.max_num_seqs,
            }
        }  # fmt: skip
