"""The logic of tuning: spaces with reasons, and a search whose timer says what it is told to."""

from dataclasses import dataclass

import pytest

from nanovllm.tune import Budget, Skipped, Space, search
from nanovllm.tune.search import FINAL, FULL, QUICK
from nanovllm.tune.space import candidates_of, distance, nearest, powers


@dataclass(frozen=True)
class Plan:
    n: int
    tma: bool = False


@dataclass(frozen=True)
class Other:
    n: int
    more: int = 1


def test_each_rule_says_why_and_is_counted():
    values = {"n": powers(32, 128), "tma": (False, True)}
    rules = {"too wide": lambda p: p.n > 64 and not p.tma, "never first": lambda p: p.n > 64 and not p.tma}
    space = Space(Plan, values, rules, lambda p: f"{p.n} cannot be loaded so" if p.tma and p.n == 32 else None)
    found = candidates_of([space], Plan(64))
    assert found.plans == [Plan(64), Plan(32), Plan(64, True), Plan(128, True)] and found.total == 6
    assert found.left_out == {"too wide": 1, "the kernel: 32 cannot be loaded so": 1} and powers(2, 1) == ()


def test_the_nearest_come_first_and_classes_alternate():
    assert distance(Plan(8), Plan(32, True)) == 3 and distance(Plan(8), Other(16)) == distance(Plan(0), Plan(4)) == 1
    plans = [Other(n) for n in powers(1, 4)] + [Plan(n) for n in powers(1, 64)]
    order = nearest(plans, {}, Plan(32))
    assert order[:6] == [Plan(32), Other(4), Plan(16), Other(2), Plan(64), Other(1)]
    assert order[6:8] == [Plan(8), Plan(4)]
    # Later they are those near the fastest of each class.
    order = nearest(plans, {Plan(32): 3.0, Plan(2): 1.0, Other(1): 9.0}, Plan(32))
    assert order[:4] == [Plan(2), Other(1), Plan(1), Other(2)]


class Timer:
    """Seconds by n of the plan; notes every call. A plan with a text is skipped for that reason."""

    def __init__(self, seconds, wrong=()):
        self.seconds = seconds if isinstance(seconds, dict) else dict(enumerate(seconds, 1))
        self.wrong, self.calls, self.batches = wrong, [], []

    def measure(self, plan, rounds):
        self.calls.append((plan.n, rounds))
        if isinstance(self.seconds[plan.n], str):
            raise Skipped(self.seconds[plan.n])
        return self.seconds[plan.n]

    def verify(self, plan):
        if plan.n in self.wrong:
            raise Skipped(f"wrong result: {plan.n} is off")

    def prepare(self, batch):
        self.batches.append([plan.n for plan in batch])

    def run(self, default=None, **options):
        """The clock goes on by a second with each measurement."""
        plans, default = [Plan(n) for n in self.seconds], None if default is None else Plan(default)
        options |= {"prepare": self.prepare, "clock": lambda: float(len(self.calls))}
        return search(plans, self.measure, self.verify, default=default, **options)

    def rounds(self, n):
        return [r for called, r in self.calls if called == n]


def ranking(found):
    return [(plan.n, seconds) for plan, seconds in found.ranking.items()]


def test_the_fastest_right_plan_wins_and_wrong_ones_are_counted():
    found = Timer([3.0, 1.0, 1.1, 0.5], wrong={4}).run()
    assert ranking(found)[:2] == [(2, 1.0), (3, 1.1)] and found.tried == 4 and found.skipped == {"wrong result": 1}
    assert found.untried == 0 and found.stopped is None
    # A wrong plan is fast because it does nothing: no other is given up for it.
    found = Timer([0.001, 2.0, 1.0], wrong={1}).run()
    assert ranking(found)[0] == (3, 1.0) and found.slower == 0


def test_a_clearly_slower_plan_is_measured_no_further():
    timer = Timer([1.0, 1.3, 1.1])
    assert timer.run(budget=Budget(slower=1.2)).slower == 1
    assert timer.rounds(2) == [QUICK] and timer.rounds(3)[:2] == [QUICK, FULL]
    assert timer.rounds(1) == [QUICK, FULL, FINAL, FINAL]


def test_what_cannot_run_is_counted_by_reason():
    found = Timer(["out of shared memory: 300 KiB", "out of shared memory: 400 KiB", "does not compile: x", 1.0]).run()
    assert ranking(found) == [(4, 1.0)] and found.tried == 1
    assert found.skipped == {"out of shared memory": 2, "does not compile": 1}
    found = Timer([1.0, "does not compile: x"], wrong={1}).run()
    assert not found.ranking and found.skipped.total() == 2
    assert not search([], lambda c, r: 1.0, lambda c: None).ranking


@pytest.mark.parametrize(
    "seconds, wrong, order",
    [
        ([0.995, 2.0, 1.0], (), [3, 1]),  # less than 2 % faster
        ([0.9, 2.0, 1.0], (), [1, 3]),
        ([*(0.1 + i / 1000 for i in range(9)), 5.0], (), [1, 2, 3, 10]),  # far behind, and measured in the end
        ([1.0, 0.5], {2}, [1]),
    ],
)
def test_the_built_in_choice_is_kept_unless_another_is_faster_by_the_margin(seconds, wrong, order):
    timer = Timer(seconds, wrong)
    found = timer.run(default=len(seconds))
    assert [n for n, _ in ranking(found) if seconds[n - 1] != 2.0] == order
    assert timer.calls[0] == (len(seconds), QUICK)  # first, so that a limit cannot leave it out


def test_the_search_follows_the_fastest_plan():
    """From 64, whose neighbours are faster and faster down to 2, it gets there without trying what lies above."""
    timer = Timer({n: float(n) if n >= 2 else 9.0 for n in powers(1, 1 << 20)})
    found = timer.run(default=64, budget=Budget(batch=3, patience=5))
    assert ranking(found)[0] == (2, 2.0) and found.stopped == "no improvement in 5 candidates" and found.tried < 16
    assert timer.batches[:2] == [[64, 32, 128], [16, 8, 4]]


def test_plans_are_prepared_in_batches_and_once():
    timer = Timer([1.0] * 10)
    timer.run(budget=Budget(batch=4), default=8)
    assert [len(b) for b in timer.batches] == [4, 4, 2] and timer.batches[0][0] == 8
    assert sorted(sum(timer.batches, [])) == list(range(1, 11)) and timer.rounds(8).count(QUICK) == 1


def test_limits_end_the_search():
    # Two measurements each; the time is looked at every 4 plans.
    found = Timer([1.0] * 100).run(budget=Budget(seconds=10, batch=4), default=1)
    assert found.stopped == "time limit of 10 s" and found.tried == 8 and found.untried == 92
    assert ranking(found)[0] == (1, 1.0)
    # Also where nothing is right yet.
    found = Timer(["does not compile: x"] * 20).run(budget=Budget(seconds=5, batch=1))
    assert not found.ranking and found.stopped == "time limit of 5 s" and found.untried == 15
    found = Timer([1.0] * 50, wrong=set(range(51))).run(budget=Budget(patience=7))
    assert not found.ranking and found.untried == 43 and found.stopped == "no improvement in 7 candidates"
    found = Timer([1.0] * 50).run(budget=Budget(most=20))
    assert found.tried == 20 and found.untried == 30 and found.stopped == "limit of 20 candidates"
    assert Timer([1.0] * 20).run(budget=Budget(most=20)).stopped is None


@pytest.mark.parametrize("at", [1, 2])
def test_a_finalist_that_cannot_be_measured_again_makes_room(at):
    class Failing(Timer):
        finals = 0

        def measure(self, plan, rounds):
            if rounds == FINAL and plan.n == 2:
                self.finals += 1
                if self.finals == at:
                    raise Skipped("out of memory: 3 GiB")
            return super().measure(plan, rounds)

    timer = Failing([3.0, 1.0, 1.1, 2.0])
    found = timer.run(default=4, budget=Budget(slower=9))
    assert ranking(found) == [(3, 1.1), (4, 2.0)] and timer.finals == at and found.skipped == {"out of memory": 1}


def test_other_errors_are_not_swallowed():
    def broken(plan, rounds):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        search([Plan(1)], broken, lambda c: None)


def test_factors_below_1_are_refused():
    with pytest.raises(ValueError, match="slower, margin"):
        Budget(slower=0.5)
