"""Runs compiled PTX of a Gluon kernel on the CPU: addresses, layouts of operands, arithmetic, barriers and copies,
without a GPU.

What an instruction does is taken from the PTX manual. The warps of a program run in random order, each as far as its
next barrier, and some groups of four more often than others; a copy lands at once or at any time later; shared memory
begins as NaN, and is NaN from a copy's start to its end. A copy to where a product of tensor cores still reads is an
error. Programs run one after the other, in the order of
the caller, or together, as any of their warps: so do the blocks of a cluster. An access to another block's shared
memory is an error before the blocks have met and after that one's end. So is, if the machine is told of arrays, an
access by a thread outside of them, and to some of them before the wait for the kernel before, or a store after the next
kernel has been let in. Not checked: what of another program or kernel a thread sees when, and what the hardware asks of
a descriptor. Python 3, numpy, about 20,000 instructions of a warp a second.
"""

from __future__ import annotations

import re

import numpy as np

from tests.kernels.ptx_arithmetic import (
    SIZES,
    U8,
    U32,
    U64,
    UNSIGNED,
    Arithmetic,
    UnknownInstruction,
    chosen,
    constant,
    type_of,
)
from tests.kernels.ptx_cluster import Cluster, Clusters
from tests.kernels.ptx_parser import names_of, number_of, parse, place_of
from tests.kernels.ptx_tensor import Copies, Matrices

BASE = 1 << 32
"""Address of the first byte of global memory."""
PARAMETERS = 1 << 28
"""Address of parameter 0; parameter i is i bytes on. Some versions take a parameter's address in 32 bits."""
_MOST_STEPS = 200_000
_BITS = {"b16": 16, "b32": 32, "b64": 64}
_ALL = np.ones(32, bool)
"""All threads of a warp."""


class Machine:
    """A compiled kernel and what its launches share.

    Args:
        parameters: numbers in the kernel's order; addresses are from BASE on. memory: uint8 [bytes], global memory.
        descriptors: index of a parameter -> (the tensor as a uint16 view of memory, its box).
        shared: bytes of shared memory.
        arrays: name -> (address, bytes), outside of which no thread may read or write; the copy engine may. None: not
            checked.
        late: names of those that nobody may touch before the wait for the kernel before this one.
        early: names of those that no program may write once it has let the next kernel start.
    """

    def __init__(self, ptx, warps, parameters, memory, descriptors, shared, arrays=None, late=(), early=()):
        self.lines, self.labels, variables = parse(ptx)
        self.warps, self.shared = warps, variables["global_smem"][0] + shared
        self.given = dict(
            lines=self.lines, labels=self.labels, variables=variables, memory=memory, parameters=parameters,
            descriptors={PARAMETERS + i: d for i, d in descriptors.items()}, arrays=arrays, late=late, early=early,
        )  # fmt: skip

    def run(self, block, grid, random):
        """One program, to its end."""
        self.run_cluster([block], grid, random)

    @np.errstate(all="ignore")
    def run_cluster(self, blocks, grid, random):
        """The programs of a cluster by rank, or any others, together, to their end."""
        flying, cluster, warps = [], Cluster(self.warps * len(blocks)), []
        for rank, block in enumerate(blocks):
            of_block = dict(
                bars={},
                reads={},
                smem=np.full(self.shared + 1024, 0xFF, U8),
                alive=set(range(self.warps)),
                let_in=set(),
            )
            cluster.blocks.append(of_block)
            of_block = self.given | of_block | dict(block=block, grid=grid, rank=rank)
            of_block |= dict(flying=flying, cluster=cluster, random=random)
            warps += [Warp(32 * i, of_block) for i in range(self.warps)]
        speeds = [random.choice([0.2, 1, 5]) for _ in range(0, len(warps), 4)]
        states, met = ["ready"] * len(warps), {}
        while any(s != "done" for s in states):
            ready = [i for i, s in enumerate(states) if s == "ready" or s == "waits" and warps[i].has_waited()]
            if flying and (not ready or random.random() < 0.2):
                flying.pop(random.randrange(len(flying)))()
                continue
            stuck = [i for i, s in enumerate(states) if s == "waits"]
            assert ready or not stuck, f"warps {stuck} wait forever"
            assert ready, f"barriers that not all warps come to: {met}"
            i = random.choices(ready, [speeds[i // 4] for i in ready])[0]
            states[i] = warps[i].go()
            if states[i] == "done":
                warps[i].alive.discard(i % self.warps)
                assert warps[i].arrived_at in (None, -1), "ends without having waited for the cluster's barrier"
            elif states[i] != "waits":  # a barrier's name, and how many warps meet there
                name, count = states[i]
                there = met.setdefault((warps[i].rank, name), set())
                there.add(i)
                if len(there) == (count or self.warps):
                    states = ["ready" if j in there else s for j, s in enumerate(states)]
                    there.clear()
        assert not flying, "copies nobody waited for"


class Warp(Arithmetic, Matrices, Copies, Clusters):
    """32 threads, which branch together. Registers hold their bits, predicates bools."""

    n = 32

    def __init__(self, first_thread, of_block):
        self.first_thread, self.at, self.steps, self.r, self.in_flight = first_thread, 0, 0, {}, []
        self.groups = [[]]  # of copies by threads; the last is open
        self.arrived_at = None  # at the cluster's barrier: never, and -1: waited for
        self.behind = False  # the wait for the kernel before
        self.__dict__.update(of_block)

    def go(self):
        """To the next point where others have to do something: (name of a barrier, warps or 0 for all), "waits" for an
        mbarrier, or "done"."""
        while self.at < len(self.lines):
            negated, guard, p, args = self.lines[self.at]
            on = _ALL
            if guard:
                on = ~self.r[guard] if negated else self.r[guard]
            self.steps += 1
            assert self.steps < _MOST_STEPS, "does not end"
            if p[0] == "bra":
                assert on.all() or not on.any(), f"threads part at {self.at}"
                self.at = self.labels[args[0]] if on.all() else self.at + 1
                continue
            if p[0] == "brx":
                branches = self.lines[self.labels[args[1]]][3]
                index = self.value(args[0], U32)
                assert (index == index[0]).all(), f"threads part at {self.at}"
                self.at = self.labels[branches[index[0]]]
                continue
            if p[0] == "ret":
                return "done"
            if p[0] in ("bar", "barrier") and p[1] == "sync":
                assert on.all()
                self.at += 1
                return args[0], int(args[1]) // 32 if len(args) > 1 else 0
            if p[0] not in _METHODS:
                raise UnknownInstruction(".".join(p))
            try:
                blocked = _METHODS[p[0]](self, p, args, on)
            except UnknownInstruction:
                raise
            except Exception as e:
                raise AssertionError(f"statement {self.at}: {'.'.join(p)} {args}: {e}") from e
            if blocked:
                return "waits"
            self.at += 1
        return "done"

    def has_waited(self):
        """Of a warp that waits: whether what it waits for has happened."""
        _, _, p, args = self.lines[self.at]
        if p[:2] == ["barrier", "cluster"]:
            return self.have_met()
        return self.bars[int(self.address(args[1])[0])]["phase"] != self.value(args[2], U32)[0]

    # ---- operands

    def value(self, a, kind):
        """An operand's bits as 32 of `kind`, a type of numpy."""
        size = SIZES[kind]
        unsigned = UNSIGNED[size]
        if a in self.r:
            bits = self.r[a]
            return bits.view(kind) if bits.itemsize == size else bits.astype(unsigned).view(kind)
        if (number := number_of(a)) is not None:
            return constant(number, kind)
        if a == "%tid.x":
            return np.arange(self.first_thread, self.first_thread + self.n, dtype=U32).astype(unsigned).view(kind)
        if m := re.fullmatch(r"%(n?ctaid)\.([xyz])", a):
            number = (self.block if m[1] == "ctaid" else self.grid)["xyz".index(m[2])]
        elif m := re.fullmatch(r"\w+_param_(\d+)", a):
            number = PARAMETERS + int(m[1])
        elif a in self.variables:
            number = self.variables[a][0]
        else:
            assert not re.match(r"%[a-z]+\d+$", a), f"{a} has not been written"
            raise UnknownInstruction(f"operand {a}")
        return constant(number, kind)

    def predicate(self, a):
        if a[0] in "%!" or a in self.r:
            return ~self.r[a[1:]] if a[0] == "!" else self.r[a]
        return np.full(self.n, a not in ("0", "false"))

    def put(self, name, v, on):
        if name == "_":
            return
        v = np.asarray(v)
        if v.dtype.kind != "b":
            v = np.ascontiguousarray(v).view(UNSIGNED[v.dtype.itemsize])
        if on is not _ALL and not on.all():
            v = np.where(on, v, self.r.get(name, np.zeros_like(v)))
        self.r[name] = v

    def names(self, a):
        return names_of(a)

    def address(self, a):
        name, offset = place_of(a)
        narrow = name in self.r and self.r[name].dtype == U32 or name in self.variables
        return self.value(name, U32 if narrow else U64).astype(np.int64) + offset

    # ---- memory

    def _bytes(self, shared, at, size, on):
        """(the memory, the indices [threads, size] of bytes); threads that do not take part have the first ones."""
        store = self.smem if shared else self.memory
        i = np.where(on, at - (0 if shared else BASE), 0)
        assert (i >= 0).all() and (i + size <= len(store)).all(), "outside of memory"
        assert (i % size == 0).all(), "misaligned"
        return store, i[:, None] + np.arange(size)

    def _check(self, at, size, stores):
        """Whether threads may touch `size` bytes of global memory at each of these addresses, now."""
        inside = np.zeros(len(at), bool)
        for name, (begin, length) in (self.arrays or {}).items():
            here = (at >= begin) & (at + size <= begin + length)
            if here.any():
                assert self.behind or name not in self.late, f"{name} before the wait for the kernel before this one"
                assert not (stores and self.let_in and name in self.early), (
                    f"a store to {name} after the next kernel has been let in"
                )
            inside |= here
        assert self.arrays is None or inside.all(), "outside of every array"

    def access(self, p, args, on):
        if p[1] == "param":
            v = self.parameters[int(re.search(r"param_(\d+)", args[1])[1])]
            kind = UNSIGNED[np.dtype(type_of(p[-1])).itemsize]
            v = int(np.float32(v).view(U32)) if isinstance(v, float) else v
            return self.put(args[0], np.full(self.n, v & int(np.iinfo(kind).max), kind), on)
        if p[1] == "async":
            return self.store_remotely(p, args, on)
        count = next((int(w[1:]) for w in p if w in ("v2", "v4", "v8")), 1)
        shared = p[1].startswith("shared")
        if not shared and p[1] != "global":
            raise UnknownInstruction(".".join(p))
        kind = U8 if p[-1] == "b8" else UNSIGNED[np.dtype(type_of(p[-1])).itemsize]
        size = np.dtype(kind).itemsize
        names, where = (args[0], args[1]) if p[0] == "ld" else (args[1], args[0])
        at = self.address(where)
        assert (at[on] % (size * count) == 0).all(), "misaligned vector"
        if not shared:
            self._check(at[on], size * count, p[0] == "st")
        for i, name in enumerate(self.names(names)):
            store, places = self._bytes(shared, at + size * i, size, on)
            if p[0] == "ld":
                self.put(name, np.ascontiguousarray(store[places]).view(kind)[:, 0], on)
            else:
                data = np.ascontiguousarray(self.value(name, kind)[on])
                store[places[on]] = data[:, None].view(U8).reshape(-1, size)

    def add_atomically(self, p, args, on):
        if "add" not in p:
            raise UnknownInstruction(".".join(p))
        at, v, before = self.address(args[1]), self.value(args[2], U32), np.zeros(self.n, U32)
        self._check(at[on], 4, True)
        for i in np.nonzero(on)[0]:
            store, places = self._bytes(False, at, 4, np.arange(self.n) == i)
            before[i] = store[places[i]].view(U32)[0]
            store[places[i]] = (before[i : i + 1] + v[i : i + 1]).view(U8)
        self.put(args[0], before, on)

    # ---- between registers

    def move(self, p, args, on):
        t = p[-1]
        if t == "pred":
            return self.put(args[0], self.predicate(args[1]), on)
        if "{" in args[0] or "{" in args[1]:  # a register as several, or the other way round
            parts = self.names(args[0] if "{" in args[0] else args[1])
            bits = _BITS[t] // len(parts)
            part, whole = UNSIGNED[bits // 8], UNSIGNED[_BITS[t] // 8]
            if "{" in args[0]:
                v = self.value(args[1], whole)
                for i, name in enumerate(parts):
                    self.put(name, (v >> whole(bits * i)).astype(part), on)
            else:
                v = sum(self.value(name, part).astype(whole) << whole(bits * i) for i, name in enumerate(parts))
                self.put(args[0], v, on)
            return None
        return self.put(args[0], self.value(args[1], type_of(t)), on)

    def select(self, p, args, on):
        kind = type_of(p[-1])
        self.put(args[0], np.where(self.predicate(args[3]), self.value(args[1], kind), self.value(args[2], kind)), on)

    def shuffle(self, p, args, on):
        lane, by = np.arange(self.n), int(args[2])
        sources = {"bfly": lane ^ by, "up": np.where(lane >= by, lane - by, lane), "idx": lane * 0 + by}
        if p[2] not in sources:
            raise UnknownInstruction(".".join(p))
        # `to|valid`, or the register alone
        self.put(args[0].partition("|")[0], self.value(args[1], U32)[sources[p[2]]], on)

    def reduce(self, p, args, on):
        assert (self.value(args[2], U32) == 0xFFFFFFFF).all()
        v = self.value(args[1], np.int32)
        self.put(
            args[0],
            np.full(self.n, chosen({"add": np.sum, "max": np.max, "min": np.min}, p[2])(v).astype(np.int32)),
            on,
        )

    def elect(self, p, args, on):
        self.put(args[0].split("|")[1], np.arange(self.n) == 0, on)

    def depend(self, p, args, on):
        if on.any() and p[1] == "wait":
            self.behind = True
        elif on.any():
            self.let_in.add(self.first_thread)

    def nothing(self, p, args, on):
        """Of the order of memory nothing is checked."""


_METHODS = {
    **dict.fromkeys(("add", "sub", "mul", "fma", "max", "min", "neg", "abs", "div", "rem", "mad", "ex2", "rsqrt",
    "rcp"), Warp.calculate),
    **dict.fromkeys(("and", "or", "xor", "not", "shl", "shr", "shf", "lop3", "bfe", "popc"), Warp.bitwise),
    "prmt": Warp.permute,
    **dict.fromkeys(("bar", "fence", "setmaxnreg", "prefetch", ""), Warp.nothing), "griddepcontrol": Warp.depend,
    **dict.fromkeys(("ld", "st"), Warp.access),
    **dict.fromkeys(("mov", "cvta"), Warp.move),
    "setp": Warp.compare, "selp": Warp.select, "cvt": Warp.convert, "shfl": Warp.shuffle, "redux": Warp.reduce,
    "elect": Warp.elect,
    "atom": Warp.add_atomically, "mapa": Warp.map_address, "barrier": Warp.meet, "mbarrier": Warp.barrier,
    "cp": Warp.copy, "ldmatrix": Warp.load_matrices,
    "stmatrix": Warp.store_matrices, "movmatrix": Warp.move_matrix, "mma": Warp.multiply,
    "wgmma": Warp.multiply_group,
}  # fmt: skip
