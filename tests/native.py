"""Every op by its reference, as layers take kernels."""

from nanovllm.kernels import Kernels, all_ops

NATIVE = Kernels({name: (declared.providers["native"], declared.native) for name, declared in all_ops().items()})
