"""The text of plugins, and the commands that load them."""

import json

from typer.testing import CliRunner

from nanovllm.cli import app

PROVIDER = """
from nanovllm.kernels import softmax

@softmax.provider("{name}")
def mine(x):
    return (x.double() - x.double().amax(-1, keepdim=True)).exp().to(x.dtype) if "{name}" == "wrong" else x.softmax(-1)
"""

OP = '''
import torch
from nanovllm.kernels import Cost, Inputs, op

@op(
    arguments={{"x": "[..., n]"}},
    inputs=Inputs(lambda t, rows, n: {{"x": t.normal(rows, n)}}, small=[(1, 1), (0, 3), (3, 5)], decode=[(2, 64)]),
    cost=lambda x: Cost(2 * x.numel() * x.element_size()),
)
def {name}(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    return 2 * x

@{name}.provider("sum")
def by_adding(x: torch.Tensor) -> torch.Tensor:
    return x + x
'''


def cli(*args: str, fails: bool = False):
    """What `nanovllm kernels` prints with these arguments, as JSON, or the result if it has to fail."""
    in_this_process = ["--timeout", "0"] if args[0] == "verify" else []  # another one takes seconds to start
    done = CliRunner().invoke(app, ["kernels", *args, *in_this_process])
    if fails:
        assert done.exit_code != 0
        return done
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)
