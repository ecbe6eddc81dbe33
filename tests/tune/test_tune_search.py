"""The logic of tuning: spaces with reasons, and a search whose timer says what it is told to."""

import pytest

from nanovllm.tune import Budget, Constraint, Parameter, Skipped, TuningSpace, search
from nanovllm.tune.search import FINAL, FULL, QUICK, ordered
from nanovllm.tune.space import powers, prune


def space(*constraints):
    parameters = [
        Parameter("block", (64, 128)), Parameter("tma", (False, True)),
        Parameter("flatten", (False, True), when=lambda c: c["tma"], otherwise=False),
    ]  # fmt: skip
    return TuningSpace(lambda block, tma, flatten: (block, tma, flatten), parameters, constraints)


def test_combinations_are_all_there_once_and_in_order():
    kept, pruned = space().split()
    assert kept == [(b, t, f) for b in (64, 128) for t, f in ((False, False), (True, False), (True, True))]
    assert pruned.total == 0 and powers(4, 32) == (4, 8, 16, 32) and powers(2, 1) == ()


def test_each_constraint_says_why_and_is_counted():
    constraints = [
        Constraint("too wide", lambda c: c["block"] > 64 and not c["tma"]),
        Constraint("refused", lambda c: f"block {c['block']} cannot be flattened" if c["flatten"] else None),
        Constraint("never", lambda c: False),
    ]
    kept, pruned = space(*constraints).split()
    assert kept == [(64, False, False), (64, True, False), (128, True, False)]
    assert pruned.counts == {
        "too wide": 1,
        "block 64 cannot be flattened": 1,
        "block 128 cannot be flattened": 1,
    }
    assert pruned.examples["too wide"] == {"block": 128, "tma": False, "flatten": False}
    # The first constraint that refuses is the reason.
    assert space(constraints[0], Constraint("later", lambda c: True)).split()[1].counts == {"too wide": 1, "later": 5}


def test_bad_spaces():
    with pytest.raises(ValueError, match="x: expected values"):
        Parameter("x", ())
    with pytest.raises(ValueError, match="x: expected distinct values"):
        Parameter("x", (1, 1))
    with pytest.raises(ValueError, match="not 'x' twice"):
        TuningSpace(dict, [Parameter("x", (1,)), Parameter("x", (2,))])


def test_prune_keeps_the_order():
    kept, pruned = prune([3, 1, 2], lambda n: "one" if n == 1 else None)
    assert kept == [3, 2] and pruned.counts == {"one": 1} and pruned.examples == {"one": 1}


class Timer:
    """Seconds by candidate; notes every call. A candidate with a text is skipped for that reason."""

    def __init__(self, seconds, wrong=(), tick=1.0):
        self.seconds, self.wrong, self.calls, self.verified, self.batches = seconds, wrong, [], [], []
        self.now, self.tick = 0.0, tick

    def measure(self, candidate, rounds):
        self.calls.append((candidate, rounds))
        self.now += self.tick
        if isinstance(self.seconds[candidate], str):
            raise Skipped(self.seconds[candidate])
        return self.seconds[candidate]

    def verify(self, candidate):
        self.verified.append(candidate)
        if candidate in self.wrong:
            raise Skipped(f"wrong result: {candidate} is off")

    def run(self, **options):
        return search(
            list(self.seconds), self.measure, self.verify, prepare=self.batches.append, clock=lambda: self.now, **options
        )  # fmt: skip

    def rounds(self, candidate):
        return [r for c, r in self.calls if c == candidate]


def test_the_fastest_right_candidate_wins_and_the_second_is_kept():
    timer = Timer({"a": 3.0, "b": 1.0, "c": 1.1, "d": 0.5}, wrong={"d"})
    found = timer.run()
    assert (found.best, found.seconds, found.runner_up, found.runner_up_seconds) == ("b", 1.0, "c", 1.1)
    assert found.tried == 4 and found.skipped == {"wrong result": 1} and found.untried == 0 and found.stopped is None
    assert found.examples["wrong result"] == {"config": "d", "message": "wrong result: d is off"}
    assert {"b", "c"} <= set(timer.verified)  # whoever is named is right


def test_a_wrong_candidate_does_not_set_the_pace():
    """It is fast because it does nothing: the others must not be given up for it."""
    timer = Timer({"wrong": 0.001, "a": 2.0, "b": 1.0}, wrong={"wrong"})
    found = timer.run()
    assert found.best == "b" and found.slower == 0


def test_a_clearly_slower_candidate_is_measured_no_further():
    timer = Timer({"a": 1.0, "slow": 1.3, "close": 1.1})
    found = timer.run(budget=Budget(slower=1.2))
    assert timer.rounds("slow") == [QUICK] and timer.rounds("close")[:2] == [QUICK, FULL] and found.slower == 1
    assert timer.rounds("a") == [QUICK, FULL, FINAL, FINAL]


def test_what_cannot_run_is_counted_by_reason():
    timer = Timer(
        {
            "a": "out of shared memory: 300 KiB",
            "b": "out of shared memory: 400 KiB",
            "c": "does not compile: x",
            "d": 1.0,
        }
    )
    found = timer.run()
    assert found.best == "d" and found.tried == 1 and found.runner_up is None
    assert found.skipped == {"out of shared memory": 2, "does not compile": 1}
    assert found.examples["out of shared memory"]["config"] == "a"


def test_nothing_right_is_no_winner():
    found = Timer({"a": 1.0, "b": "does not compile: x"}, wrong={"a"}).run()
    assert found.best is None and found.seconds is None and found.skipped.total() == 2
    assert search([], lambda c, r: 1.0, lambda c: None).best is None


def test_the_built_in_choice_is_kept_unless_another_is_faster_by_the_margin():
    close, clear = Timer({"x": 0.995, "y": 2.0, "mine": 1.0}), Timer({"x": 0.9, "y": 2.0, "mine": 1.0})
    found = close.run(default="mine", budget=Budget(margin=1.02))
    assert (found.best, found.runner_up, found.default_seconds) == ("mine", "x", 1.0)
    assert close.calls[0] == ("mine", QUICK)  # first, so that a limit cannot leave it out
    found = clear.run(default="mine", budget=Budget(margin=1.02))
    assert (found.best, found.seconds, found.default_seconds) == ("x", 0.9, 1.0)
    # A built-in choice far behind is still measured in the end, beside the winner.
    found = Timer({f"c{i}": 0.1 + i / 1000 for i in range(9)} | {"mine": 5.0}).run(default="mine")
    assert found.best == "c0" and found.default_seconds == 5.0
    found = Timer({"x": 1.0, "mine": 0.5}, wrong={"mine"}).run(default="mine")
    assert found.best == "x" and found.default_seconds is None


def test_the_time_limit_ends_the_search():
    timer = Timer({i: 1.0 for i in range(100)}, tick=1.0)  # two measurements each; looked at every 4 candidates
    found = timer.run(budget=Budget(seconds=10, batch=4))
    assert found.stopped == "time limit of 10 s" and found.tried == 8 and found.untried == 92 and found.best == 0
    # Also where nothing is right yet.
    late = Timer({i: "does not compile: x" for i in range(20)} | {20: 1.0}, tick=1.0)
    found = late.run(budget=Budget(seconds=5, batch=1))
    assert found.best is None and found.stopped == "time limit of 5 s" and found.untried == 16


def test_patience_ends_the_search():
    seconds = {i: 1.0 - i / 100 if i < 5 else 1.0 for i in range(50)}
    found = Timer(seconds).run(budget=Budget(patience=7))
    assert found.stopped == "no improvement in 7 candidates" and found.best == 4 and found.tried == 12
    found = Timer({i: 1.0 for i in range(50)}, wrong=set(range(50))).run(budget=Budget(patience=7))
    assert found.best is None and found.untried == 43 and found.stopped == "no improvement in 7 candidates"


@pytest.mark.parametrize("at", [1, 2])
def test_a_finalist_that_cannot_be_measured_again_makes_room(at):
    timer = Timer({"a": 3.0, "b": 1.0, "c": 1.1, "mine": 2.0})
    finals = []

    def measure(candidate, rounds):
        if rounds == FINAL and candidate == "b":
            finals.append(candidate)
            if len(finals) == at:
                raise Skipped("out of memory: 3 GiB")
        return timer.measure(candidate, rounds)

    found = search(list(timer.seconds), measure, timer.verify, default="mine", budget=Budget(slower=9))
    assert (found.best, found.runner_up, found.default_seconds) == ("c", "mine", 2.0) and found.skipped == {
        "out of memory": 1
    }
    assert len(finals) == at

    def never(candidate, rounds):
        if rounds == FINAL:
            raise Skipped("out of memory: 3 GiB")
        return 1.0

    found = search(["a", "b"], never, timer.verify)
    assert found.best is None and found.skipped == {"out of memory": 2}


def test_the_order_is_repeatable():
    order = list(range(40))
    assert ordered(order, "exhaustive", 1) == order
    assert ordered(order, "random", 1) == ordered(order, "random", 1) != ordered(order, "random", 2)
    assert sorted(ordered(order, "random", 1)) == order
    with pytest.raises(ValueError, match="search: expected one of exhaustive, random, not 'best'"):
        ordered(order, "best", 0)
    runs = [Timer({i: 1.0 + (i * 7 % 13) / 10 for i in range(40)}) for _ in range(2)]
    found = [t.run(strategy="random", seed=3, budget=Budget(patience=10)) for t in runs]
    assert runs[0].calls == runs[1].calls and found[0] == found[1]


def test_candidates_are_prepared_in_batches_and_once():
    timer = Timer({i: 1.0 for i in range(10)})
    timer.run(budget=Budget(batch=4), default=7)
    assert [list(b) for b in timer.batches] == [[7, 0, 1, 2], [3, 4, 5, 6], [8, 9]]
    assert len([c for c, r in timer.calls if c == 7 and r == QUICK]) == 1


def test_other_errors_are_not_swallowed():
    def broken(candidate, rounds):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        search([1, 2], broken, lambda c: None)


@pytest.mark.parametrize("options, said", [({"seconds": 0}, "limit: expected"), ({"patience": 0}, "patience: expected"), ({"slower": 0.5}, "slower, margin")])  # fmt: skip
def test_bad_budgets(options, said):
    with pytest.raises(ValueError, match=said):
        Budget(**options)
