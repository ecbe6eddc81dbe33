"""Files of tuned configurations as the tests write them, and a lookup in them.

The fixture `config_folder` says where they are.
"""

import json

import torch

from nanovllm.hardware.versions import versions
from nanovllm.kernels.op import config_files
from nanovllm.kernels.op.tunable import bucket
from nanovllm.kernels.triton import tunables

GPU, CPU, BF16 = "nvidia-test-9", torch.device("cpu"), torch.bfloat16
KEY = {"rows": 4, "size": 64, "dtype": "bfloat16"}


def forget():
    config_files.forget_files()
    for tunable in tunables.ALL.values():
        tunable.forget()


def entry(tunable=tunables.RMS_NORM, key=KEY, config=None, **differ):
    config = {"rows": 2, "warps": 8} if config is None else config
    return {
        "tunable": tunable.name,
        "source": tunable.source,
        "versions": versions(),
        "key": key,
        "config": config,
        **differ,
    }


def write(folder, *found, **differ):
    path = folder / f"{GPU}.json"
    path.write_text(json.dumps({"schema": 1, "gpu": GPU, "entries": list(found), **differ}))
    forget()
    return path


def rms_norm(rows=4, size=64, dtype=BF16):
    return tunables.RMS_NORM.find(CPU, bucket(rows), size, dtype)
