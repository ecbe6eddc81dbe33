"""A gated MLP with custom kernels and without them, on the same weights: forward values and time."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
import typer

from nanovllm.arguments import full_dtype
from nanovllm.kernels import all_ops, benchmark_kernel, unavailable_reason
from nanovllm.kernels.op.declaration import TOLERANCE
from nanovllm.layers.custom_mlp import CustomGatedMLP

BATCH_SIZES = (1, 4, 16, 64, 256, 1024, 4096)


def compare_mlp(
    hidden_size: Annotated[int, typer.Option(min=1, help="Of the model; Qwen3-0.6B's by default.")] = 1024,
    intermediate_size: Annotated[int, typer.Option(min=1, help="Of the MLP.")] = 3072,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 by default, float32 on a CPU.")] = None,
    kernels: Annotated[str | None, typer.Option(help="Name the custom provider, such as triton or cuda.")] = None,
) -> None:
    """Compare CustomGatedMLP with custom kernels and without, over batch sizes 1 to 4096."""
    from rich.console import Console
    from rich.table import Column, Table

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    where = torch.cuda.get_device_name(device) if on_gpu else f"cpu ({unavailable_reason()})"
    name = full_dtype(dtype) if dtype else ("bfloat16" if on_gpu else "float32")
    if name not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"{name}: expected bfloat16, float16 or float32", param_hint="--dtype")
    weights = getattr(torch, name)
    priority = {
        name: [kernels] for name in ("silu_and_mul", "linear_silu_and_mul") if kernels in all_ops()[name].providers
    }
    if kernels and not priority:
        raise typer.BadParameter(
            f"{kernels}: no provider of silu_and_mul or linear_silu_and_mul", param_hint="--kernels"
        )
    custom = CustomGatedMLP(hidden_size, intermediate_size, True, device, weights, priority)
    plain = CustomGatedMLP(hidden_size, intermediate_size, False, device, weights)
    plain.load_state_dict(custom.state_dict())
    # In 80 columns an op's name fits on one line.
    served_by = Column("served by", min_width=len("linear_silu_and_mul:"))
    table = Table(
        "batch", "plain us", "custom us", served_by, "speed-up", "error", "equal", show_edge=False, pad_edge=False,
        title=f"gated MLP {hidden_size} x {intermediate_size}, {name}, {where}",
        caption="served by: the op of custom's first half; error: the largest; equal: within the tolerance",
    )  # fmt: skip
    same = plain.providers == custom.providers  # without a GPU, say: the times differ by chance
    wrong = False
    for batch in BATCH_SIZES:
        x = torch.randn(batch, hidden_size, device=device, dtype=weights)
        with torch.inference_mode():
            want, got = plain(x), custom(x)
            # The products before and after round too, in both: a difference of one rounding passes through the second.
            error = (got.float() - want.float()).abs().max().item()
            agrees = error <= TOLERANCE[weights] * want.float().abs().max().item()
            time_of = (
                benchmark_kernel if on_gpu else partial(benchmark_kernel, warmup=1, iters=5 if batch <= 256 else 2)
            )
            slow, fast = (1e6 * time_of(m, x) for m in (plain, custom))
        wrong |= not agrees
        speed_up = "-" if same else f"{slow / fast:.2f}"
        verdict = "yes" if agrees else "NO"
        table.add_row(
            str(batch), f"{slow:.1f}", f"{fast:.1f}", custom.served_by(x), speed_up, f"{error:.2g}", verdict
        )  # fmt: skip
    Console().print(table)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(compare_mlp)
