"""Every op's reference, as layers take their kernels, whatever is preferred on this machine."""

from types import SimpleNamespace

from nanovllm.kernels import all_ops

NATIVE = SimpleNamespace(**{name: declared.providers["native"].fn for name, declared in all_ops().items()})
