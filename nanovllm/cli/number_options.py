"""Options whose number may have a suffix, as vLLM's have: 8k is 8,000 and 8K is 8,192."""

from __future__ import annotations

from typing import Annotated

import typer

from nanovllm.arguments import whole_number
from nanovllm.config import AUTO


def _number(text: str | int) -> int:
    try:
        return text if isinstance(text, int) else whole_number(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}.") from None


def _number_or_auto(text: str | int) -> int:
    return AUTO if isinstance(text, str) and text.strip().lower() == "auto" else _number(text)


_LENGTH = "Most tokens of a prompt and its output together: 8192, 8K (8192), 8k (8000); auto or -1: "
MaxModelLen = Annotated[int, typer.Option(parser=_number_or_auto, metavar="N", help=f"{_LENGTH}what fits.")]
ServedModelLen = Annotated[
    int,
    typer.Option(
        parser=_number_or_auto, metavar="N", show_default="auto",
        help=f"{_LENGTH}the model's length, or less if the KV cache holds no sequence of it.",
    ),
]  # fmt: skip
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        parser=_number, metavar="N",
        help="Most tokens in a step, such as 2048 or 2K; by default 8192 on a GPU, 512 on a CPU.",
    ),
]  # fmt: skip
