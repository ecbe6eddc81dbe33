"""Blocks of a cluster, as the PTX manual says what their instructions do: their barrier, and stores to each other's
shared memory.

An address of another block is one of its own with the rank, and one, from bit `RANK` on.
"""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx_arithmetic import U8, U32, UnknownInstruction

RANK = 24


class Cluster:
    """What blocks of a cluster share: their shared memory and barriers by rank, and the barrier where all of their
    warps arrive.
    """

    def __init__(self, warps):
        self.blocks, self.warps, self.arrived, self.phase = [], warps, 0, 0

    def arrive(self):
        """-> the phase that this arrival is of."""
        phase = self.phase
        self.arrived += 1
        if self.arrived == self.warps:
            self.arrived, self.phase = 0, phase + 1
        return phase


class Clusters:
    """`arrived_at`: the phase of the cluster's barrier that a warp has arrived at; None: never, -1: that one was
    waited for.
    """

    def map_address(self, p, args, on):
        """An address of this block as the same of another of the cluster."""
        at, rank = self.value(args[1], U32), self.value(args[2], U32)
        assert (rank < len(self.cluster.blocks)).all(), "no such block in the cluster"
        self.put(args[0], at + (rank + U32(1) << U32(RANK)), on)

    def store_remotely(self, p, args, on):
        """st.async: lands at once or later, each thread's by itself, and then counts at a barrier of the same block."""
        if p[2:4] != ["shared::cluster", "mbarrier::complete_tx::bytes"] or p[-1] != "b32":
            raise UnknownInstruction(".".join(p))
        at, bars = self.address(args[0]), self.address(args[2])
        values = [self.value(n, U32) for n in self.names(args[1])]
        size = 4 * len(values)
        for i in np.nonzero(on)[0]:
            rank, where = int(at[i] >> RANK) - 1, int(at[i] & (1 << RANK) - 1)
            assert rank == int(bars[i] >> RANK) - 1, "the barrier is of another block"
            assert 0 <= rank != self.rank, "not another block's"
            assert self.arrived_at == -1, "the other block may not have begun"
            assert where % size == 0, "misaligned"
            inside = (v <= where and where + size <= v + n for v, n in self.variables.values())
            assert any(inside), "outside of a variable"
            block, bar = self.cluster.blocks[rank], int(bars[i] & (1 << RANK) - 1)
            assert bar in block["bars"], "no barrier there"
            data = np.array([v[i] for v in values])

            def arrive(block=block, bar=bar, where=where, data=data):
                assert block["alive"], "a store to a block that has ended"
                block["smem"][where : where + data.nbytes] = data.view(U8)
                self._arrive(block["bars"][bar], 0, -data.nbytes)

            if self.random.random() < 0.3:
                arrive()
            else:
                self.flying.append(arrive)

    def meet(self, p, args, on):
        """barrier.cluster. True: the warp has to wait."""
        assert on.all()
        if p[2] == "arrive":
            assert self.arrived_at in (None, -1), "arrives again without having waited"
            self.arrived_at = self.cluster.arrive()
            return False
        assert self.arrived_at not in (None, -1), "waits without having arrived"
        if not self.have_met():
            return True
        self.arrived_at = -1
        return False

    def have_met(self):
        """Of a warp that has arrived: whether all of the cluster have."""
        return self.cluster.phase > self.arrived_at
