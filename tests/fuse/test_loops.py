"""Fusion and tiling of loop nests: what the analysis says is legal gives the same result when it is run, and the
rest does not.
"""

import itertools

import islpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.fuse.dependence import DependenceKind, distances
from nanovllm.fuse.loop_fusion import LoopFusionAnalyzer
from nanovllm.fuse.loop_nest import NestError, parse, run
from nanovllm.fuse.tile_fusion import TileFusion

RAW, WAR, WAW, RAR = DependenceKind.RAW, DependenceKind.WAR, DependenceKind.WAW, DependenceKind.RAR


def arrays(nests, seed=0):
    """Random arrays that are just large enough for what the nests touch."""
    rng = np.random.default_rng(seed)
    shapes = {}
    for nest in nests:
        for a in nest.accesses:
            spans = a.span(nest.bounds)
            assert all(low >= 0 for low, _ in spans), a.text
            known = shapes.get(a.array, (0,) * len(spans))
            shapes[a.array] = tuple(max(n, high + 1) for n, (_, high) in zip(known, spans))
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def one_by_one(nests):
    return [(nest, point) for nest in nests for point in nest.points()]


def same(a, b):
    return all(np.array_equal(a[name], b[name], equal_nan=True) for name in a)


def fuses(text, **sizes):
    """The analysis of a text, after comparing what it says with what happens."""
    nests = parse(text, **sizes)
    analyzer = LoopFusionAnalyzer(*nests)
    given = arrays(nests)
    wanted = run(analyzer.schedule(0), given)
    assert same(run(analyzer.schedule(), given), wanted)
    if analyzer.shift is not None:
        assert same(run(analyzer.schedule(analyzer.common, analyzer.shift), given), wanted)
    for depth in range(analyzer.depth + 1, analyzer.common + 1):
        assert not same(run(analyzer.schedule(depth), given), wanted), "it was legal after all"
    return analyzer


def vectors(d):
    """All distances of a set, listed."""
    found = []
    d.vectors.foreach_point(found.append)
    return {tuple(p.get_coordinate_val(islpy.dim_type.set, k).to_python() for k in range(d.depth)) for p in found}


def kinds(analyzer):
    return {(d.kind, d.array) for d in analyzer.dependences}


# ------------------------------------------------------------------------------------------------------- textbook nests


def test_two_elementwise_loops():
    f = fuses(
        """
        for i in range(N):
            for j in range(M):
                B[i, j] = 2 * A[i, j]
        for i in range(N):
            for j in range(M):
                C[i, j] = B[i, j] + A[i, j]
        """, N=5, M=7)  # fmt: skip
    assert f.legal and f.depth == 2 and f.reason == "" and f.shift == ((0, 0), (0, 0))
    assert kinds(f) == {(RAW, "B"), (RAR, "A")}
    assert all(d.distances.ranges == ((0, 0), (0, 0)) for d in f.dependences)
    # What is printed is Python that does the same.
    given = arrays(f.nests)
    made = {k: v.copy() for k, v in given.items()}
    exec(f.source(), {}, made)
    assert same(run(f.schedule(0), given), made)


def test_a_read_of_what_lies_behind_is_legal_and_one_of_what_lies_ahead_is_not():
    text = """
    for i in range(1, N):
        B[i] = A[i]
    for i in range(1, N):
        C[i] = B[i {0} 1] + B[i]
    """
    behind = fuses(text.format("-"), N=9)
    assert behind.legal and {d.distances.ranges[0] for d in behind.dependences} == {(0, 0), (1, 1)}
    ahead = fuses(text.format("+"), N=9)
    assert not ahead.legal and ahead.depth == 0
    assert "RAW on B" in ahead.reason and "distance (-1)" in ahead.reason and "prevents fusion" in ahead.reason
    assert ahead.shift == ((0,), (1,))  # one iteration later it can


def test_an_antidependence_and_an_output_dependence_prevent_too():
    anti = fuses("for i in range(1, N):\n  B[i] = A[i - 1]\nfor i in range(1, N):\n  A[i] = 0.5\n", N=8)
    (war,) = [d for d in anti.dependences if d.kind is WAR]
    assert war.distances.ranges == ((-1, -1),) and war.prevents and not anti.legal
    output = fuses("for i in range(N):\n  A[i + 1] = 1.0 + i\nfor i in range(N):\n  A[i + 2] = 2.0 * i\n", N=8)
    (waw,) = [d for d in output.dependences if d.kind is WAW]
    assert waw.distances.ranges == ((-1, -1),) and waw.prevents and not output.legal
    reads = fuses("for i in range(N):\n  B[i] = A[i]\nfor i in range(N):\n  C[i] = A[i + 1]\n", N=8)
    (rar,) = reads.dependences
    assert rar.kind is RAR and rar.distances.ranges == ((-1, -1),) and not rar.prevents and reads.legal


def test_softmax_fuses_over_rows_only():
    """A sum over a row must be complete before it is divided by: fused over i, not over j."""
    f = fuses(
        """
        for i in range(N):
            for j in range(M):
                s[i] += exp(A[i, j])
        for i in range(N):
            for j in range(M):
                P[i, j] = exp(A[i, j]) / s[i]
        """, N=4, M=5)  # fmt: skip
    assert f.depth == 1 and not f.legal and "on s" in f.reason and f.shift is None
    assert "for j in range(0, 5):" in f.source() and f.source().count("for i") == 1


def test_stencils_fuse_with_a_delay_and_then_in_tiles():
    text = """
    for i in range(1, N):
        for j in range(1, M):
            B[i, j] = A[i - 1, j] + A[i + 1, j] + A[i, j - 1] + A[i, j + 1]
    for i in range(1, N):
        for j in range(1, M):
            C[i, j] = B[i - 1, j] + B[i + 1, j] + B[i, j - 1] + B[i, j + 1]
    """
    f = fuses(text, N=9, M=8)
    assert f.depth == 0 and f.shift == ((0, 0), (1, 1))
    given = arrays(f.nests)
    wanted = run(f.schedule(0), given)
    tiled = TileFusion(*f.nests)
    assert tiled.why_not() is None and tiled.extents == (9, 8)
    for tile in ((1, 1), (2, 3), (3, 2), (4, 8), (100, 1)):
        assert same(run(tiled.schedule(tile), given), wanted)


def test_matrix_product_in_tiles():
    (nest,) = parse(
        "for i in range(N):\n  for j in range(N):\n    for k in range(N):\n      C[i, j] += A[i, k] * B[k, j]\n", N=6
    )
    t = TileFusion(nest)
    assert t.why_not() is None
    given = arrays([nest])
    wanted = run(one_by_one([nest]), given)
    np.testing.assert_allclose(wanted["C"], given["C"] + given["A"] @ given["B"])
    for tile in ((2, 2, 2), (3, 4, 5), (6, 1, 2)):
        assert same(run(t.schedule(tile), given), wanted)  # k keeps its order, so that even the roundings are the same
        plan = t.cost(tile)
        a, b, c = tile
        assert plan.footprint == a * b + a * c + c * b
        assert plan.tiles == -(-6 // a) * -(-6 // b) * -(-6 // c)


def test_the_best_tile_is_the_best_of_all_and_fits():
    (nest,) = parse(
        "for i in range(N):\n  for j in range(N):\n    for k in range(N):\n      C[i, j] += A[i, k] * B[k, j]\n", N=64
    )
    t = TileFusion(nest)
    plan = t.best(1024)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    least = min(
        (64 // a) * (64 // b) * (64 // c) * (a * b + a * c + c * b)
        for a, b, c in itertools.product(sizes, repeat=3)
        if a * b + a * c + c * b <= 1024
    )
    assert plan.footprint <= 1024 and plan.traffic == least
    assert t.best(10**6).tile == (64, 64, 64) and t.best(10**6).traffic == 3 * 64 * 64
    with pytest.raises(ValueError, match="capacity: a tile of one iteration touches 3 elements, not 2"):
        t.best(2)


def test_a_skewed_recurrence_must_not_be_tiled():
    """The textbook case of a distance (1, -1)."""
    (nest,) = parse("for i in range(1, N):\n  for j in range(N):\n    A[i, j] = A[i - 1, j + 1] + 1\n", N=7)
    t = TileFusion(nest)
    assert "(-1, 1)" in t.why_not()  # the write lies (1, -1) before the read
    given = arrays([nest])
    wanted = run(one_by_one([nest]), given)
    assert not same(run(t.schedule((3, 3)), given), wanted)
    assert same(run(t.schedule((1, 3)), given), wanted)  # the outer loop carries it, so the inner one may be cut
    with pytest.raises(ValueError, match="tiles are not legal"):
        t.best(100)


def test_bounds_that_differ():
    f = fuses("for i in range(N):\n  B[i] = A[i]\nfor i in range(N + 1):\n  C[i] = A[i]\n", N=6)
    assert f.depth == 0 and f.shift is None and f.reason == "loop 1 has different bounds: (0, 6), (0, 7)"
    deeper = fuses(
        "for i in range(N):\n  s[i] = 0\nfor i in range(N):\n  for j in range(N):\n    s[i] += A[i, j]\n", N=5
    )
    assert deeper.depth == 1 and deeper.reason.startswith("loop 2 has different bounds")
    with pytest.raises(ValueError, match="nests: expected the same bounds"):
        TileFusion(*f.nests)


def test_three_nests():
    f = fuses(
        "for i in range(1, N):\n  B[i] = A[i]\nfor i in range(1, N):\n  C[i] = B[i + 1]\nfor i in range(1, N):\n"
        "  D[i] = C[i + 2] + B[i]\n",
        N=12,
    )
    assert f.depth == 0 and f.shift == ((0,), (1,), (3,))


def test_a_delay_as_long_as_the_loop_is_none():
    f = fuses("for i in range(N):\n  B[i] = A[i]\nfor i in range(N):\n  C[i] = B[N - 1 - i]\n", N=6)
    assert f.depth == 0 and f.shift is None
    assert any(vectors(d.distances) == {(x,) for x in range(-5, 6, 2)} for d in f.dependences)


# ----------------------------------------------------------------------------------------------------------- by chance

_index = st.tuples(st.sampled_from([(1, 0), (0, 1), (1, 1), (2, 0), (1, -1), (0, 0), (0, 2)]), st.integers(-2, 2))
_access = st.tuples(st.sampled_from("AB"), _index, _index)


@st.composite
def _nests(draw):
    low, n, m = draw(st.integers(0, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def text(access):
        array, *indices = access
        return f"{array}[{', '.join(f'{a} * i + {b} * j + {o + 12}' for (a, b), o in indices)}]"

    loops = []
    for _ in range(draw(st.integers(2, 3))):
        write, *reads = (text(draw(_access)) for _ in range(3))
        loops.append(
            f"for i in range({low}, {low + n}):\n  for j in range({m}):\n    {write} = {reads[0]} - 2 * {reads[1]} +"
            f" i * 3 + j * j"
        )
    return parse("\n".join(loops))


def _pairs(a, b, first, second):
    return {
        tuple(y - x for x, y in zip(p, q))
        for p in first.points()
        for q in second.points()
        if a.span([(x, x + 1) for x in p]) == b.span([(x, x + 1) for x in q])
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(_nests())
def test_distances_are_those_of_listing_all_pairs(nests):
    first, second = nests[:2]
    for a in first.accesses:
        for b in second.accesses:
            wanted = _pairs(a, b, first, second) if a.array == b.array else set()
            found = distances(a, b, first, second)
            if found is None:
                assert not wanted
                continue
            assert vectors(found) == wanted
            assert found.ranges == tuple((min(v[k] for v in wanted), max(v[k] for v in wanted)) for k in range(2))
            for depth in (1, 2):
                assert found.before(depth) == any(v[:depth] < (0,) * depth for v in wanted)


@settings(max_examples=60, deadline=None)
@given(_nests(), st.integers(1, 3), st.integers(1, 3))
def test_what_is_legal_gives_the_same_result(nests, a, b):
    f = LoopFusionAnalyzer(*nests)
    given_arrays = {name: np.random.default_rng(0).normal(size=(40, 40)) for name in "AB"}
    wanted = run(f.schedule(0), given_arrays)
    assert same(run(f.schedule(), given_arrays), wanted)
    if f.shift is not None:
        assert same(run(f.schedule(2, f.shift), given_arrays), wanted)
    t = TileFusion(*nests)
    if t.why_not() is None:
        assert same(run(t.schedule((a, b)), given_arrays), wanted)
    single = TileFusion(nests[0])
    if single.why_not() is None:
        assert same(run(single.schedule((a, b)), given_arrays), run(one_by_one(nests[:1]), given_arrays))


def test_distances_are_exact_however_many_iterations_there_are():
    first, second = parse(
        "for i in range(N):\n  for j in range(N):\n    A[i + j, 0] = 1\n"
        "for i in range(N):\n  for j in range(N):\n    B[i, j] = A[i - j + N, 0]\n",
        N=10**6,
    )
    d = distances(first.accesses[-1], second.accesses[0], first, second)
    assert d.before(1) and d.ranges == ((1 - 10**6, 10**6 - 2), (1 - 10**6, 10**6 - 1))
    f = LoopFusionAnalyzer(first, second)
    assert f.depth == 0 and "prevents fusion" in f.reason
    nest = "for i in range(N):\n  for j in range(N):\n    "
    big = parse(f"{nest}A[i, j] = 1\n{nest}B[i, j] = A[i, j]\n", N=10**6)
    assert LoopFusionAnalyzer(*big).legal


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "text, said",
    [
        ("A[0] = 1", "outside of a loop"),
        ("for i in range(0, 8, 2):\n  A[i] = 1", "a range with a step"),
        ("for i in range(8):\n  for j in range(i):\n    A[i, j] = 1", "the bound `i` depends on another loop's"),
        ("for i in range(8):\n  A[i * i] = 1", "`i * i` is not affine"),
        ("for i in range(8):\n  A[B[i]] = 1", "`B[i]` is not affine"),
        ("for i in range(n):\n  A[i] = 1", "n has no value; if it is a size, give its value (--size n=1024)"),
        ("for i in range(8):\n  A[i] = f(i)", "`f(i)` in an expression"),
        ("for i in range(8):\n  A[i] = __import__('os')", "in an expression"),
        ("for i in range(8):\n  s = 1", "`s` is no element of an array"),
        ("for i in range(8):\n  B[i] = 1\n  for j in range(8):\n    A[i, j] = 1", "the nest is not perfect"),
        ("for i in A:\n  A[i] = 1", "a loop over `A`"),
        ("for i in range(8)\n  A[i] = 1", "expected ':'"),
        ("", "no loop"),
    ],
)
def test_bad_nests(text, said):
    with pytest.raises(NestError) as e:
        parse(text)
    assert said in str(e.value) and "supported are perfectly nested" in str(e.value)


def test_bad_arguments():
    (nest,) = parse("for i in range(4):\n  A[i] = A[i + 1]")
    with pytest.raises(ValueError, match="nests: expected at least two, not 1"):
        LoopFusionAnalyzer(nest)
    with pytest.raises(ValueError, match="arrays: A is missing"):
        run(one_by_one([nest]), {})
    with pytest.raises(ValueError, match=r"A\[i \+ 1\] leaves A of shape \(4,\)"):
        run(one_by_one([nest]), {"A": np.zeros(4)})
    with pytest.raises(ValueError, match="dimensions"):
        run(one_by_one([nest]), {"A": np.zeros((5, 5))})
    with pytest.raises(ValueError, match="depth: expected 0 to 1"):
        LoopFusionAnalyzer(nest, nest).schedule(2)
    with pytest.raises(ValueError, match="tile: expected 1 size of"):
        TileFusion(nest).cost((0,))
