"""How many replicas there are, and what each takes of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.config import EngineConfig

ROUTINGS = ("prefix", "balanced")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class ReplicaOptions:
    """Raises: ValueError: a value is out of range."""

    replicas: int = 1
    max_replicas: int | None = None
    """More than `replicas`: Ray adds replicas up to this number while requests wait, and removes them later."""
    num_cpus: float = 1.0
    """CPUs that a replica takes of Ray's count."""
    routing: str = "prefix"
    """prefix: to a replica that has the prompt's beginning. balanced: to the less busy of two, by Ray's router."""
    slack: float = 32.0
    """Open requests by which a replica that has the prompt's beginning may exceed the least busy one."""
    upscale_delay: float = 10.0
    """Seconds for which requests wait before a replica is added."""
    downscale_delay: float = 600.0
    """Seconds for which a replica is not needed before it is removed."""
    log_level: str = "warning"
    """debug, info, warning or error. Logs are in Ray's files on each node; `nanovllm serve` on a machine of its own
    writes them to its standard error."""
    log_json: bool = False
    """Write logs as JSON."""
    access_log: bool = False
    """Log every answer."""
    otlp_endpoint: str | None = None
    """Send a trace span of each request to this address."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas={self.replicas!r}: must be at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas!r}: must be at least replicas={self.replicas}")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing={self.routing!r}: must be {' or '.join(ROUTINGS)}")
        if self.log_level.lower() not in LOG_LEVELS:
            raise ValueError(f"log_level={self.log_level!r}: must be {', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}")
        for name in ("num_cpus", "slack", "upscale_delay", "downscale_delay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must not be negative")

    def num_gpus(self, config: EngineConfig) -> int:
        """The GPUs of a replica."""
        return 0 if config.device == "cpu" else config.tensor_parallel_size

    def resources(self, config: EngineConfig) -> dict[str, float]:
        """What all replicas take together, while there are `replicas`."""
        return {"CPU": self.replicas * self.num_cpus, "GPU": self.replicas * self.num_gpus(config)}

    def placement(self, config: EngineConfig) -> dict[str, Any]:
        """The options of the deployment that say what a replica takes: a bundle of resources for each rank, all on one
        machine, since the ranks of a replica are processes that share its memory.
        """
        ranks = config.tensor_parallel_size
        cpus, gpus = self.num_cpus / ranks, self.num_gpus(config) // ranks
        actor = {"ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus}}
        bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
        if ranks == 1 or not bundle:
            return actor
        return actor | {"placement_group_bundles": [bundle] * ranks, "placement_group_strategy": "STRICT_PACK"}

    def scaling(self, config: EngineConfig) -> dict[str, Any]:
        """The options of the deployment that say how many replicas there are."""
        if self.max_replicas is None or self.max_replicas == self.replicas:
            return {"num_replicas": self.replicas}
        # A replica computes this number of requests at a time; further requests would wait.
        return {
            "autoscaling_config": {
                "min_replicas": self.replicas, "max_replicas": self.max_replicas,
                "target_ongoing_requests": config.max_num_seqs,
                "upscale_delay_s": self.upscale_delay, "downscale_delay_s": self.downscale_delay,
            }
        }  # fmt: skip
