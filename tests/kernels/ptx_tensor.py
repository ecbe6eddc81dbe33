"""Matrices in a warp's registers, the copy engine and its barriers, as the PTX manual says what their instructions
do.
"""

from __future__ import annotations

import re

import numpy as np

from tests.kernels.ptx_arithmetic import HALVES, U8, U16, U32, U64, UnknownInstruction


class Matrices:
    """Mostly 8 x 8 matrices of 16-bit elements: thread i of a warp has elements 2 i % 8 and the one after it of row
    i // 4.
    """

    def load_matrices(self, p, args, on):
        names, at = self.names(args[0]), self.address(args[1]).reshape(-1, 8)  # eight threads give a matrix' rows
        for name, rows in zip(names, at):
            assert (rows % 16 == 0).all(), "misaligned row"
            data = np.ascontiguousarray(self.smem[rows[:, None] + np.arange(16)]).view(U16)
            self.put(name, _registers(data.T if "trans" in p else data), on)

    def store_matrices(self, p, args, on):
        names, at = self.names(args[1]), self.address(args[0]).reshape(-1, 8)
        for name, rows in zip(names, at):
            assert (rows % 16 == 0).all(), "misaligned row"
            data = self.value(name, U32).view(U16).reshape(8, 8)
            data = np.ascontiguousarray(data.T if "trans" in p else data)
            self.smem[rows[:, None] + np.arange(16)] = data.view(U8).reshape(8, 16)

    def move_matrix(self, p, args, on):
        self.put(args[0], _registers(self.value(args[1], U32).view(U16).reshape(8, 8).T), on)

    def multiply(self, p, args, on):
        """mma.m16n8k16: D = A B + C in float32."""
        if "m16n8k16" not in p or p[-1] != "f32" or p[-3] not in HALVES:
            raise UnknownInstruction(".".join(p))
        read = HALVES[p[-3]][0]
        a, b, c = ([self.value(n, U32) for n in self.names(x)] for x in args[1:4])

        def block(register):
            return read(np.ascontiguousarray(register).view(U16)).reshape(8, 8).astype(np.float64)

        left = np.block([[block(a[0]), block(a[2])], [block(a[1]), block(a[3])]])  # [16, 16]
        right = np.hstack([block(x) for x in b]).T  # [16, 8]
        c = [x.view(np.float32).reshape(8, 4) for x in c]  # thread (row, pair of columns)
        sums = np.vstack([np.stack(c[i : i + 2], -1).reshape(8, 8) for i in (0, 2)])
        with np.errstate(all="ignore"):
            d = (sums + left @ right).astype(np.float32)
        for i, name in enumerate(self.names(args[0])):
            self.put(name, d[8 * (i // 2) :][:8].reshape(32, 2)[:, i % 2], on)

    def multiply_group(self, p, args, on):
        """wgmma: a warp's 16 of the 64 rows. It is done at once, and reads shared memory until it is waited for."""
        if p[1] == "commit_group":
            self.in_flight.append([])
        if p[1] == "wait_group":
            while len(self.in_flight) > int(args[0]) + 1:
                for place in self.in_flight.pop(0):
                    self.reads[place] -= 1
        if p[1] in ("fence", "commit_group", "wait_group"):
            return
        m = re.fullmatch(r"m64n(\d+)k16", p[4])
        in_registers = args[1].startswith("{")
        if (
            not m
            or p[5] != "f32"
            or p[6] not in HALVES
            or args[4:6] != ["1", "1"]
            or (not in_registers and args[6] != "0")
        ):
            raise UnknownInstruction(".".join(p))
        if in_registers:
            # Four matrices of 8 x 8: rows eight apart, then columns.
            parts = [self.value(n, U32).view(U16).reshape(8, 8) for n in self.names(args[1])]
            left = HALVES[p[6]][0](np.block([[parts[0], parts[2]], [parts[1], parts[3]]])).astype(np.float64)
        else:
            left = self._lines(args[1], np.arange(64), p[6])[self.first_thread // 32 % 4 * 16 :][:16]
        right = self._lines(args[2], np.arange(int(m[1])), p[6], transposed=args[-1] == "1")
        keep = self.predicate(args[3])
        assert keep.all() or not keep.any()
        names = self.names(args[0])
        # Registers 4 i to 4 i + 3: columns 8 i on, two of row thread / 4 and two of the row eight below.
        sums = np.stack([self.value(n, np.float32) if keep.any() else np.zeros(32, np.float32) for n in names])
        sums = sums.reshape(-1, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, -1)
        with np.errstate(all="ignore"):
            d = (sums + left @ right.T).astype(np.float32)
        d = d.reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3).reshape(-1, 32)
        for name, v in zip(names, d):
            self.put(name, v, on)

    def _lines(self, descriptor, rows, kind, transposed=False):
        """[rows, 16] of a matrix in shared memory, in lines of 128 or 64 bytes: 16 columns of each row, whose groups of
        eight are as far apart as the descriptor says; transposed, of 128 bytes: 16 lines of 64 rows each."""
        d = self.value(descriptor, U64)
        assert (d == d[0]).all()
        first, far, near, kind_of_swizzle = (int(d[0]) >> i & 0x3FFF for i in (0, 16, 32, 62))
        assert kind_of_swizzle == 1 or (kind_of_swizzle == 2 and not transposed), "not swizzled by 128 bytes"
        line = 128 // kind_of_swizzle
        columns = np.arange(16)
        if transposed:
            at = (rows // 64 * (far << 4) + rows % 64 * 2)[:, None] + columns % 8 * 128 + columns // 8 * (near << 4)
        else:
            at = (rows // 8 * (near << 4) + rows % 8 * line)[:, None] + columns * 2
        at += first << 4
        at ^= (at >> 7 & (line // 16 - 1)) << 4
        place = int(at.min()) & -1024, (int(at.max()) | 1023) + 1
        self.reads[place] = self.reads.get(place, 0) + 1
        self.in_flight = self.in_flight or [[]]
        self.in_flight[-1].append(place)
        bits = np.ascontiguousarray(self.smem[at[:, :, None] + np.arange(2)]).view(U16)[:, :, 0]
        return HALVES[kind][0](bits).astype(np.float64)


def _registers(matrix):
    return np.ascontiguousarray(matrix).reshape(32, 2).view(U32)[:, 0]


class Copies:
    """mbarriers, by their address in `bars`, and the copies that arrive there."""

    def barrier(self, p, args, on):
        """True: the warp has to wait."""
        if p[1] == "try_wait":
            b = self.bars[int(self.address(args[1])[0])]
            parity = self.value(args[2], U32)
            assert (parity == parity[0]).all()
            if b["phase"] == parity[0]:
                return True
            self.put(args[0], np.ones(self.n, bool), on)
            return False
        for i in np.nonzero(on)[0]:
            if p[1] == "init":
                where, count = int(self.address(args[0])[i]), int(args[1])
                self.bars[where] = dict(init=count, count=count, phase=0, bytes=0)
            elif p[1] == "arrive" and args[0] == "_":
                b = self.bars[int(self.address(args[1])[i])]
                number = int(self.value(args[2], U32)[i]) if len(args) > 2 else 1
                self._arrive(b, 1, number) if "expect_tx" in p else self._arrive(b, number, 0)
            else:
                raise UnknownInstruction(".".join(p))

    def _arrive(self, b, count, expected):
        """So many arrivals, and bytes to come (below zero: that came)."""
        b["count"] -= count
        b["bytes"] += expected
        assert b["count"] >= 0, "more arrivals than a phase has"
        if b["count"] == 0 and b["bytes"] == 0:
            b.update(phase=b["phase"] ^ 1, count=b["init"])

    def _poison(self, first, end):
        for (low, high), count in self.reads.items():
            assert not count or high <= first or low >= end, "a copy to where a product reads"
        self.smem[first:end] = 0xFF

    def _copy_by_threads(self, p, args, on):
        """Copies of each thread, in groups that it waits for: each lands at once, or when its group is waited for."""
        if p[2] == "commit_group":
            self.groups.append([])
            return
        if p[2].startswith("wait"):
            left = int(args[0]) if p[2] == "wait_group" else 0
            while len(self.groups) - 1 > left:
                for land in self.groups.pop(0):
                    land()
            return
        if p[2] == "mbarrier":
            return self._arrive_after_copies(p, args, on)
        size, taken = int(args[2], 0), np.full(self.n, int(args[2], 0))
        if len(args) > 3:
            taken = self.value(args[3], np.int32)
        into, source = self.address(args[0]), self.address(args[1])
        assert (into[on] % size == 0).all() and (source[on & (taken > 0)] % size == 0).all(), "misaligned copy"
        self._check(source[on & (taken > 0)], size, False)
        data = np.zeros((self.n, size), U8)
        for i in np.nonzero(on)[0]:
            if taken[i]:
                store, places = self._bytes(False, source[i : i + 1], int(taken[i]), np.ones(1, bool))
                data[i, : taken[i]] = store[places[0]]
            self._poison(int(into[i]), int(into[i]) + size)

        def land():
            for i in np.nonzero(on)[0]:
                self.smem[int(into[i]) : int(into[i]) + size] = data[i]

        if self.random.random() < 0.5:
            land()
        else:
            self.groups[-1].append(land)

    def _arrive_after_copies(self, p, args, on):
        """Each thread arrives at an mbarrier when all of its copies so far have landed: at once or later."""
        if "noinc" not in p:
            raise UnknownInstruction(".".join(p))
        bars, lands = [self.bars[int(self.address(args[0])[i])] for i in np.nonzero(on)[0]], sum(self.groups, [])
        self.groups = [[]]

        def arrive():
            for land in lands:
                land()
            for b in bars:
                self._arrive(b, 1, 0)

        if self.random.random() < 0.5:
            arrive()
        else:
            self.flying.append(arrive)

    def copy(self, p, args, on):
        """A box of a tensor; what lies outside of it is zero. In shared memory, lines of 128 or 64 bytes, swizzled."""
        if p[1] == "async" and p[2] in ("ca", "cg", "commit_group", "wait_group", "wait_all", "mbarrier"):
            return self._copy_by_threads(p, args, on)
        if p[:4] != ["cp", "async", "bulk", "tensor"]:
            raise UnknownInstruction(".".join(p))
        for i in np.nonzero(on)[0]:
            target = int(self.address(args[0])[i])
            m = re.match(r"\[\s*(%\w+)\s*,\s*\{([^}]*)\}\s*\]", args[1])
            tensor, box = self.descriptors[int(self.value(m[1], U64)[i])]
            first = [int(self.value(c, np.int32)[i]) for c in self.names(m[2])][::-1]
            line = 2 * box[-1]
            if line not in (64, 128):
                raise UnknownInstruction(f"lines of {line} bytes")
            assert target % (8 * line) == 0, "swizzled lines start at multiples of eight"
            data, source, into = np.zeros(box, U16), [], []
            for at, n, size in zip(first, box, tensor.shape):
                low, high = max(at, 0), min(at + n, size)
                source.append(slice(low, max(high, low)))
                into.append(slice(low - at, max(high, low) - at))
            b = self.bars[int(self.address(args[2])[i])]
            self._poison(target, target + data.size * 2)

            def arrive(data=data, source=tuple(source), into=tuple(into), tensor=tensor, target=target, line=line, b=b):
                if all(s.stop > s.start for s in source):
                    data[into] = tensor[source]
                # Of a piece's address, in 16 bytes, the bits from 3 on change the lower 3 bits, or in lines of 64 bytes
                # the lower 2.
                pieces = data.reshape(-1, 8)
                at = np.arange(len(pieces)) + target // 16
                swizzled = np.empty_like(pieces)
                swizzled[(at ^ (at >> 3) % (line // 16)) - target // 16] = pieces
                self._poison(target, target + data.size * 2)
                self.smem[target : target + data.size * 2] = swizzled.reshape(-1).view(U8)
                self._arrive(b, 0, -data.size * 2)

            # At once, or as late as may be.
            if self.random.random() < 0.5:
                arrive()
            else:
                self.flying.append(arrive)
