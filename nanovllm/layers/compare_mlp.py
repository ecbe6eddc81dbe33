"""A gated MLP with custom kernels and without them, on the same weights: forward values and time."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
import typer

from nanovllm.arguments import full_dtype
from nanovllm.console import Column, TablePrinter, run_program
from nanovllm.kernels import benchmark_kernel, linear_silu_and_mul, silu_and_mul, unavailable_reason
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
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    where = torch.cuda.get_device_name(device) if on_gpu else f"cpu ({unavailable_reason()})"
    name = full_dtype(dtype) if dtype else ("bfloat16" if on_gpu else "float32")
    if name not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"{name}: expected bfloat16, float16 or float32", param_hint="--dtype")
    weights = getattr(torch, name)
    priority = {op.name: [kernels] for op in (silu_and_mul, linear_silu_and_mul) if kernels and kernels in op.providers}
    if kernels and not priority:
        raise typer.BadParameter(
            f"{kernels}: no provider of silu_and_mul or linear_silu_and_mul", param_hint="--kernels"
        )
    custom = CustomGatedMLP(hidden_size, intermediate_size, True, device, weights, priority)
    plain = CustomGatedMLP(hidden_size, intermediate_size, False, device, weights)
    plain.load_state_dict(custom.state_dict())
    same = plain.providers == custom.providers
    if same:
        print("Both columns ran the same kernels, the PyTorch reference: their times differ by chance.")
    numbers = (
        Column(title, width, number=True) for title, width in (("batch", 5), ("plain us", 10), ("custom us", 10))
    )
    table = TablePrinter(
        *numbers, Column("speed-up", 8, number=True), Column("error", 8, number=True), Column("equal", 5),
        Column("the first half is served by", 27),
        title=f"gated MLP {hidden_size} x {intermediate_size}, {name}, {where}",
    )  # fmt: skip
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
        table.add(
            str(batch), f"{slow:.1f}", f"{fast:.1f}", speed_up, f"{error:.2g}", verdict, custom.served_by(x),
            style="" if agrees else "red",
        )  # fmt: skip
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_program("custom_mlp", lambda: typer.run(compare_mlp))
