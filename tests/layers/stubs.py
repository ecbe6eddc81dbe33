"""Kernels whose fused ops record that they are called, and one of two ranks that compute the same."""

from nanovllm.distributed.group import Group
from nanovllm.kernels import Kernels, Provider, all_ops


class Rank(Group):
    """One of two ranks that compute the same."""

    def all_reduce(self, x):
        return 2 * x


def stubbed(ranges, recorded=()):
    """(kernels with a stub for each op of `ranges`, {op: the numbers of tokens that it is for}; kernels without; the
    calls so far of these and of the `recorded` references: (op, arguments by name)).
    """
    calls = []

    def stub(name):
        declared = all_ops()[name]

        def fn(*args, **kwargs):
            calls.append((name, declared.signature.bind(*args, **kwargs).arguments))
            return declared.native(*args, **kwargs)

        return Provider("stub" if name in ranges else "native", fn, num_tokens=lambda weight: ranges[name]), fn

    native = {name: (declared.providers["native"], declared.native) for name, declared in all_ops().items()}
    return Kernels(native | {name: stub(name) for name in (*ranges, *recorded)}), Kernels(native), calls
