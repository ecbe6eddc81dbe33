"""A small Definition, and Solutions of it, that tests change one field of."""

import copy

DEFINITION = {
    "name": "scaled_add_h8",
    "op_type": "elementwise",
    "axes": {"rows": {"type": "var"}, "h": {"type": "const", "value": 8}},
    "inputs": {
        "x": {"shape": ["rows", "h"], "dtype": "bfloat16"},
        "y": {"shape": ["rows", "h"], "dtype": "bfloat16"},
        "factor": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"output": {"shape": ["rows", "h"], "dtype": "bfloat16"}},
    "reference": "import torch\n\ndef run(x, y, factor):\n"
    "    return (x.float() * factor + y.float()).to(torch.bfloat16)\n",
}
RIGHT = "def run(x, y, factor):\n    return x * factor + y\n"
WRONG = "def run(x, y, factor):\n    return x * factor - y\n"
IN_PLACE = "def run(x, y, factor, output):\n    output.copy_(x * factor + y)\n"


def solution(name="scaled_add_h8_right", code=RIGHT, returns=True, **spec):
    """A Solution of DEFINITION in Python."""
    return {
        "name": name,
        "definition": "scaled_add_h8",
        "author": "a test",
        "spec": {
            "language": "python",
            "target_hardware": ["cpu", "cuda"],
            "entry_point": "main.py::run",
            "destination_passing_style": not returns,
            **spec,
        },
        "sources": [{"path": "main.py", "content": code}],
    }


def changed(document, path, value):
    """A copy of a document with another value at a path such as "axes.h.value"; value None removes the field."""
    copied = copy.deepcopy(document)
    *parents, last = path.split(".")
    at = copied
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return copied


WORKLOAD = {
    "definition": "scaled_add_h8",
    "workload": {
        "axes": {"rows": 5},
        "inputs": {"x": {"type": "random"}, "y": {"type": "random"}, "factor": {"type": "scalar", "value": 0.5}},
        "uuid": "a",
    },
}
