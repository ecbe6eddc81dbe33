"""The options of `nanovllm serve` that are about replicas on Ray."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.serve_options import ReportOptions

if TYPE_CHECKING:
    from nanovllm.serve.ray_options import ReplicaOptions


def _option(text: str, **others: Any) -> Any:
    return typer.Option(help=text, **others)


@dataclass(frozen=True)
class RayOptions:
    """Replicas on Ray."""

    replicas: Annotated[int | None, _option("Copies of the server behind this address, each with GPUs of its own.")] = (
        None
    )
    max_replicas: Annotated[int | None, _option("While requests wait, Ray adds replicas up to this number.")] = None
    upscale_delay: Annotated[float, _option("Seconds of waiting requests before a replica is added.")] = 10.0
    downscale_delay: Annotated[float, _option("Seconds before a replica that is not needed is removed.")] = 600.0
    routing: Annotated[
        str, _option("prefix: to a replica that has the prompt's beginning. balanced: to the less busy of two.")
    ] = "prefix"
    ray_address: Annotated[
        str | None, _option("The Ray cluster, or auto for this machine's; by default a new one.")
    ] = None

    def __post_init__(self) -> None:
        if self.replicas is None:
            given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
            if given:
                raise ValueError(f"--{given[0].replace('_', '-')} needs --replicas")

    def replica_options(self, reports: ReportOptions) -> ReplicaOptions:
        """Raises: ValueError: an option is out of range."""
        from nanovllm.serve.ray_options import ReplicaOptions

        given = vars(self) | vars(reports)
        del given["ray_address"], given["metrics_prefix"], given["disable_log_stats"]
        return ReplicaOptions(**given)
